// wkv6 and gla in chunks, third launch: the results of a chunk from the state before it. With P_t the product of the
// decays before token t, y_t = (r_t P_t) S + sum over s of A[t][s] v_s; A[t][s], s < t, is the sum over keys of
// r_t k_s times the decays of the tokens between s and t, A[t][t] holds the bonus (wkv6) or r_t k_t (gla, whose r_t
// takes the decay of token t along). Both factors of S and v come from one walk of row t from token t back to the
// first, multiplying by one decay a step: nothing is divided, so decays may be zero or negative.
// One workgroup per (chunk, head, TILE value columns); LANES threads share ROWS rows of A; a thread has
// 4 x 4 results.
#version 450
#include "kiln.glsl"
#include "recurrence.glsl"
#include "lanes.glsl"

layout(local_size_x = WG) in;

#define QUADS (S / 4)
#define TILE_QUADS (TILE / 4)
#define CHUNK_QUADS (CHUNK / 4)
#define HELD (QUADS / LANES)
// Rows of the right operand that are staged at once.
#define STAGED (CHUNK < S ? CHUNK : S)

// Keys, later the left operand r P.
shared vec4 k_stage[CHUNK * QUADS];
// Decays, later the right operand.
shared vec4 decay_stage[CHUNK * QUADS];
shared vec4 weights[CHUNK * CHUNK_QUADS];

vec4 sum[4];

void set_weight(uint t, uint s, float weight) { weights[t * CHUNK_QUADS + s / 4][s % 4] = weight; }

// This lane's share of row times k_s; the row then takes the decay of token s along.
float walk(inout vec4 row[HELD], uint s, uint lane) {
    vec4 product = vec4(0);
    [[unroll]] for (uint n = 0; n < HELD; n++) {
        uint at = s * QUADS + lane + n * LANES;
        product = fma(row[n], k_stage[at], product);
        row[n] *= decay_stage[at];
    }
    return sum4(product);
}

void multiply(vec4 left[4], uint from, uint quad) {
    [[unroll]] for (uint e = 0; e < 4; e++) {
        vec4 right = decay_stage[(from + e) * TILE_QUADS + quad];
        [[unroll]] for (uint i = 0; i < 4; i++) sum[i] = fma(vec4(left[i][e]), right, sum[i]);
    }
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

    uint tid = thread_number();
    for (uint at = tid; at < CHUNK * QUADS; at += WG) {
        k_stage[at] = load4(p.k, first + at / QUADS, end, head, at % QUADS, 0);
        decay_stage[at] = load4(p.td, first + at / QUADS, end, head, at % QUADS, 1);
    }
    barrier();

    // A thread walks ROWS neighbouring rows at once, so that they share what it loads.
    uint t = tid / LANES * ROWS, lane = tid % LANES;
    vec4 r[ROWS][HELD];
    if (t < CHUNK) {
        [[unroll]] for (uint i = 0; i < ROWS; i++) {
            float same = 0;
            [[unroll]] for (uint n = 0; n < HELD; n++) {
                uint quad = lane + n * LANES, at = (t + i) * QUADS + quad;
                r[i][n] = load4(p.r, first + t + i, end, head, quad, 0);
#if AFTER_UPDATE
                same += dot4(r[i][n], k_stage[at]);
                r[i][n] *= decay_stage[at];
#else
                same += dot4(r[i][n] * F32x4(p.tf).v[head * QUADS + quad], k_stage[at]);
#endif
            }
            same = lane_sum(same);
            if (lane == 0) {
                set_weight(t + i, t + i, same);
                for (uint s = t + i + 1; s % 4 != 0; s++) set_weight(t + i, s, 0);
            }
            // The rows among each other.
            [[unroll]] for (uint j = i; j-- > 0;) {
                float weight = lane_sum(walk(r[i], t + j, lane));
                if (lane == 0) set_weight(t + i, t + j, weight);
            }
        }
#if SHUFFLE
        // All rows of a subgroup walk together.
        uint top = min((tid | (gl_SubgroupSize - 1)) / LANES * ROWS, CHUNK - ROWS);
#else
        uint top = t;
#endif
        for (uint s = top; s-- > 0;) {
            float weight[ROWS];
            [[unroll]] for (uint i = 0; i < ROWS; i++) weight[i] = s < t ? walk(r[i], s, lane) : 0;
            [[unroll]] for (uint i = 0; i < ROWS; i++) {
                weight[i] = lane_sum(weight[i]);
                if (lane == 0 && s < t) set_weight(t + i, s, weight[i]);
            }
        }
    }
    barrier();
    if (t < CHUNK) {
        [[unroll]] for (uint i = 0; i < ROWS; i++) {
            [[unroll]] for (uint n = 0; n < HELD; n++) k_stage[(t + i) * QUADS + lane + n * LANES] = r[i][n];
        }
    }

    uint row = tid / TILE_QUADS * 4, quad = tid % TILE_QUADS;
    [[unroll]] for (uint i = 0; i < 4; i++) sum[i] = vec4(0);
    F32x4 state = F32x4(state_of(p.scratch, chunk, p.heads * S * S, head));
    for (uint from = 0; from < S; from += STAGED) {
        barrier();
        for (uint at = tid; at < STAGED * TILE_QUADS; at += WG) {
            decay_stage[at] = state.v[(from + at / TILE_QUADS) * QUADS + tile * TILE_QUADS + at % TILE_QUADS];
        }
        barrier();
        for (uint k = 0; k < STAGED; k += 4) {
            vec4 left[4];
            [[unroll]] for (uint i = 0; i < 4; i++) left[i] = k_stage[(row + i) * QUADS + (from + k) / 4];
            multiply(left, k, quad);
        }
    }
    barrier();
    for (uint at = tid; at < CHUNK * TILE_QUADS; at += WG) {
        decay_stage[at] = load4(p.v, first + at / TILE_QUADS, end, head, tile * TILE_QUADS + at % TILE_QUADS, 0);
    }
    barrier();
    for (uint s = 0; s <= row; s += 4) {
        vec4 left[4];
        [[unroll]] for (uint i = 0; i < 4; i++) left[i] = weights[(row + i) * CHUNK_QUADS + s / 4];
        multiply(left, s, quad);
    }
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uint token = first + row + i;
        if (token < end) F32x4(head_of(p.y, token, head)).v[tile * TILE_QUADS + quad] = sum[i] * p.scale;
    }
}
