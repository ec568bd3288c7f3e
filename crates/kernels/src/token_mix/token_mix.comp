// token_mix: y[c,t,g] = x[c,t] + (x[c,t-1] - x[c,t]) * (lerp[c,g] + extra[c,t,g]), with before[c,s] for the token before the first
// of sequence s; with KEEP its last token takes that place. With ALONE there is one sequence; else slots may say where in
// `before` it lies, and zeros stand before a sequence that has no place. x: [width, tokens]; lerp: [width, GROUPS], one more group in `another`;
// extra, y: [width, tokens, groups]. A thread computes four channels of one token in every group.
//   NORM  x stands for its columns after norm: (x[c,t] - mean) / sqrt(variance + eps) * weight[c] + bias[c]; `before` is such
//         a column already. With NORMED they are written too. A workgroup computes a token, or with SLICED four
//         channels for each thread: the sums of the whole column, and of the one before, it computes for itself.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;

#define BLENDS (GROUPS + ANOTHER)

vec4 quad_of(uvec2 base, uint row, uint quad) { return F32x4(row_address(base, row, p.quads * 16)).v[quad]; }

// The sequence of a token: its first token, the end, and where its column of `before` lies, if there is one.
struct Sequence {
    uint start, end;
    bool kept;
    uvec2 before;
};
#if ALONE
Sequence owner_of(uint t) { return Sequence(0, p.tokens, true, p.before); }
#else
#include "sequences.glsl"
// No token where t is in no sequence.
Sequence owner_of(uint t) {
    uint sequence = sequence_of(t);
    uint place = p.slots == uvec2(0) ? sequence : U32(p.slots).v[sequence];
    bool kept = place < p.states;
    uint start = start_of(sequence), end = end_of(sequence);
    if (t < start || t >= end) start = end = 0;
    return Sequence(start, end, kept, row_address(p.before, kept ? place : 0, p.quads * 16));
}
#endif
vec4 before_of(Sequence s, uint quad) {
    vec4 before = vec4(0);
    if (s.kept) before = F32x4(s.before).v[quad];
    return before;
}

// How far four channels of a token lean to the one before, for each blend.
struct Lean {
    vec4 by[BLENDS];
};
Lean lean_of(uint t, uint quad) {
    Lean lean;
    [[unroll]] for (uint g = 0; g < BLENDS; g++) {
        lean.by[g] = g < GROUPS ? quad_of(p.lerp, g, quad) : F32x4(p.another).v[quad];
#if EXTRA
        lean.by[g] += quad_of(p.extra, g * p.tokens + t, quad);
#endif
    }
    return lean;
}

void store_blends(uint t, uint quad, vec4 x, vec4 earlier, Lean lean) {
    [[unroll]] for (uint g = 0; g < BLENDS; g++)
        F32x4(row_address(p.y, g * p.tokens + t, p.quads * 16)).v[quad] = fma(earlier - x, lean.by[g], x);
}

#if NORM
#define ELEMENT vec4
#define ROW_LENGTH p.quads
#include "reduce.glsl"
#include "row_share.glsl"

uvec2 row;
#if HELD
#define ROW(i) held[k]
#else
#define ROW(i) F32x4(row).v[i]
#endif
#include "row_sums.glsl"

Standard standard_of(uint t) {
    row = row_address(p.x, t, p.quads * 16);
#if HELD
    SHARE(i) held[k] = F32x4(row).v[i];
#endif
    return row_standard(float(p.quads * 4), p.eps);
}

// Four channels of what the sums do not change; only the first token has a use for `before`.
struct Channels {
    vec4 weight, bias, before;
    Lean lean;
};
Channels channels_of(uint t, uint quad, Sequence s) {
    vec4 before = vec4(0);
    if (t == s.start) before = before_of(s, quad);
    return Channels(F32x4(p.weight).v[quad], F32x4(p.bias).v[quad], before, lean_of(t, quad));
}

vec4 normed(uint t, uint quad, Standard to, Channels channels) {
    return ((quad_of(p.x, t, quad) - to.shift) - to.rest) * to.scale * channels.weight + channels.bias;
}

void main() {
    uint span = SLICED == 1 ? WG : p.quads, slices = (p.quads + span - 1) / span;
    uint t = group_index() / slices, start = group_index() % slices * span;
    if (t >= p.tokens) return;
    Sequence s = owner_of(t);
    if (s.start >= s.end) return;
    uint end = min(start + span, p.quads), quad = start + gl_LocalInvocationID.x;
    // Loaded before the sums, which they do not wait for.
    Channels channels;
    if (quad < end) channels = channels_of(t, quad, s);
    Standard to = standard_of(t), other_to = to;
    // The token before; the first one has none, and keeps the last one for the next call.
    uint other = t > s.start ? t - 1 : KEEP == 1 ? s.end - 1 : t;
    if (other != t) other_to = standard_of(other);
    while (quad < end) {
        vec4 x = normed(t, quad, to, channels), neighbour = normed(other, quad, other_to, channels);
#if NORMED
        F32x4(row_address(p.normed, t, p.quads * 16)).v[quad] = x;
#endif
#if KEEP
        // No other thread reads these four elements.
        if (t == s.start && s.kept) F32x4(s.before).v[quad] = neighbour;
#endif
        store_blends(t, quad, x, t > s.start ? neighbour : channels.before, channels.lean);
        quad += WG;
        if (quad < end) channels = channels_of(t, quad, s);
    }
}
#else
void main() {
    uint unit = group_index() * WG + gl_LocalInvocationID.x;
    if (unit >= p.units) return;
    uint t = unit / p.quads, quad = unit % p.quads;
    Sequence s = owner_of(t);
    if (s.start >= s.end) return;
    vec4 x = quad_of(p.x, t, quad), earlier;
    if (t > s.start) earlier = quad_of(p.x, t - 1, quad);
    else earlier = before_of(s, quad);
#if KEEP
    // No other thread reads these four elements.
    if (t == s.start && s.kept) F32x4(s.before).v[quad] = quad_of(p.x, s.end - 1, quad);
#endif
    store_blends(t, quad, x, earlier, lean_of(t, quad));
}
#endif
