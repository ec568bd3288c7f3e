// mul_mat_vec: d[m, n] = scale * sum_k a[k, m] * b[k, n] (+ bias[m]) (+ residual[m, n]), for COLS activations at once
// a: rows of any format; b: F32 or F16; d: F32. Options, all chosen when compiled:
//   NORM     b stands for its activations after rms_norm: b[k, n] * weight[k] / sqrt(mean_k(b[k, n]^2) + eps)
//   FUNCTION d = the function of what it would be, bias included
//   GATE     d = activation(product with a) * (product with up), each with its bias
//   FACTOR   d = factor's function of its gate[m, n] * what d would be, but for the residual
//   EXPERTS  a has a matrix for each expert; activation vector (slot, token) uses the one that ids[slot, token] names
//   TURNS    of a loop: that many experts of one token share its activation vector, and are more rows of it
//   SUMMED   that many experts of a token are summed: their rows, of SUMMAND elements each, are one row, and so are their activations
//   MATRICES up to three matrices of one format share b, each with its own result
//   INT      activations are rounded to 8 or (WIDE) 16 bits, 32 at a time, and multiplied as integers: by this workgroup (STAGED),
//            by who made them (GIVEN) or by a launch before
//   ROUNDING d, one activation vector, is left rounded as well (`rounded.glsl`), after ROUNDING_WEIGHT: what the teams of a workgroup make at a
//            time are whole groups of 32 neighbouring rows
// A team of ROW_GROUP threads (the workgroup, a subgroup, with PART a part of one, for rows too short for all of it, or one thread) computes ROWS rows at once: a unit. Its threads share a row's
// slices; a slice is what `slices.glsl` says. Rows past the last are computed again as the last and not stored, so the bits
// of a row do not depend on the number of rows.
//   PERSISTENT     there are as many workgroups as run at once, and teams go from unit to unit: activations are made ready once for
//            all of a workgroup's rows. Loads are PREFETCH slices ahead, those of the next unit too.
//   RING           no condition stands around a load: a thread with nothing left to load loads its last slice again, which the cache
//            has. A driver may wait for the loads behind a branch where that branch ends.
#version 450
#define GRID_WAIT_LATE 1
#include "kiln.glsl"
layout(local_size_x = WG) in;
#if SUBGROUPS
#extension GL_KHR_shader_subgroup_arithmetic : require
#endif
#if PART
#extension GL_KHR_shader_subgroup_shuffle : require
// Every thread of the team gets the sum.
float add_up(float x) {
    [[unroll]] for (uint i = 1; i < ROW_GROUP; i *= 2) x += subgroupShuffleXor(x, i);
    return x;
}
#elif ROW_GROUP == 1
#define add_up(x) (x)
#else
#define add_up(x) subgroupAdd(x)
#endif
#include "formats.glsl"
#include "mul_mat_vec/slices.glsl"
#include "rounding.glsl"
#if GIVEN || ROUNDING
#include "rounded.glsl"
#endif
#if GATE || FUNCTION || FACTOR
#include "activations.glsl"
#endif

#define MATS (1 + GATE)
#define ROW_GROUPS (WG / ROW_GROUP)
#define SUMS (MATS * ROWS * COLS)

float acc[MATS][ROWS][COLS];
uvec2 rows[MATS][ROWS];
uvec2 columns[COLS];
float factor[COLS];
// Number of the first of these activations among all of b's.
uint first_column = 0;
Slice prefetch[PREFETCH][MATS][ROWS];

#if SUMMED
// The experts of this token, and their shares in the sum.
shared uint summed_experts[SUMMED];
#if ROUTER
shared float summed_shares[SUMMED];
#define SHARE_OF(e) summed_shares[(e) / SUMMAND]
#endif
#endif
#ifndef SHARE_OF
#define SHARE_OF(e) 1.0
#endif
#if TURNS > 1
// The experts of the token.
shared uint turn_experts[TURNS];
#endif

