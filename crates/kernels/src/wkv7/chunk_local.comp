// wkv7 in chunks, first launch: everything a chunk of C tokens knows without the state before it. In this form the state
// is key by value, S_t = diag(w_t) S_{t-1} + b_t (a_t S_{t-1}) + k_t v_t, and X[t] is row t of X.
// With ab[t][s] the sum over keys of a_t b_s times the decays between s and t (ak, rb, rk likewise; those of r take the
// decay of t along) and A, R the rows a_t, r_t times all decays before them, the rows sa_t = a_t S_{t-1} solve
//     sa = A S + ab sa + ak V,  so  sa = W S + G V  with  W = A + ab W,  G = ak + ab G  (ab is strictly lower).
// With B, K the rows b_s, k_s times all decays after them, the chunk is then
//     y = (R + rb W) S + (rk + rb G) V,   S after = (diag(decay) + B^T W) S + (K + G^T B)^T V.
// Decays are multiplied along walks from token to token and never divided by, so they may be zero or negative.
// One workgroup per (chunk, head). A row belongs to one thread while it is walked: no sums go from thread to thread.
#version 450
#include "kiln.glsl"
#include "recurrence.glsl"
#include "chunk_block.glsl"

layout(local_size_x = WG) in;

#define QUADS (S / 4)
#define CHUNK_QUADS (CHUNK / 4)

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

