// The end of a sequential recurrence: what the lanes computed of y for a step's tokens is added up and stored, with MIX
// after the mix of heads (`head_mix.glsl`). A workgroup has whole heads then, and a thread mixes the quads that it loads,
// so what belongs to them waits in its registers: in arrays of `main`, which no function touches, as a driver might keep
// them in memory otherwise. Needs y_stage and v_stage; `main` has `tid`, `head`, `slice` and `end`.
#if MIX
#include "activations.glsl"
#include "head_sum.glsl"
#include "head_mix.glsl"

// What belongs to the channels of the thread's quads: WG is a multiple of QUADS, so all lie in the same place of the head.
struct Channels {
    vec4 weight, bias, bonus;
};

Channels channels_of(uint head, uint tid) {
    uint at = head * QUADS + tid % QUADS;
    Channels channels = Channels(F32x4(p.weight).v[at], F32x4(p.bias).v[at], vec4(0));
#if BONUS
    channels.bonus = F32x4(p.bonus_weight).v[at];
#endif
    return channels;
}

vec4 gate_of(uint token, uint end, uint head, uint quad) {
#if GATE
    return load4(p.gate, token, end, head, quad, 0);
#else
    return vec4(0);
#endif
}

// Mixes and stores quad number `at` of the step's tokens, if there is one.
void store_quad(uint at, uint now, uint tokens, uint head, float scale, Channels c, float bonus, vec4 gate, uint tid) {
    uint t = at / QUADS, quad = at % QUADS;
    precise vec4 y = vec4(0);
    vec4 v = vec4(0);
    if (t < tokens) {
        [[unroll]] for (uint e = 0; e < 4; e++) {
            [[unroll]] for (uint n = 0; n < LANES; n++) y[e] += y_stage[(t * LANES + n) * COLS + 4 * quad + e];
            v[e] = v_stage[t * COLS + 4 * quad + e];
        }
    }
    y = mix_of_head(y * scale, c.weight, c.bias, bonus, v, gate, p.eps, tid);
    if (t < tokens) F32x4(head_of(p.y, now + t, head)).v[quad] = y;
}

#define MIX_BEGIN                              \
    Channels channels = channels_of(head, tid); \
    vec4 gate_next[LOADS], gate_now[LOADS];     \
    float bonus_now[LOADS];
// Loads what belongs to the thread's quad number N.
#define MIX_FETCH(N, TOKEN, QUAD) gate_next[N] = gate_of(TOKEN, end, head, QUAD);
// Keeps what was fetched for this step; receptances and keys make the bonus.
#define MIX_KEEP(N, R, K)        \
    gate_now[N] = gate_next[N]; \
    bonus_now[N] = dot4((R) * (K), channels.bonus);
#define STORE_Y(NOW, TOKENS, SCALE)           \
    [[unroll]] for (uint n = 0; n < LOADS; n++) \
        store_quad(tid + n * WG, NOW, TOKENS, head, SCALE, channels, bonus_now[n], gate_now[n], tid);
#else
void store_y(uint now, uint tokens, uint head, uint slice, float scale, uint tid) {
    for (uint at = tid; at < tokens * COLS; at += WG) {
        precise float y = 0;
        [[unroll]] for (uint n = 0; n < LANES; n++) y += y_stage[(at / COLS * LANES + n) * COLS + at % COLS];
        F32(head_of(p.y, now + at / COLS, head)).v[slice * COLS + at % COLS] = y * scale;
    }
}

#define MIX_BEGIN
#define MIX_FETCH(N, TOKEN, QUAD)
#define MIX_KEEP(N, R, K)
#define STORE_Y(NOW, TOKENS, SCALE) store_y(NOW, TOKENS, head, slice, SCALE, tid);
#endif
