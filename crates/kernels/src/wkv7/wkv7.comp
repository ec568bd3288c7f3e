// wkv7, token after token: S = S diag(w_t) + (S a_t) b_t^T + v_t k_t^T, then y_t = S r_t, S the state [key, value].
// r, w, k, v, a, b: [S, heads, tokens]; states: [S keys, S values, heads, sequences].
// With MIX, y_t is the mix of its heads (head_mix) with p.weight, p.bias, p.bonus_weight: [S * heads] and p.gate, as r.
// One workgroup per (sequence, head, COLS values): values are independent of each other. LANES threads share one; each
// keeps its keys in registers. STEP tokens are staged in shared memory at once while the loads of the next ones are in
// flight. The sum S a is needed before the token is done, the lanes' shares of y are added up once per STEP.
#version 450
#include "kiln.glsl"
#include "recurrence.glsl"
#include "lanes.glsl"

layout(local_size_x = WG) in;

#define QUADS (S / 4)
#define HELD (QUADS / LANES)
#define LOADS ((STEP * QUADS + WG - 1) / WG)
#define VALUES ((STEP * COLS + WG - 1) / WG)

shared vec4 r_stage[STEP * QUADS];
shared vec4 w_stage[STEP * QUADS];
shared vec4 k_stage[STEP * QUADS];
shared vec4 a_stage[STEP * QUADS];
shared vec4 b_stage[STEP * QUADS];
shared float v_stage[STEP * COLS];
shared float y_stage[STEP * WG];
#include "recurrence_mix.glsl"

void main() {
    uint group = group_index();
    uint slice = group % (S / COLS);
    uint head = group / (S / COLS) % p.heads;
    uint sequence = group / (S / COLS) / p.heads;
    if (sequence >= p.sequences) return;
    uint first = start_of(sequence), end = end_of(sequence);

    uint tid = thread_number();
    uint lane = tid % LANES, col = tid / LANES;
    uint value = slice * COLS + col;
    vec4 state[HELD];
    bool kept = has_state(sequence);
    [[unroll]] for (uint n = 0; n < HELD; n++) state[n] = vec4(0);
    if (kept) {
        F32x4 from = F32x4(state_before(sequence, head));
        [[unroll]] for (uint n = 0; n < HELD; n++) state[n] = from.v[value * QUADS + lane + n * LANES];
    }

    MIX_BEGIN
    vec4 r_next[LOADS], w_next[LOADS], k_next[LOADS], a_next[LOADS], b_next[LOADS];
    float v_next[VALUES];
#define FETCH(TOKEN)                                                                            \
    [[unroll]] for (uint n = 0; n < LOADS; n++) {                                               \
        uint at = tid + n * WG, token = (TOKEN) + at / QUADS;                                   \
        r_next[n] = load4(p.r, token, end, head, at % QUADS, 0);                                \
        w_next[n] = load4(p.w, token, end, head, at % QUADS, 0);                                \
        k_next[n] = load4(p.k, token, end, head, at % QUADS, 0);                                \
        a_next[n] = load4(p.a, token, end, head, at % QUADS, 0);                                \
        b_next[n] = load4(p.b, token, end, head, at % QUADS, 0);                                \
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
                r_stage[at] = r_next[n];
                w_stage[at] = w_next[n];
                k_stage[at] = k_next[n];
                a_stage[at] = a_next[n];
                b_stage[at] = b_next[n];
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
            vec4 sum = vec4(0);
            [[unroll]] for (uint n = 0; n < HELD; n++) {
                sum = fma(a_stage[t * QUADS + lane + n * LANES], state[n], sum);
            }
            float sa = lane_sum(sum4(sum));
            float v = v_stage[t * COLS + col];
            sum = vec4(0);
            [[unroll]] for (uint n = 0; n < HELD; n++) {
                uint at = t * QUADS + lane + n * LANES;
                state[n] = fma(w_stage[at], state[n], fma(vec4(sa), b_stage[at], k_stage[at] * v));
                sum = fma(r_stage[at], state[n], sum);
            }
            y_stage[(t * LANES + lane) * COLS + col] = sum4(sum);
        }
        barrier();
        STORE_Y(now, tokens, 1.0)
    }

    if (!kept) return;
    F32x4 to = F32x4(state_after(sequence, head));
    [[unroll]] for (uint n = 0; n < HELD; n++) to.v[value * QUADS + lane + n * LANES] = state[n];
}
