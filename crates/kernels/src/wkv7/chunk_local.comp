// wkv7 in chunks, first launch: everything a chunk of C tokens knows without the state before it. In this form the state
// is key by value, S_t = diag(w_t) S_{t-1} + b_t (a_t S_{t-1}) + k_t v_t, and X[t] is row t of X.
// With ab[t][s] the sum over keys of a_t b_s times the decays between s and t (ak, rb, rk likewise; those of r take the
// decay of t along) and A, R the rows a_t, r_t times all decays before them, the rows sa_t = a_t S_{t-1} solve
//     sa = A S + ab sa + ak V,  so  sa = W S + G V  with  W = A + ab W,  G = ak + ab G  (ab is strictly lower).
// With B, K the rows b_s, k_s times all decays after them, the chunk is then
//     y = (R + rb W) S + (rk + rb G) V,   S after = (diag(decay) + B^T W) S + (K + G^T B)^T V.
// Decays are multiplied along walks from token to token and never divided by, so they may be zero or negative.
// One workgroup per (chunk, head); LANES threads share a row.
#version 450
#include "kiln.glsl"
#include "recurrence.glsl"
#include "lanes.glsl"
#include "chunk_block.glsl"

layout(local_size_x = WG) in;

#define QUADS (S / 4)
#define CHUNK_QUADS (CHUNK / 4)
#define HELD (QUADS / LANES)

// Decays, then A, then W, then V.
shared vec4 w_stage[CHUNK * QUADS];
// Keys, then K, then K + G^T B.
shared vec4 k_stage[CHUNK * QUADS];
// b, then B.
shared vec4 b_stage[CHUNK * QUADS];
shared vec4 ab[CHUNK * CHUNK_QUADS];
// ak, then G.
shared vec4 ak[CHUNK * CHUNK_QUADS];
shared vec4 rb[CHUNK * CHUNK_QUADS];
// rk, then rk + rb G.
shared vec4 rk[CHUNK * CHUNK_QUADS];
shared vec4 decay[QUADS];

void set(uint t, uint s, vec4 sums) {
    uint at = t * CHUNK_QUADS + s / 4, e = s % 4;
    ab[at][e] = sums.x;
    ak[at][e] = sums.y;
    rb[at][e] = sums.z;
    rk[at][e] = sums.w;
}

// Solves for column `column` of W or G, which stands in `matrix` of `width` quads a row.
#define SOLVE(MATRIX, WIDTH, COLUMN)                                                            \
    {                                                                                           \
        float x[CHUNK];                                                                         \
        [[unroll]] for (uint t = 0; t < CHUNK; t++) {                                           \
            x[t] = MATRIX[t * (WIDTH) + (COLUMN) / 4][(COLUMN) % 4];                            \
            [[unroll]] for (uint s = 0; s < t; s++) {                                           \
                x[t] = fma(ab[t * CHUNK_QUADS + s / 4][s % 4], x[s], x[t]);                     \
            }                                                                                   \
            MATRIX[t * (WIDTH) + (COLUMN) / 4][(COLUMN) % 4] = x[t];                            \
        }                                                                                       \
    }

