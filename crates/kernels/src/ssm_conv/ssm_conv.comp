// ssm_conv: y[c,t] = act(bias[c] + sum over j of weight[j,c] x[c, t-(TAPS-1)+j]): every channel of a token with the TAPS - 1 tokens before
// it. Before the first token of a sequence stand the columns that its state holds, oldest first; the last ones take their place.
// x: [channels, tokens], tokens p.x_stride elements apart; weight: [TAPS, channels]; state: [channels, TAPS-1, states].
// A thread computes one channel of one token. The first token's thread does the tokens that look back into the state, too: then no other thread
// else reads the state, and it can be replaced at once.
#version 450
#include "kiln.glsl"
#include "sequences.glsl"
#include "activations.glsl"

layout(local_size_x = WG) in;

#define KEPT (TAPS - 1)

float x_of(uint t, uint c) { return F32(row_address(p.x, t, p.x_stride * 4)).v[c]; }

void store(uint t, uint c, float sum) {
#if SILU
    sum = silu(sum);
#endif
    F32(row_address(p.y, t, p.channels * 4)).v[c] = sum;
}

void main() {
    uint unit = group_index() * WG + gl_LocalInvocationID.x;
    if (unit >= p.units) return;
    uint t = unit / p.channels, c = unit % p.channels;
    uint sequence = sequence_of(t), start = start_of(sequence), end = end_of(sequence);
    if (t < start || t >= end) return;
    if (t > start && t < start + KEPT) return;

    float weight[TAPS];
    [[unroll]] for (uint j = 0; j < TAPS; j++) weight[j] = F32(row_address(p.weight, c, TAPS * 4)).v[j];
    float bias = 0;
#if BIAS
    bias = F32(p.bias).v[c];
#endif
    if (t > start) {
        float sum = bias;
        [[unroll]] for (uint j = 0; j < TAPS; j++) sum = fma(weight[j], x_of(t - KEPT + j, c), sum);
        store(t, c, sum);
        return;
    }

    uint place = p.slots == uvec2(0) ? sequence : U32(p.slots).v[sequence];
    bool has_state = place < p.states;
    uvec2 state = row_address(p.state, has_state ? place : 0, KEPT * p.channels * 4);
    // The last tokens before the one in hand.
    float before[KEPT];
    [[unroll]] for (uint j = 0; j < KEPT; j++) before[j] = has_state ? F32(state).v[j * p.channels + c] : 0;
    [[unroll]] for (uint n = 0; n < KEPT; n++) {
        if (start + n < end) {
            float x = x_of(start + n, c), sum = bias;
            [[unroll]] for (uint j = 0; j < KEPT; j++) sum = fma(weight[j], before[j], sum);
            store(start + n, c, fma(weight[KEPT], x, sum));
            [[unroll]] for (uint j = 0; j + 1 < KEPT; j++) before[j] = before[j + 1];
            before[KEPT - 1] = x;
        }
    }
    if (!has_state) return;
    if (end - start > KEPT) {
        [[unroll]] for (uint j = 0; j < KEPT; j++) before[j] = x_of(end - KEPT + j, c);
    }
    [[unroll]] for (uint j = 0; j < KEPT; j++) F32(state).v[j * p.channels + c] = before[j];
}
