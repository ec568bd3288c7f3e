// mul_mat_vec: d[m, n] = scale * sum_k a[k, m] * b[k, n] (+ bias[m]) (+ residual[m, n]), for COLS columns at once
// a: rows of any format; b: F32 or F16; d: F32. Options, all chosen when compiled:
//   NORM     b stands for its columns after rms_norm: b[k, n] * weight[k] / sqrt(mean_k(b[k, n]^2) + eps)
//   GATE     d = activation(product with a) * (product with up), each with its bias
//   EXPERTS  a has a matrix for each expert; column (slot, token) uses the one that ids[slot, token] names
//   MATRICES up to three matrices of one format share b, each with its own result
//   INT      columns are rounded to 8 bits, 32 at a time, and multiplied as integers: by this workgroup (STAGED) or before
// A team of TEAM threads (a subgroup or the workgroup) computes ROWS rows. Its threads share a row's slices; a slice is
// what `slices.glsl` says. Rows past the last are computed again as the last and not stored, so the bits of a row do not
// depend on the number of rows.
#version 450
#include "kiln.glsl"
layout(local_size_x = WG) in;
#if SUBGROUPS
#extension GL_KHR_shader_subgroup_arithmetic : require
#endif
#include "formats.glsl"
#include "mul_mat_vec/slices.glsl"
#if GATE
#include "activations.glsl"
#endif

#define MATS (1 + GATE)
#define TEAMS (WG / TEAM)
#define SUMS (MATS * ROWS * COLS)

float acc[MATS][ROWS][COLS];
uvec2 rows[MATS][ROWS];
uvec2 columns[COLS];
float factor[COLS];
// Number of the first of these columns among all of b's.
uint first_column = 0;
Slice flight[FLIGHT][MATS][ROWS];

#include "mul_mat_vec/columns.glsl"
#include "mul_mat_vec/products.glsl"

#if TEAM == WG
#if SUBGROUPS
shared float partial[SUMS][SUBGROUPS_MOST];
#else
shared float partial[1][WG];
#endif
#endif

// Sum over the team, the same bits every run. Only the team's first thread needs it.
#if TEAM != WG || WG == 1
#define PREPARE_SUMS()
float team_sum(uint i, float x) {
#if WG > 1
    return subgroupAdd(x);
#else
    return x;
#endif
}
#elif SUBGROUPS
// All partial sums are put down first, so that one barrier does for all of them.
void prepare_sums() {
    [[unroll]] for (uint m = 0; m < MATS; m++) [[unroll]] for (uint r = 0; r < ROWS; r++) [[unroll]] for (uint c = 0; c < COLS; c++) {
        float x = subgroupAdd(acc[m][r][c]);
        if (subgroupElect()) partial[(m * ROWS + r) * COLS + c][gl_SubgroupID] = x;
    }
    barrier();
}
#define PREPARE_SUMS() prepare_sums()
float team_sum(uint i, float x) {
    float sum = partial[i][0];
    for (uint s = 1; s < gl_NumSubgroups; s++) sum += partial[i][s];
    return sum;
}
#else
#define PREPARE_SUMS()
float team_sum(uint i, float x) {
    uint t = gl_LocalInvocationID.x;
    barrier();
    partial[0][t] = x;
    barrier();
    for (uint s = WG / 2; s > 0; s >>= 1) {
        if (t < s) partial[0][t] += partial[0][t + s];
        barrier();
    }
    return partial[0][0];
}
#endif

#if GATE
float gated(float gate, float up) {
#if GATE_OAI
    gate = min(gate, p.limit);
    return gate * sigmoid(p.alpha * gate) * (1.0 + clamp(up, -p.limit, p.limit));
#else
    return GATE_FUNCTION(gate) * up;
#endif
}
#endif

