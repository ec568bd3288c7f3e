// wkv6 and gla in chunks, third launch: the results of a chunk from the state before it. With P_t the product of the
// decays before token t, y_t = (r_t P_t) S + sum over s of A[t][s] v_s; A[t][s], s < t, is the sum over keys of
// r_t k_s times the decays of the tokens between s and t, A[t][t] holds the bonus (wkv6) or r_t k_t (gla, whose r_t
// takes the decay of token t along). Both factors of S and v come from one walk of row t from token t back to the
// first, multiplying by one decay a step: nothing is divided, so decays may be zero or negative.
// One workgroup per (chunk, head, TILE value columns). A row of A belongs to one thread: the others wait, but no sums go
// from thread to thread, and all rows read the same element of shared memory at once. A thread has 4 x 4 results.
#version 450
#include "kiln.glsl"
#include "recurrence.glsl"

layout(local_size_x = WG) in;

#define QUADS (S / 4)
#define TILE_QUADS (TILE / 4)
#define CHUNK_QUADS (CHUNK / 4)
// Rows of the right operand that are staged at once.
#define STAGED (CHUNK < S ? CHUNK : S)

// Keys, later the A fragment r P.
shared vec4 k_stage[CHUNK * QUADS];
// Decays, later the right operand.
shared vec4 decay_stage[CHUNK * QUADS];
shared vec4 weights[CHUNK * CHUNK_QUADS];

void set_weight(uint t, uint s, float weight) { weights[t * CHUNK_QUADS + s / 4][s % 4] = weight; }

// Adds four columns LEFT(i), i < 4, of the A fragment times rows FROM .. FROM + 4 of the staged one.
#define MULTIPLY(LEFT, FROM)                                                                    \
    {                                                                                           \
        vec4 left[4];                                                                           \
        [[unroll]] for (uint i = 0; i < 4; i++) left[i] = LEFT;                                 \
        [[unroll]] for (uint e = 0; e < 4; e++) {                                               \
            vec4 right = decay_stage[((FROM) + e) * TILE_QUADS + quad];                         \
            [[unroll]] for (uint i = 0; i < 4; i++) sum[i] = fma(vec4(left[i][e]), right, sum[i]); \
        }                                                                                       \
    }

void main() {
    uint group = group_index();
    uint tile = group % (S / TILE);
    uint head = group / (S / TILE) % p.heads;
    uint chunk = group / (S / TILE) / p.heads;
    if (chunk >= p.chunks) return;
    uvec2 tokens = chunk_tokens(chunk);
    uint first = tokens.x, end = tokens.y;
    if (first >= end) return;

    uint tid = gl_LocalInvocationID.x;
    for (uint at = tid; at < CHUNK * QUADS; at += WG) {
        k_stage[at] = load4(p.k, first + at / QUADS, end, head, at % QUADS, 0);
        decay_stage[at] = load4(p.td, first + at / QUADS, end, head, at % QUADS, 1);
    }
    barrier();

    uint t = tid;
    vec4 r[QUADS];
    if (t < CHUNK) {
        float weight = 0;
        [[unroll]] for (uint n = 0; n < QUADS; n++) {
            r[n] = load4(p.r, first + t, end, head, n, 0);
#if AFTER_UPDATE
            weight += dot4(r[n], k_stage[t * QUADS + n]);
            r[n] *= decay_stage[t * QUADS + n];
#else
            weight += dot4(r[n] * F32x4(p.tf).v[head * QUADS + n], k_stage[t * QUADS + n]);
#endif
        }
        set_weight(t, t, weight);
        for (uint s = t + 1; s % 4 != 0; s++) set_weight(t, s, 0);
        // The rows of a subgroup stay together where they pass the same token at the same time.
        for (uint s = CHUNK - 1; s-- > 0;) {
            if (s < t) {
                vec4 product = vec4(0);
                [[unroll]] for (uint n = 0; n < QUADS; n++) {
                    product = fma(r[n], k_stage[s * QUADS + n], product);
                    r[n] *= decay_stage[s * QUADS + n];
                }
                set_weight(t, s, sum4(product));
            }
        }
    }
    barrier();
    if (t < CHUNK) {
        [[unroll]] for (uint n = 0; n < QUADS; n++) k_stage[t * QUADS + n] = r[n];
    }

    uint row = tid / TILE_QUADS * 4, quad = tid % TILE_QUADS;
    vec4 sum[4];
    [[unroll]] for (uint i = 0; i < 4; i++) sum[i] = vec4(0);
    F32x4 state = F32x4(state_of(p.scratch, chunk, p.heads * S * S, head));
    for (uint from = 0; from < S; from += STAGED) {
        barrier();
        for (uint at = tid; at < STAGED * TILE_QUADS; at += WG) {
            decay_stage[at] = state.v[(from + at / TILE_QUADS) * QUADS + tile * TILE_QUADS + at % TILE_QUADS];
        }
        barrier();
        for (uint k = 0; k < STAGED; k += 4) MULTIPLY(k_stage[(row + i) * QUADS + (from + k) / 4], k)
    }
    barrier();
    for (uint at = tid; at < CHUNK * TILE_QUADS; at += WG) {
        decay_stage[at] = load4(p.v, first + at / TILE_QUADS, end, head, tile * TILE_QUADS + at % TILE_QUADS, 0);
    }
    barrier();
    for (uint s = 0; s <= row; s += 4) MULTIPLY(weights[(row + i) * CHUNK_QUADS + s / 4], s)
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uint token = first + row + i;
        if (token < end) F32x4(head_of(p.y, token, head)).v[tile * TILE_QUADS + quad] = sum[i] * p.scale;
    }
}
