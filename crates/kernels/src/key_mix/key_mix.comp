// key_mix: with a = sigmoid(rate) and kk = k k_k, divided in each head by its length, but at least by eps:
// lookup = -kk, replaced = kk a, k = k (1 + k_a (a - 1)), w = exp(-sigmoid(w) / sqrt(e)), and with VALUE
// v = v + (first - v) sigmoid(share). k, rate, w, lookup, replaced, v, first, share: [S, heads, tokens]; k_k, k_a: [S *
// heads].
#version 450
#include "kiln.glsl"
#include "activations.glsl"
#include "head_rows.glsl"

vec4 each_sigmoid(vec4 x) { return vec4(sigmoid(x.x), sigmoid(x.y), sigmoid(x.z), sigmoid(x.w)); }

void main() {
    // Threads without a head take part in the sum.
    bool some = find_head();
    vec4 k = some ? QUAD(p.k) : vec4(0);
    vec4 kk = some ? k * CHANNEL(p.k_k) : vec4(0);
    float squares = sum_of_head(vec4(sum4(kk * kk), 0, 0, 0), gl_LocalInvocationID.x).x;
    if (!some) return;
    kk *= 1.0 / max(sqrt(squares), p.eps);
    vec4 a = each_sigmoid(QUAD(p.rate));
    QUAD(p.lookup) = -kk;
    QUAD(p.replaced) = kk * a;
    QUAD(p.k) = fma(k * CHANNEL(p.k_a), a - 1, k);
    vec4 w = QUAD(p.w);
    QUAD(p.w) = vec4(exp_neg_sigmoid(w.x), exp_neg_sigmoid(w.y), exp_neg_sigmoid(w.z), exp_neg_sigmoid(w.w));
#if VALUE
    vec4 v = QUAD(p.v);
    QUAD(p.v) = fma(QUAD(p.first) - v, each_sigmoid(QUAD(p.share_of_first)), v);
#endif
}
