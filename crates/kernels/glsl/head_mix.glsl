// The mix of heads that head_mix.comp defines, for four elements of each thread: a launch of its own, or the end of a
// recurrence. Needs `activations.glsl` and `head_sum.glsl`. Written out with `fma` and `precise`, so that both round the same way.
// `bonus` is the thread's share of the sum that multiplies v with BONUS. All threads of the workgroup must come here.
vec4 mix_of_head(vec4 x, vec4 weight, vec4 bias, float bonus, vec4 v, vec4 gate, float eps, uint tid) {
    float mean = sum_of_head(vec4(sum4(x), 0, 0, 0), tid).x / S;
    precise vec4 away = x - mean;
    // The mean in f32 is off by some ulps of itself: what is left of it corrects mean and variance.
    vec4 sums = sum_of_head(vec4(sum4(away), dot4(away, away), bonus, 0), tid);
    float rest = sums.x / S;
    float variance = max(fma(-rest, rest, sums.y / S), 0.0);
    precise vec4 y = fma((away - rest) * inversesqrt(variance + eps), weight, bias);
#if BONUS
    y = fma(v, vec4(sums.z), y);
#endif
#if GATE
    y *= vec4(FUNCTION(gate.x), FUNCTION(gate.y), FUNCTION(gate.z), FUNCTION(gate.w));
#endif
    return y;
}
