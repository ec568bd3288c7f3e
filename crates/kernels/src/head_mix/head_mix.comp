// head_mix: y = ((x - mean) / sqrt(variance + eps) * weight + bias + v * sum(r k bonus_weight)) * FUNCTION(gate), with
// mean, variance and sum over the S elements of a head. x, r, k, v, gate, y: [S, heads, tokens]; weights: [S * heads].
#version 450
#include "kiln.glsl"
#include "activations.glsl"
#include "head_rows.glsl"
#include "head_mix.glsl"

// What there is for threads with a head.
#define OF_SOME(WHAT) (some ? (WHAT) : vec4(0))

void main() {
    // Threads without a head take part in the sums.
    bool some = find_head();
    float bonus = 0;
    vec4 v = vec4(0), gate = vec4(0);
#if BONUS
    if (some) bonus = dot4(QUAD(p.r) * QUAD(p.k), CHANNEL(p.bonus_weight));
    v = OF_SOME(QUAD(p.v));
#endif
#if GATE
    gate = OF_SOME(QUAD(p.gate));
#endif
    vec4 weight = OF_SOME(CHANNEL(p.weight)), bias = OF_SOME(CHANNEL(p.bias));
    vec4 y = mix_of_head(OF_SOME(QUAD(p.x)), weight, bias, bonus, v, gate, p.eps, gl_LocalInvocationID.x);
    if (some) QUAD(p.y) = y;
}