// Walks `row` of token t from token t - 1 to the first one: its products with b and k are row t of a pair of matrices.
#define WALK(ON_B, ON_K)                                                                        \
    for (uint s = CHUNK - 1; s-- > 0;) {                                                        \
        if (s < t) {                                                                            \
            vec4 on_b = vec4(0), on_k = vec4(0);                                                \
            [[unroll]] for (uint n = 0; n < QUADS; n++) {                                       \
                on_b = fma(row[n], b_stage[s * QUADS + n], on_b);                               \
                on_k = fma(row[n], k_stage[s * QUADS + n], on_k);                               \
                row[n] *= w_stage[s * QUADS + n];                                               \
            }                                                                                   \
            ON_B[t * CHUNK_QUADS + s / 4][s % 4] = sum4(on_b);                                  \
            ON_K[t * CHUNK_QUADS + s / 4][s % 4] = sum4(on_k);                                  \
        }                                                                                       \
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

    uint tid = gl_LocalInvocationID.x;
    for (uint at = tid; at < CHUNK * QUADS; at += WG) {
        w_stage[at] = load4(p.w, first + at / QUADS, end, head, at % QUADS, 1);
        k_stage[at] = load4(p.k, first + at / QUADS, end, head, at % QUADS, 0);
        b_stage[at] = load4(p.b, first + at / QUADS, end, head, at % QUADS, 0);
    }
    // Upper triangles stay empty.
    for (uint at = tid; at < CHUNK * CHUNK_QUADS; at += WG) ab[at] = ak[at] = rb[at] = rk[at] = vec4(0);
    barrier();

    // The first CHUNK threads walk the rows a, the next ones the rows r.
    uint t = tid % CHUNK;
    bool has_a = tid < CHUNK, has_r = tid >= CHUNK && tid < 2 * CHUNK;
    vec4 row[QUADS];
    if (has_a) {
        [[unroll]] for (uint n = 0; n < QUADS; n++) row[n] = load4(p.a, first + t, end, head, n, 0);
        WALK(ab, ak)
    } else if (has_r) {
        // Unlike a, r sees its own token.
        vec2 own = vec2(0);
        [[unroll]] for (uint n = 0; n < QUADS; n++) {
            row[n] = load4(p.r, first + t, end, head, n, 0);
            own += vec2(dot4(row[n], b_stage[t * QUADS + n]), dot4(row[n], k_stage[t * QUADS + n]));
            row[n] *= w_stage[t * QUADS + n];
        }
        rb[t * CHUNK_QUADS + t / 4][t % 4] = own.x;
        rk[t * CHUNK_QUADS + t / 4][t % 4] = own.y;
        WALK(rb, rk)
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
    if (has_a) {
        [[unroll]] for (uint n = 0; n < QUADS; n++) w_stage[t * QUADS + n] = row[n];
    }
    barrier();

    for (uint column = tid; column < S + CHUNK; column += WG) {
        if (column < S) SOLVE(w_stage, QUADS, column)
        else SOLVE(ak, CHUNK_QUADS, column - S)
    }
    barrier();

    // The factor of S in y, which needs no more than its row.
    uvec2 block = chunk_block(chunk, head);
    if (has_r) {
        for (uint s = 0; s < CHUNK; s++) {
            float weight = rb[t * CHUNK_QUADS + s / 4][s % 4];
            [[unroll]] for (uint n = 0; n < QUADS; n++) row[n] = fma(vec4(weight), w_stage[s * QUADS + n], row[n]);
        }
        F32x4 rows = F32x4(offset(block, ROWS_AT * 4));
        [[unroll]] for (uint n = 0; n < QUADS; n++) rows.v[t * QUADS + n] = row[n];
    }
    // K + G^T B instead of K.
    for (uint at = tid; at < CHUNK * QUADS; at += WG) {
        uint token = at / QUADS;
        vec4 sum = k_stage[at];
        for (uint s = token + 1; s < CHUNK; s++) {
            sum = fma(vec4(ak[s * CHUNK_QUADS + token / 4][token % 4]), b_stage[s * QUADS + at % QUADS], sum);
        }
        k_stage[at] = sum;
    }
    // rk + rb G instead of rk.
    for (uint at = tid; at < CHUNK * CHUNK_QUADS; at += WG) {
        uint token = at / CHUNK_QUADS, quad = at % CHUNK_QUADS;
        vec4 sum = rk[at];
        for (uint s = 0; s <= token; s++) {
            sum = fma(vec4(rb[token * CHUNK_QUADS + s / 4][s % 4]), ak[s * CHUNK_QUADS + quad], sum);
        }
        rk[at] = sum;
    }
    // The transition diag(decay) + B^T W.
    for (uint at = tid; at < QUADS * QUADS; at += WG) {
        uint keys = at / QUADS, quad = at % QUADS;
        vec4 sum[4];
        [[unroll]] for (uint i = 0; i < 4; i++) {
            sum[i] = vec4(0);
            if (keys == quad) sum[i][i] = decay[keys][i];
        }
        for (uint s = 0; s < CHUNK; s++) {
            vec4 left = b_stage[s * QUADS + keys], right = w_stage[s * QUADS + quad];
            [[unroll]] for (uint i = 0; i < 4; i++) sum[i] = fma(vec4(left[i]), right, sum[i]);
        }
        [[unroll]] for (uint i = 0; i < 4; i++) F32x4(block).v[(4 * keys + i) * QUADS + quad] = sum[i];
    }
    barrier();

    for (uint at = tid; at < CHUNK * QUADS; at += WG) {
        w_stage[at] = load4(p.v, first + at / QUADS, end, head, at % QUADS, 0);
    }
    barrier();
    for (uint at = tid; at < QUADS * QUADS; at += WG) {
        uint keys = at / QUADS, quad = at % QUADS;
        vec4 sum[4];
        [[unroll]] for (uint i = 0; i < 4; i++) sum[i] = vec4(0);
        for (uint s = 0; s < CHUNK; s++) {
            vec4 left = k_stage[s * QUADS + keys], right = w_stage[s * QUADS + quad];
            [[unroll]] for (uint i = 0; i < 4; i++) sum[i] = fma(vec4(left[i]), right, sum[i]);
        }
        F32x4 state = F32x4(offset(block, STATE_AT * 4));
        [[unroll]] for (uint i = 0; i < 4; i++) state.v[(4 * keys + i) * QUADS + quad] = sum[i];
    }
    for (uint at = tid; at < (end - first) * QUADS; at += WG) {
        uint token = at / QUADS, quad = at % QUADS;
        vec4 sum = vec4(0);
        for (uint s = 0; s <= token; s++) {
            sum = fma(vec4(rk[token * CHUNK_QUADS + s / 4][s % 4]), w_stage[s * QUADS + quad], sum);
        }
        F32x4(head_of(p.y, first + token, head)).v[quad] = sum;
    }
}