void main() {
    uint group = group_index();
    A_INIT();
    // The matrix: a, its rows, result and bias.
    uvec2 a = p.a, d = p.d;
    uint m = p.m, d_stride = p.d_stride;
#if BIAS
    uvec2 bias = p.bias;
#endif
    uint row_groups = (m + TEAMS * ROWS - 1) / (TEAMS * ROWS);
#if MATRICES > 1
    if (group >= row_groups) {
        group -= row_groups;
        a = p.a1, d = p.d1, m = p.m1, d_stride = p.d_stride1;
#if BIAS
        bias = p.bias1;
#endif
        row_groups = (m + TEAMS * ROWS - 1) / (TEAMS * ROWS);
#if MATRICES > 2
        if (group >= row_groups) {
            group -= row_groups;
            a = p.a2, d = p.d2, m = p.m2, d_stride = p.d_stride2;
#if BIAS
            bias = p.bias2;
#endif
            row_groups = (m + TEAMS * ROWS - 1) / (TEAMS * ROWS);
        }
#endif
    }
#endif
    // The batch: which matrix of a, which columns.
    uvec2 b = p.b;
    uint batch = group / row_groups;
    if (batch >= p.batches) return;
#if GATE
    uvec2 up = p.up;
#endif
#if RESIDUAL
    uvec2 residual = p.residual;
#endif
#if EXPERTS
    uint slot = batch % p.used, token = batch / p.used;
    uint expert = U32(row_address(p.ids, token, p.ids_stride)).v[slot];
    a = row_address(a, expert, p.a_expert);
    b = row_address(row_address(b, slot, p.b_slot), token, p.b_token);
    d = row_address(row_address(d, slot, d_stride), token, p.d_token);
    first_column = token * p.b1 + slot % p.b1;
#if GATE
    up = row_address(up, expert, p.a_expert);
#endif
#if RESIDUAL
    residual = row_address(row_address(residual, slot, p.residual_stride), token, p.residual_token);
#endif
#elif BATCHES
    uint i2 = batch % p.b2, i3 = batch / p.b2;
    first_column = batch * COLS;
    a = row_address(row_address(a, i2 / p.share[0], p.a_batch[0]), i3 / p.share[1], p.a_batch[1]);
    b = row_address(row_address(b, i2, p.b_batch[0]), i3, p.b_batch[1]);
    d = row_address(row_address(d, i2, p.d_batch[0]), i3, p.d_batch[1]);
#if GATE
    up = row_address(row_address(up, i2 / p.share[0], p.a_batch[0]), i3 / p.share[1], p.a_batch[1]);
#endif
#if RESIDUAL
    residual = row_address(row_address(residual, i2, p.residual_batch[0]), i3, p.residual_batch[1]);
#endif
#endif

#if TEAM == WG
    uint team = 0, lane = gl_LocalInvocationID.x;
#else
    uint team = gl_SubgroupID, lane = gl_SubgroupInvocationID;
#endif
    uint first = (group % row_groups * TEAMS + team) * ROWS;
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        uint row = min(first + r, m - 1);
        rows[0][r] = row_address(a, row, p.a_stride);
#if GATE
        rows[1][r] = row_address(up, row, p.a_stride);
#endif
    }
#if EXPERTS
    columns[0] = b;
#else
    [[unroll]] for (uint c = 0; c < COLS; c++) columns[c] = row_address(b, c, p.b_stride);
#endif
    [[unroll]] for (uint i = 0; i < MATS; i++)
        [[unroll]] for (uint r = 0; r < ROWS; r++)
            [[unroll]] for (uint c = 0; c < COLS; c++) acc[i][r][c] = 0;

    // The first weights are on their way while the columns are made ready.
    uint n = p.k / SLICE, s = lane;
    if (s < n) load_slices(s, n);
    start_columns(b);
    while (s < n) {
        multiply_slices(s, n);
        s += TEAM * FLIGHT;
        if (s < n) load_slices(s, n);
    }
    finish_columns();

#if EXPERTS && ROUTER
    float share = F32(row_address(p.router, token, p.router_stride)).v[slot];
#endif
    PREPARE_SUMS();
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            float sum = team_sum(r * COLS + c, acc[0][r][c]) * factor[c];
#if GATE
            float sum_up = team_sum((ROWS + r) * COLS + c, acc[1][r][c]) * factor[c];
#endif
            uint row = first + r;
            if (lane == 0 && row < m) {
#if EXPERTS
                uint bias_at = expert * m + row;
#else
                uint bias_at = row;
#endif
#if BIAS
                sum += F32(bias).v[bias_at];
#endif
#if GATE
#if UP_BIAS
                sum_up += F32(p.up_bias).v[bias_at];
#endif
                sum = gated(sum, sum_up);
#endif
#if EXPERTS && ROUTER
                sum *= share;
#endif
#if EXPERTS
#if RESIDUAL
                sum += F32(residual).v[row];
#endif
                F32(d).v[row] = sum;
#else
#if RESIDUAL
                sum += F32(row_address(residual, c, p.residual_stride)).v[row];
#endif
                F32(row_address(d, c, d_stride)).v[row] = sum;
#endif
            }
        }
    }
}
