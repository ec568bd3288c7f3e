// wkv7 in chunks, second launch: the state before each chunk takes the place of what the chunk adds, and the state after
// the last one goes to state_out. S after = (transition) S + (added), chunk after chunk; values are independent of each
// other. One workgroup per (sequence, head, COLS values). The transition comes through shared memory in slabs of SLAB
// rows, the next one in flight.
#version 450
#include "kiln.glsl"
#include "recurrence.glsl"
#include "chunk_block.glsl"

layout(local_size_x = WG) in;

#define QUADS (S / 4)
#define COLS 16
#define COL_QUADS (COLS / 4)
// One thread per row of the slab and four values.
#define SLAB (WG / COL_QUADS)
#define SLABS (S / SLAB)
#define LOADS (SLAB * QUADS / WG)

shared vec4 transition[SLAB * QUADS];
// The state before and after the chunk.
shared vec4 states[2][S * COL_QUADS];

void main() {
    uint group = group_index();
    uint slice = group % (S / COLS);
    uint head = group / (S / COLS) % p.heads;
    uint sequence = group / (S / COLS) / p.heads;
    if (sequence >= p.sequences) return;

    uint tid = gl_LocalInvocationID.x;
    uint row = tid / COL_QUADS, quad = tid % COL_QUADS;
    uint value = slice * COLS + 4 * quad;
    bool kept = has_state(sequence);
    uvec2 from = state_before(sequence, head);
    [[unroll]] for (uint slab = 0; slab < SLABS; slab++) {
        uint key = slab * SLAB + row;
        vec4 state = vec4(0);
        if (kept) [[unroll]] for (uint e = 0; e < 4; e++) state[e] = F32(from).v[(value + e) * S + key];
        states[0][key * COL_QUADS + quad] = state;
    }

    uint chunk = first_chunk(sequence);
    uint chunks = chunk + (end_of(sequence) - start_of(sequence) + CHUNK - 1) / CHUNK;
    uint now = 0;
    vec4 transition_next[LOADS], added_next;
#define FETCH(CHUNK_NUMBER, SLAB_NUMBER)                                                        \
    {                                                                                           \
        uvec2 block = chunk_block(CHUNK_NUMBER, head);                                          \
        [[unroll]] for (uint n = 0; n < LOADS; n++) {                                           \
            transition_next[n] = F32x4(block).v[(SLAB_NUMBER) * SLAB * QUADS + tid + n * WG];   \
        }                                                                                       \
        added_next = F32x4(offset(block, STATE_AT * 4)).v[((SLAB_NUMBER) * SLAB + row) * QUADS + value / 4]; \
    }
    if (chunk < chunks) FETCH(chunk, 0)
    for (; chunk < chunks; chunk++) {
        for (uint slab = 0; slab < SLABS; slab++) {
            barrier();
            [[unroll]] for (uint n = 0; n < LOADS; n++) transition[tid + n * WG] = transition_next[n];
            vec4 sum = added_next;
            barrier();
            if (slab + 1 < SLABS) FETCH(chunk, slab + 1)
            else if (chunk + 1 < chunks) FETCH(chunk + 1, 0)

            uint key = slab * SLAB + row;
            F32x4(offset(chunk_block(chunk, head), STATE_AT * 4)).v[key * QUADS + value / 4] =
                states[now][key * COL_QUADS + quad];
            for (uint k = 0; k < QUADS; k++) {
                vec4 left = transition[row * QUADS + k];
                [[unroll]] for (uint e = 0; e < 4; e++) {
                    sum = fma(vec4(left[e]), states[now][(4 * k + e) * COL_QUADS + quad], sum);
                }
            }
            states[1 - now][key * COL_QUADS + quad] = sum;
        }
        now = 1 - now;
    }

    if (!kept) return;
    F32 to = F32(state_after(sequence, head));
    [[unroll]] for (uint slab = 0; slab < SLABS; slab++) {
        // Every thread wrote these elements itself.
        uint key = slab * SLAB + row;
        vec4 state = states[now][key * COL_QUADS + quad];
        [[unroll]] for (uint e = 0; e < 4; e++) to.v[(value + e) * S + key] = state[e];
    }
}
