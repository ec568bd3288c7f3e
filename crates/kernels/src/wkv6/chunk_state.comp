// wkv6 and gla in chunks, first launch: what the tokens of a chunk make of an empty state, and the product of their
// decays. With d_s the product of the decays after token s, the former is the matrix product (d k)^T v.
// One workgroup per (chunk, head, TILE value columns). Products of decays run over segments of SEGMENT tokens; the sum
// over segments is a recurrence of its own, sum = (decay of the segment) sum + (its tokens), so nothing is divided.
#version 450
#include "kiln.glsl"
#include "recurrence.glsl"

layout(local_size_x = WG) in;

#define QUADS (S / 4)
#define TILE_QUADS (TILE / 4)
#define SEGMENT 16
#define SEGMENTS (CHUNK / SEGMENT)
// Keys of a thread; its share of the result is ROWS x 4.
#define ROWS (S * TILE_QUADS / WG)

shared vec4 k_decayed[CHUNK * QUADS];
shared vec4 v_stage[CHUNK * TILE_QUADS];
shared vec4 segment_decay[SEGMENTS * QUADS];

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
    for (uint at = tid; at < CHUNK * TILE_QUADS; at += WG) {
        v_stage[at] = load4(p.v, first + at / TILE_QUADS, end, head, tile * TILE_QUADS + at % TILE_QUADS, 0);
    }
    for (uint at = tid; at < SEGMENTS * QUADS; at += WG) {
        uint quad = at % QUADS, segment = at / QUADS;
        vec4 k[SEGMENT], decay[SEGMENT];
        [[unroll]] for (uint t = 0; t < SEGMENT; t++) {
            k[t] = load4(p.k, first + segment * SEGMENT + t, end, head, quad, 0);
            decay[t] = load4(p.td, first + segment * SEGMENT + t, end, head, quad, 1);
        }
        vec4 after = vec4(1);
        [[unroll]] for (int t = SEGMENT - 1; t >= 0; t--) {
            k_decayed[(segment * SEGMENT + t) * QUADS + quad] = k[t] * after;
            after *= decay[t];
        }
        segment_decay[at] = after;
    }
    barrier();

    uint row = tid / TILE_QUADS * (ROWS / 4), quad = tid % TILE_QUADS;
    vec4 sum[ROWS];
    [[unroll]] for (uint i = 0; i < ROWS; i++) sum[i] = vec4(0);
    uint segments = (end - first + SEGMENT - 1) / SEGMENT;
    for (uint segment = 0; segment < segments; segment++) {
        [[unroll]] for (uint i = 0; i < ROWS; i++) sum[i] *= segment_decay[segment * QUADS + row + i / 4][i % 4];
        [[unroll]] for (uint t = 0; t < SEGMENT; t++) {
            vec4 v = v_stage[(segment * SEGMENT + t) * TILE_QUADS + quad];
            [[unroll]] for (uint i = 0; i < ROWS / 4; i++) {
                vec4 k = k_decayed[(segment * SEGMENT + t) * QUADS + row + i];
                [[unroll]] for (uint e = 0; e < 4; e++) sum[4 * i + e] = fma(vec4(k[e]), v, sum[4 * i + e]);
            }
        }
    }

    F32x4 state = F32x4(state_of(p.scratch, chunk, p.heads * S * S, head));
    [[unroll]] for (uint i = 0; i < ROWS; i++) {
        state.v[(4 * row + i) * QUADS + tile * TILE_QUADS + quad] = sum[i];
    }
    if (tile == 0 && tid < QUADS) {
        vec4 decay = vec4(1);
        // Segments past the end have a decay of one.
        [[unroll]] for (uint segment = 0; segment < SEGMENTS; segment++) decay *= segment_decay[segment * QUADS + tid];
        F32x4(head_of(p.decays, chunk, head)).v[tid] = decay;
    }
}
