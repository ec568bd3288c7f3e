// head_mix: y = ((x - mean) / sqrt(variance + eps) * weight + bias + v * sum(r k bonus_weight)) * FUNCTION(gate), with
// mean, variance and sum over the S elements of a head. x, r, k, v, gate, y: [S, heads, tokens]; weights: [S * heads].
#version 450
#include "kiln.glsl"
#include "activations.glsl"
#include "head_rows.glsl"

void main() {
    // Threads without a head take part in the sums.
    bool some = find_head();
    vec4 x = some ? QUAD(p.x) : vec4(0);
    float mean = sum_of_head(vec4(sum4(x), 0, 0, 0)).x / S;
    vec4 away = x - mean;
    float bonus = 0;
#if BONUS
    if (some) bonus = sum4(QUAD(p.r) * QUAD(p.k) * CHANNEL(p.bonus_weight));
#endif
    // The mean in f32 is off by some ulps of itself: what is left of it corrects mean and variance.
    vec4 sums = sum_of_head(vec4(sum4(away), sum4(away * away), bonus, 0));
    float rest = sums.x / S;
    float variance = max(sums.y / S - rest * rest, 0.0);
    if (!some) return;
    vec4 y = (away - rest) * inversesqrt(variance + p.eps);
    y = y * CHANNEL(p.weight) + CHANNEL(p.bias);
#if BONUS
    y += QUAD(p.v) * sums.z;
#endif
#if GATE
    vec4 gate = QUAD(p.gate);
    y *= vec4(FUNCTION(gate.x), FUNCTION(gate.y), FUNCTION(gate.z), FUNCTION(gate.w));
#endif
    QUAD(p.y) = y;
}