#include "mul_mat_vec/load_activations.glsl"
#include "mul_mat_vec/products.glsl"
#if ROUNDING
#include "mul_mat_vec/rounding.glsl"
#endif

#if ROW_GROUP == WG
#if SUBGROUPS
shared float partial[SUMS][SUBGROUPS_MOST];
#else
shared float partial[1][WG];
#endif
#endif

// Sum over the team, the same bits every run. Only the team's first thread needs it.
#if ROW_GROUP != WG || WG == 1
#define PREPARE_SUMS()
float team_sum(uint i, float x) {
#if WG > 1
    return add_up(x);
#else
    return x;
#endif
}
#elif SUBGROUPS
// All partial sums are put down first, so that one barrier does for all of them; those of the unit before are read by now.
void prepare_sums() {
#if PERSISTENT
    barrier();
#endif
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

// The batch, and where it begins: which matrix of a, which activations.
uint batch;
#if EXPERTS
uint slot, token, expert;
#endif
uvec2 batch_a(uvec2 a) {
#if SUMMED
    return a;
#elif EXPERTS
    return row_address(a, expert, p.a_expert);
#elif BATCHES
    return row_address(row_address(a, batch % p.b2 / p.share[0], p.a_batch[0]), batch / p.b2 / p.share[1], p.a_batch[1]);
#else
    return a;
#endif
}

// Units, counted through all matrices.
#define UNITS(m) (((m) + ROWS - 1) / ROWS)
uint all_units() {
    uint n = UNITS(p.m);
#if MATRICES > 1
    n += UNITS(p.m1);
#endif
#if MATRICES > 2
    n += UNITS(p.m2);
#endif
    return n * TURNS;
}

// The matrix of a unit and its place there.
struct Place {
    uint first, m, d_stride;
    uvec2 a, d;
#if BIAS
    uvec2 bias;
#endif
};
Place place_of(uint unit) {
    Place x;
#if TURNS > 1
    slot = unit / UNITS(p.m), expert = turn_experts[slot];
    unit -= slot * UNITS(p.m);
#endif
    x.m = p.m, x.d_stride = p.d_stride, x.a = p.a, x.d = p.d;
#if BIAS
    x.bias = p.bias;
#endif
#if MATRICES > 1
    if (unit >= UNITS(p.m)) {
        unit -= UNITS(p.m);
        x.m = p.m1, x.d_stride = p.d_stride1, x.a = p.a1, x.d = p.d1;
#if BIAS
        x.bias = p.bias1;
#endif
#if MATRICES > 2
        if (unit >= UNITS(p.m1)) {
            unit -= UNITS(p.m1);
            x.m = p.m2, x.d_stride = p.d_stride2, x.a = p.a2, x.d = p.d2;
#if BIAS
            x.bias = p.bias2;
#endif
        }
#endif
    }
#endif
    x.first = unit * ROWS;
    return x;
}

#include "mul_mat_vec/loads.glsl"

#if RESIDUAL
// What is added to the unit's results, asked for when it begins.
float held_residual[ROWS][COLS];
uvec2 batch_residual() {
#if SUMMED
    return row_address(p.residual, token, p.residual_token);
#elif EXPERTS
    return row_address(row_address(p.residual, slot, p.residual_stride), token, p.residual_token);
#elif BATCHES
    return row_address(row_address(p.residual, batch % p.b2, p.residual_batch[0]), batch / p.b2, p.residual_batch[1]);
#else
    return p.residual;
#endif
}
#endif

#if FACTOR
// What the unit's results are multiplied by, before the function.
float held_factor[ROWS][COLS];
#endif

// Whether a thread asks for what results are put together with: the one that needs it, or with RING every one.
#if RING
#define ASKS true
#else
#define ASKS (lane == 0 && unit < units)
#endif
void start_unit(uint unit, uint units, uint lane) {
#if RING
    unit = min(unit, units - 1);
#endif
#if RESIDUAL
    if (ASKS) {
        Place x = place_of(unit);
        uvec2 residual = batch_residual();
        [[unroll]] for (uint r = 0; r < ROWS; r++)
            [[unroll]] for (uint c = 0; c < COLS; c++)
                held_residual[r][c] = F32(row_address(residual, c, p.residual_stride)).v[min(x.first + r, x.m - 1)];
    }
#endif
#if FACTOR
    if (ASKS) {
        Place x = place_of(unit);
        [[unroll]] for (uint r = 0; r < ROWS; r++)
            [[unroll]] for (uint c = 0; c < COLS; c++)
                held_factor[r][c] = F32(row_address(p.factor, c, p.factor_stride)).v[min(x.first + r, x.m - 1)];
    }
#endif
    start_row();
    [[unroll]] for (uint i = 0; i < MATS; i++)
        [[unroll]] for (uint r = 0; r < ROWS; r++)
            [[unroll]] for (uint c = 0; c < COLS; c++) acc[i][r][c] = 0;
}

// Adds up a unit's sums, finishes them and stores them. With ROUNDING its first row is number `kept` of what the workgroup makes.
void store_unit(uint unit, uint lane, uint kept) {
    Place x = place_of(unit);
    uvec2 d = x.d;
#if SUMMED
    d = row_address(d, token, p.d_token);
#elif EXPERTS
    d = row_address(row_address(d, slot, x.d_stride), token, p.d_token);
#if ROUTER && !SUMMED
    float share = F32(row_address(p.router, token, p.router_stride)).v[slot];
#endif
#elif BATCHES
    d = row_address(row_address(d, batch % p.b2, p.d_batch[0]), batch / p.b2, p.d_batch[1]);
#endif
    finish_columns();
    PREPARE_SUMS();
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            float sum = team_sum(r * COLS + c, acc[0][r][c]) * factor[c];
#if GATE
            float sum_up = team_sum((ROWS + r) * COLS + c, acc[1][r][c]) * factor[c];
#endif
            uint row = x.first + r;
            if (lane == 0 && row < x.m) {
#if EXPERTS && !SUMMED
                uint bias_at = expert * x.m + row;
#else
                uint bias_at = row;
#endif
#if BIAS && SUMMED
                [[unroll]] for (uint s = 0; s < SUMMED; s++)
                    sum += SHARE_OF(s * SUMMAND) * F32(x.bias).v[summed_experts[s] * x.m + row];
#elif BIAS
                sum += F32(x.bias).v[bias_at];
#endif
#if FUNCTION
                sum = FUNCTION_OF(sum);
#endif
#if GATE
#if UP_BIAS
                sum_up += F32(p.up_bias).v[bias_at];
#endif
                sum = gated(sum, sum_up);
#endif
#if EXPERTS && ROUTER && !SUMMED
                sum *= share;
#endif
#if FACTOR
                sum *= FACTOR_OF(held_factor[r][c]);
#endif
#if RESIDUAL
                sum += held_residual[r][c];
#endif
#if EXPERTS
                F32(d).v[row] = sum;
#else
                F32(row_address(d, c, x.d_stride)).v[row] = sum;
#endif
#if ROUNDING
                keep_result(kept + r, sum);
#endif
            }
        }
    }
}

