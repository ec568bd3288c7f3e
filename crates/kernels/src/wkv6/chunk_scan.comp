// wkv6 and gla in chunks, second launch: the state before each chunk takes the place of what the chunk adds, and the
// state after the last one goes to state_out. One thread per four elements of a state, chunk after chunk.
#version 450
#include "kiln.glsl"
#include "recurrence.glsl"

layout(local_size_x = WG) in;

#define QUADS (S / 4)
// Chunks whose loads are in flight together.
#define AHEAD 8

void main() {
    uint group = group_index();
    uint part = group % (S * QUADS / WG);
    uint head = group / (S * QUADS / WG) % p.heads;
    uint sequence = group / (S * QUADS / WG) / p.heads;
    if (sequence >= p.sequences) return;

    uint at = part * WG + gl_LocalInvocationID.x;
    uint key = at / QUADS;
    vec4 state = vec4(0);
    if (has_state(sequence)) state = F32x4(state_before(sequence, head)).v[at];
    uint chunk = first_chunk(sequence);
    uint chunks = chunk + (end_of(sequence) - start_of(sequence) + CHUNK - 1) / CHUNK;
    for (; chunk < chunks; chunk += AHEAD) {
        vec4 added[AHEAD];
        float decay[AHEAD];
        [[unroll]] for (uint n = 0; n < AHEAD; n++) {
            if (chunk + n < chunks) {
                added[n] = F32x4(state_of(p.scratch, chunk + n, p.heads * S * S, head)).v[at];
                decay[n] = F32(head_of(p.decays, chunk + n, head)).v[key];
            }
        }
        [[unroll]] for (uint n = 0; n < AHEAD; n++) {
            if (chunk + n < chunks) {
                F32x4(state_of(p.scratch, chunk + n, p.heads * S * S, head)).v[at] = state;
                state = fma(vec4(decay[n]), state, added[n]);
            }
        }
    }
    if (has_state(sequence)) F32x4(state_after(sequence, head)).v[at] = state;
}
