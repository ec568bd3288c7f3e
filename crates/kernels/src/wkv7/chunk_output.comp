// wkv7 in chunks, third launch: y = y + (rows of the chunk) S, S the state before the chunk, key by value.
// One workgroup per (chunk, head, TILE values); a thread has 4 x 4 results.
#version 450
#include "kiln.glsl"
#include "recurrence.glsl"
#include "chunk_block.glsl"

layout(local_size_x = WG) in;

#define QUADS (S / 4)
#define TILE_QUADS (TILE / 4)
// Keys that are staged at once.
#define STAGED (S < 64 ? S : 64)

shared vec4 rows[CHUNK * QUADS];
shared vec4 state_stage[STAGED * TILE_QUADS];

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
    uvec2 block = chunk_block(chunk, head);
    for (uint at = tid; at < CHUNK * QUADS; at += WG) rows[at] = F32x4(offset(block, ROWS_AT * 4)).v[at];

    uint row = tid / TILE_QUADS * 4, quad = tid % TILE_QUADS;
    vec4 sum[4];
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uint token = first + row + i;
        if (token < end) sum[i] = F32x4(head_of(p.y, token, head)).v[tile * TILE_QUADS + quad];
    }
    F32x4 state = F32x4(offset(block, STATE_AT * 4));
    for (uint from = 0; from < S; from += STAGED) {
        barrier();
        for (uint at = tid; at < STAGED * TILE_QUADS; at += WG) {
            state_stage[at] = state.v[(from + at / TILE_QUADS) * QUADS + tile * TILE_QUADS + at % TILE_QUADS];
        }
        barrier();
        for (uint k = 0; k < STAGED; k += 4) {
            vec4 left[4];
            [[unroll]] for (uint i = 0; i < 4; i++) left[i] = rows[(row + i) * QUADS + (from + k) / 4];
            [[unroll]] for (uint e = 0; e < 4; e++) {
                vec4 right = state_stage[(k + e) * TILE_QUADS + quad];
                [[unroll]] for (uint i = 0; i < 4; i++) sum[i] = fma(vec4(left[i][e]), right, sum[i]);
            }
        }
    }
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uint token = first + row + i;
        if (token < end) F32x4(head_of(p.y, token, head)).v[tile * TILE_QUADS + quad] = sum[i];
    }
}
