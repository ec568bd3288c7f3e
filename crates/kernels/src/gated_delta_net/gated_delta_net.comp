// gated_delta_net, token after token: Z = d Z, then Z += k sigmoid(beta) (v - Z k), then y = scale Z q, Z the state of a head, [key, value].
// q, k: [S, key_heads, tokens]; v, y: [S, heads, tokens]; beta: [heads, tokens]; g: [heads, tokens], or with VECTOR [S, heads, tokens];
// states: [S keys, S values, heads, states]. Tokens of q, k, v, g and beta lie strides apart. The decay d is
//   GATE 0: e^g;  GATE 1: e^(a softplus(g + bias));  GATE 2: e^(bound sigmoid(a (g + bias)));  a: [heads]; bias: as a token's g.
// One workgroup per (sequence, head, COLS values): values are independent of each other. LANES threads share one; each keeps its keys in
// registers. STEP tokens are staged in shared memory at once. The sum Z k is needed before the token is done, the lanes' shares of y are
// added up once per STEP.
#version 450
#include "kiln.glsl"
#include "quads.glsl"
#include "sequences.glsl"
#include "activations.glsl"
#include "lanes.glsl"

layout(local_size_x = WG) in;

#define QUADS (S / 4)
#define HELD (QUADS / LANES)
#define GATES (VECTOR == 1 ? S : 1)

shared vec4 q_stage[STEP * QUADS];
shared vec4 k_stage[STEP * QUADS];
#if VECTOR
shared vec4 decay_stage[STEP * QUADS];
#endif
// Of each token: the decay, where it is one for all keys, and the rate.
shared vec2 head_stage[STEP];
shared float v_stage[STEP * COLS];
shared float y_stage[STEP * WG];

// Element `at` of a token's row.
float element(uvec2 base, uint token, uint stride, uint at) { return F32(row_address(base, token, stride * 4)).v[at]; }

float decay_of(uint token, uint head, uint i) {
    float g = element(p.g, token, p.g_stride, head * GATES + i);
#if GATE == 0
    return exp(g);
#else
    float a = F32(p.a).v[head], x = g + F32(p.bias).v[head * GATES + i];
#if GATE == 1
    return exp(a * softplus(x));
#else
    return exp(BOUND * sigmoid(a * x));
#endif
#endif
}

void main() {
    uint group = group_index();
    uint slice = group % (S / COLS);
    uint head = group / (S / COLS) % p.heads;
    uint sequence = group / (S / COLS) / p.heads;
    if (sequence >= p.sequences) return;
    uint first = start_of(sequence), end = end_of(sequence);
    uint key_head = GROUPED == 1 ? head / (p.heads / KEY_HEADS) : head % KEY_HEADS;

    uint tid = thread_number();
    uint lane = tid % LANES, col = tid / LANES;
    uint value = slice * COLS + col;
    uint slot = p.slots == uvec2(0) ? sequence : U32(p.slots).v[sequence];
    bool kept = slot < p.states;
    uvec2 state_at = row_address(row_address(p.state, kept ? slot : 0, p.heads * S * S * 4), head, S * S * 4);
    vec4 state[HELD];
    [[unroll]] for (uint n = 0; n < HELD; n++) {
        state[n] = kept ? F32x4(state_at).v[value * QUADS + lane + n * LANES] : vec4(0);
    }

    for (uint now = first; now < end; now += STEP) {
        uint tokens = min(STEP, end - now);
        barrier();
        for (uint at = tid; at < tokens * S; at += WG) {
            uint token = now + at / S, i = at % S;
            q_stage[at / 4][at % 4] = element(p.q, token, p.q_stride, key_head * S + i);
            k_stage[at / 4][at % 4] = element(p.k, token, p.k_stride, key_head * S + i);
#if VECTOR
            decay_stage[at / 4][at % 4] = decay_of(token, head, i);
#endif
        }
        for (uint at = tid; at < tokens * COLS; at += WG) {
            v_stage[at] = element(p.v, now + at / COLS, p.v_stride, head * S + slice * COLS + at % COLS);
        }
        for (uint at = tid; at < tokens; at += WG) {
            float decay = 1;
#if !VECTOR
            decay = decay_of(now + at, head, 0);
#endif
            head_stage[at] = vec2(decay, sigmoid(element(p.beta, now + at, p.beta_stride, head)));
        }
        barrier();
        for (uint t = 0; t < tokens; t++) {
            vec2 of_head = head_stage[t];
            vec4 sum = vec4(0);
            [[unroll]] for (uint n = 0; n < HELD; n++) {
                uint at = t * QUADS + lane + n * LANES;
#if VECTOR
                state[n] *= decay_stage[at];
#else
                state[n] *= of_head.x;
#endif
                sum = fma(k_stage[at], state[n], sum);
            }
            float change = of_head.y * (v_stage[t * COLS + col] - lane_sum(sum4(sum)));
            sum = vec4(0);
            [[unroll]] for (uint n = 0; n < HELD; n++) {
                uint at = t * QUADS + lane + n * LANES;
                state[n] = fma(vec4(change), k_stage[at], state[n]);
                sum = fma(q_stage[at], state[n], sum);
            }
            y_stage[(t * LANES + lane) * COLS + col] = sum4(sum);
        }
        barrier();
        for (uint at = tid; at < tokens * COLS; at += WG) {
            precise float y = 0;
            [[unroll]] for (uint n = 0; n < LANES; n++) y += y_stage[(at / COLS * LANES + n) * COLS + at % COLS];
            uvec2 row = row_address(p.y, now + at / COLS, p.heads * S * 4);
            F32(row).v[head * S + slice * COLS + at % COLS] = y * p.scale;
        }
    }

    if (!kept) return;
    [[unroll]] for (uint n = 0; n < HELD; n++) F32x4(state_at).v[value * QUADS + lane + n * LANES] = state[n];
}
