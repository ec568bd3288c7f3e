// Linear recurrences with decay, token after token; wkv6.comp and gla.comp say what they compute.
// One workgroup per (sequence, head, COLS value columns): columns are independent of each other. LANES threads share a
// column; each keeps KEYS elements of it in registers. STEP tokens are staged in shared memory at once while the loads
// of the next ones are in flight, and the lanes' shares of y are added up once per STEP.
#include "recurrence.glsl"

layout(local_size_x = WG) in;

#define QUADS (S / 4)
#define HELD (QUADS / LANES)
#define LOADS ((STEP * QUADS + WG - 1) / WG)
#define VALUES ((STEP * COLS + WG - 1) / WG)

shared vec4 k_stage[STEP * QUADS];
shared vec4 r_stage[STEP * QUADS];
shared vec4 decay_stage[STEP * QUADS];
shared float v_stage[STEP * COLS];
shared float y_stage[STEP * WG];
#if !AFTER_UPDATE
shared float bonus_stage[STEP * QUADS];
#endif
#include "recurrence_mix.glsl"
#if MIX
#define Y_SCALE 1.0
#else
#define Y_SCALE p.scale
#endif

void main() {
    uint group = group_index();
    uint slice = group % (S / COLS);
    uint head = group / (S / COLS) % p.heads;
    uint sequence = group / (S / COLS) / p.heads;
    if (sequence >= p.sequences) return;
    uint first = start_of(sequence), end = end_of(sequence);

    uint tid = gl_LocalInvocationID.x;
    uint lane = tid % LANES, col = tid / LANES;
    uint column = slice * COLS + col;
    vec4 state[HELD];
    bool kept = has_state(sequence);
    [[unroll]] for (uint n = 0; n < HELD; n++) state[n] = vec4(0);
    if (kept) {
        F32 from = F32(state_before(sequence, head));
        [[unroll]] for (uint n = 0; n < HELD; n++) {
            [[unroll]] for (uint e = 0; e < 4; e++) state[n][e] = from.v[(4 * (lane + n * LANES) + e) * S + column];
        }
    }

    MIX_BEGIN
    vec4 k_next[LOADS], r_next[LOADS], decay_next[LOADS];
    float v_next[VALUES];
#define FETCH(TOKEN)                                                                            \
    [[unroll]] for (uint n = 0; n < LOADS; n++) {                                               \
        uint at = tid + n * WG, token = (TOKEN) + at / QUADS;                                   \
        k_next[n] = load4(p.k, token, end, head, at % QUADS, 0);                                \
        r_next[n] = load4(p.r, token, end, head, at % QUADS, 0);                                \
        decay_next[n] = load4(p.td, token, end, head, at % QUADS, 0);                           \
        MIX_FETCH(n, token, at % QUADS)                                                         \
    }                                                                                           \
    [[unroll]] for (uint n = 0; n < VALUES; n++) {                                              \
        uint at = tid + n * WG, token = (TOKEN) + at / COLS;                                    \
        v_next[n] = token < end ? F32(head_of(p.v, token, head)).v[slice * COLS + at % COLS] : 0; \
    }

    FETCH(first)
    for (uint now = first; now < end; now += STEP) {
        barrier();
        [[unroll]] for (uint n = 0; n < LOADS; n++) {
            uint at = tid + n * WG;
            if (at < STEP * QUADS) {
                k_stage[at] = k_next[n];
                r_stage[at] = r_next[n];
                decay_stage[at] = decay_next[n];
#if !AFTER_UPDATE
                // y = r S + (sum of r tf k) v: the sum needs no state, so it is prepared here.
                bonus_stage[at] = dot4(r_next[n] * F32x4(p.tf).v[head * QUADS + at % QUADS], k_next[n]);
#endif
                MIX_KEEP(n, r_next[n], k_next[n])
            }
        }
        [[unroll]] for (uint n = 0; n < VALUES; n++) {
            uint at = tid + n * WG;
            if (at < STEP * COLS) v_stage[at] = v_next[n];
        }
        barrier();
        FETCH(now + STEP)

        uint tokens = min(STEP, end - now);
        for (uint t = 0; t < tokens; t++) {
            float v = v_stage[t * COLS + col];
            vec4 sum = vec4(0);
            float bonus = 0;
            [[unroll]] for (uint n = 0; n < HELD; n++) {
                uint at = t * QUADS + lane + n * LANES;
                vec4 updated = fma(decay_stage[at], state[n], k_stage[at] * v);
#if AFTER_UPDATE
                sum = fma(r_stage[at], updated, sum);
#else
                sum = fma(r_stage[at], state[n], sum);
                bonus += bonus_stage[at];
#endif
                state[n] = updated;
            }
            y_stage[(t * LANES + lane) * COLS + col] = fma(bonus, v, sum4(sum));
        }
        barrier();
        STORE_Y(now, tokens, Y_SCALE)
    }

    if (!kept) return;
    F32 to = F32(state_after(sequence, head));
    [[unroll]] for (uint n = 0; n < HELD; n++) {
        [[unroll]] for (uint e = 0; e < 4; e++) to.v[(4 * (lane + n * LANES) + e) * S + column] = state[n][e];
    }
}