void main() {
    uint group = group_index();
    uint head = group % p.heads;
    uint chunk = group / p.heads;
    if (chunk >= p.chunks) return;
    uvec2 tokens = chunk_tokens(chunk);
    uint first = tokens.x, end = tokens.y;
    if (first >= end) return;

    uint tid = thread_number();
    for (uint at = tid; at < CHUNK * QUADS; at += WG) {
        w_stage[at] = load4(p.w, first + at / QUADS, end, head, at % QUADS, 1);
        k_stage[at] = load4(p.k, first + at / QUADS, end, head, at % QUADS, 0);
        b_stage[at] = load4(p.b, first + at / QUADS, end, head, at % QUADS, 0);
    }
    // Upper triangles stay empty.
    for (uint at = tid; at < CHUNK * CHUNK_QUADS; at += WG) ab[at] = ak[at] = rb[at] = rk[at] = vec4(0);
    barrier();

    uint t = tid / LANES, lane = tid % LANES;
    vec4 a_row[HELD], r_row[HELD];
    if (t < CHUNK) {
        [[unroll]] for (uint n = 0; n < HELD; n++) {
            a_row[n] = load4(p.a, first + t, end, head, lane + n * LANES, 0);
            r_row[n] = load4(p.r, first + t, end, head, lane + n * LANES, 0);
        }
        // r sees its own token, a does not.
        vec2 own = vec2(0);
        [[unroll]] for (uint n = 0; n < HELD; n++) {
            uint at = t * QUADS + lane + n * LANES;
            own += vec2(dot4(r_row[n], b_stage[at]), dot4(r_row[n], k_stage[at]));
            r_row[n] *= w_stage[at];
        }
        own = vec2(lane_sum(own.x), lane_sum(own.y));
        if (lane == 0) set(t, t, vec4(0, 0, own));
#if SHUFFLE
        // All rows of a subgroup walk together.
        uint top = min((tid | (gl_SubgroupSize - 1)) / LANES, CHUNK - 1);
#else
        uint top = t;
#endif
        for (uint s = top; s-- > 0;) {
            vec4 sums = vec4(0);
            if (s < t) {
                vec4 on_ab = vec4(0), on_ak = vec4(0), on_rb = vec4(0), on_rk = vec4(0);
                [[unroll]] for (uint n = 0; n < HELD; n++) {
                    uint at = s * QUADS + lane + n * LANES;
                    vec4 b = b_stage[at], k = k_stage[at], w = w_stage[at];
                    on_ab = fma(a_row[n], b, on_ab);
                    on_ak = fma(a_row[n], k, on_ak);
                    on_rb = fma(r_row[n], b, on_rb);
                    on_rk = fma(r_row[n], k, on_rk);
                    a_row[n] *= w;
                    r_row[n] *= w;
                }
                sums = vec4(sum4(on_ab), sum4(on_ak), sum4(on_rb), sum4(on_rk));
            }
            [[unroll]] for (uint e = 0; e < 4; e++) sums[e] = lane_sum(sums[e]);
            if (lane == 0 && s < t) set(t, s, sums);
        }
    }
    barrier();

    if (tid < QUADS) {
        vec4 after = vec4(1);
        for (uint s = CHUNK; s-- > 0;) {
            k_stage[s * QUADS + tid] *= after;
            b_stage[s * QUADS + tid] *= after;
            after *= w_stage[s * QUADS + tid];
        }
        decay[tid] = after;
    }
    barrier();
    if (t < CHUNK) {
        [[unroll]] for (uint n = 0; n < HELD; n++) w_stage[t * QUADS + lane + n * LANES] = a_row[n];
    }
    barrier();

    for (uint column = tid; column < S + CHUNK; column += WG) {
        if (column < S) SOLVE(w_stage, QUADS, column)
        else SOLVE(ak, CHUNK_QUADS, column - S)
    }
    barrier();

    // The factor of S in y, which needs no more than its row; K + G^T B in the place of K.
    uvec2 block = chunk_block(chunk, head);
    if (t < CHUNK) {
        vec4 added[HELD];
        [[unroll]] for (uint n = 0; n < HELD; n++) added[n] = k_stage[t * QUADS + lane + n * LANES];
        for (uint s = 0; s < CHUNK; s++) {
            float weight = rb[t * CHUNK_QUADS + s / 4][s % 4], other = ak[s * CHUNK_QUADS + t / 4][t % 4];
            [[unroll]] for (uint n = 0; n < HELD; n++) {
                uint at = s * QUADS + lane + n * LANES;
                r_row[n] = fma(vec4(weight), w_stage[at], r_row[n]);
                added[n] = fma(vec4(other), b_stage[at], added[n]);
            }
        }
        [[unroll]] for (uint n = 0; n < HELD; n++) {
            k_stage[t * QUADS + lane + n * LANES] = added[n];
            F32x4(offset(block, ROWS_AT * 4)).v[t * QUADS + lane + n * LANES] = r_row[n];
        }
    }
    // rk + rb G in the place of rk.
    for (uint at = tid; at < CHUNK * CHUNK_QUADS; at += WG) {
        uint row = at / CHUNK_QUADS, quad = at % CHUNK_QUADS;
        vec4 sum = rk[at];
        for (uint s = 0; s <= row; s++) {
            sum = fma(vec4(rb[row * CHUNK_QUADS + s / 4][s % 4]), ak[s * CHUNK_QUADS + quad], sum);
        }
        rk[at] = sum;
    }
    // The transition diag(decay) + B^T W.
    for (uint at = tid; at < QUADS * QUADS; at += WG) {
        uint row = at / QUADS, quad = at % QUADS;
        vec4 sum[4];
        [[unroll]] for (uint i = 0; i < 4; i++) {
            sum[i] = vec4(0);
            if (row == quad) sum[i][i] = decay[row][i];
        }
        for (uint s = 0; s < CHUNK; s++) {
            vec4 left = b_stage[s * QUADS + row], right = w_stage[s * QUADS + quad];
            [[unroll]] for (uint i = 0; i < 4; i++) sum[i] = fma(vec4(left[i]), right, sum[i]);
        }
        [[unroll]] for (uint i = 0; i < 4; i++) F32x4(block).v[(4 * row + i) * QUADS + quad] = sum[i];
    }
    barrier();

    for (uint at = tid; at < CHUNK * QUADS; at += WG) {
        w_stage[at] = load4(p.v, first + at / QUADS, end, head, at % QUADS, 0);
    }
    barrier();
    for (uint at = tid; at < QUADS * QUADS; at += WG) {
        uint row = at / QUADS, quad = at % QUADS;
        vec4 sum[4];
        [[unroll]] for (uint i = 0; i < 4; i++) sum[i] = vec4(0);
        for (uint s = 0; s < CHUNK; s++) {
            vec4 left = k_stage[s * QUADS + row], right = w_stage[s * QUADS + quad];
            [[unroll]] for (uint i = 0; i < 4; i++) sum[i] = fma(vec4(left[i]), right, sum[i]);
        }
        F32x4 state = F32x4(offset(block, STATE_AT * 4));
        [[unroll]] for (uint i = 0; i < 4; i++) state.v[(4 * row + i) * QUADS + quad] = sum[i];
    }
    for (uint at = tid; at < (end - first) * QUADS; at += WG) {
        uint row = at / QUADS, quad = at % QUADS;
        vec4 sum = vec4(0);
        for (uint s = 0; s <= row; s++) {
            sum = fma(vec4(rk[row * CHUNK_QUADS + s / 4][s % 4]), w_stage[s * QUADS + quad], sum);
        }
        F32x4(head_of(p.y, first + row, head)).v[quad] = sum;
    }
}