void main() {
    A_INIT();
#if EXPERTS
    // Which weights come first is what others say.
    grid_wait();
#endif
    uint units = all_units(), group = group_index();
#if PERSISTENT
    batch = 0;
    uint stride = gl_NumWorkGroups.x * ROW_GROUPS;
#else
    uint groups = (units + ROW_GROUPS - 1) / ROW_GROUPS, stride = groups * ROW_GROUPS;
    batch = group / groups;
    group -= batch * groups;
    if (batch >= p.batches) return;
#endif
    uvec2 b = p.b;
#if SUMMED
    slot = 0, token = batch, expert = 0;
    for (uint s = gl_LocalInvocationIndex; s < SUMMED; s += WG) {
        summed_experts[s] = U32(row_address(p.ids, token, p.ids_stride)).v[s];
#if ROUTER
        summed_shares[s] = F32(row_address(p.router, token, p.router_stride)).v[s];
#endif
    }
    barrier();
    b = row_address(b, token, p.b_token);
    columns[0] = b;
#elif EXPERTS
#if TURNS > 1
    token = 0;
    for (uint s = gl_LocalInvocationIndex; s < TURNS; s += WG) turn_experts[s] = U32(p.ids).v[s];
    barrier();
#endif
    slot = batch % p.used, token = batch / p.used;
    expert = U32(row_address(p.ids, token, p.ids_stride)).v[slot];
    b = row_address(row_address(b, slot, p.b_slot), token, p.b_token);
    first_column = token * p.b1 + slot % p.b1;
    columns[0] = b;
#else
#if BATCHES
    first_column = batch * COLS;
    b = row_address(row_address(b, batch % p.b2, p.b_batch[0]), batch / p.b2, p.b_batch[1]);
#endif
    [[unroll]] for (uint c = 0; c < COLS; c++) columns[c] = row_address(b, c, p.b_stride);
#endif

#if ROW_GROUP == WG
    uint row_group = 0, lane = gl_LocalInvocationID.x;
#elif ROW_GROUP == 1
    uint row_group = gl_LocalInvocationID.x;
    const uint lane = 0;
#elif PART
    uint row_group = (gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID) / ROW_GROUP, lane = gl_SubgroupInvocationID % ROW_GROUP;
#else
    uint row_group = gl_SubgroupID, lane = gl_SubgroupInvocationID;
#endif
#if INT && STAGED
    const uint n = K / SLICE;
#else
    uint n = p.k / SLICE;
#endif
#if PERSISTENT && !ROUNDING
    // Units that are left after full turns are shared out among all workgroups: a core alone could not fetch them as fast.
    uint unit = row_group * gl_NumWorkGroups.x + group;
#else
    uint unit = group * ROW_GROUPS + row_group;
#endif
#ifdef UNROLLED
#define UNIT_ROUNDS ROUNDS_OF_ROW
#else
    uint rounds = ((n + ROW_GROUP - 1) / ROW_GROUP + PREFETCH - 1) / PREFETCH;
#define UNIT_ROUNDS rounds
#endif
    // The first weights are on their way while the activations are made ready.
    load_unit = units;
    load_round = 0;
#if RING
    load_from(min(unit, units - 1));
#else
    if (unit < units) load_from(unit);
#endif
    [[unroll]] for (uint f = 0; f < PREFETCH; f++) load_slices(f, lane, n, units);
    next_round(UNIT_ROUNDS, units, stride);
#if EXPERTS == 0
    grid_wait();
#endif
    start_unit(unit, units, lane);
    start_columns(b);
    uint kept = row_group * ROWS;
    for (; unit < units; unit += stride) {
#ifdef UNROLLED
        // What it is anyway, as a number that the compiler sees.
        load_round = UNIT_ROUNDS > 1 ? 1 : 0;
        [[unroll]] for (uint round = 0; round < UNIT_ROUNDS; round++) {
#else
        for (uint round = 0; round < UNIT_ROUNDS; round++) {
#endif
            [[unroll]] for (uint f = 0; f < PREFETCH; f++) {
                uint pass = round * PREFETCH + f;
                if (INSIDE(pass)) multiply_slice(f, PLACE_OF(pass, lane), pass, lane);
                load_slices(f, lane, n, units);
            }
            next_round(UNIT_ROUNDS, units, stride);
        }
        store_unit(unit, lane, kept);
        kept += ROW_GROUPS * ROWS;
        start_unit(unit + stride, units, lane);
    }
#if ROUNDING
    round_results(group);
#endif
}
