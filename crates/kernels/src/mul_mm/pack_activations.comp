// Activations of b as 16-bit floats for matrix units: halves[k, n] = c[k, n] / factor[n], and zeros up to p.padded_k.
// c is b itself; or NORMED: b / sqrt(mean of b^2 + eps) * other (F32[K], where there is one: OTHER); or, where GATE names an
// activation: GATE(b) * other (the extents of b).
// HALF: as F16. The factor is the power of two that brings the activation vector's largest value to 2^TOP .. 2^(TOP + 1): activations beyond the
// range of F16 survive, and small ones keep their 11 bits. Otherwise as BF16, which has the range of F32: factors are 1.
// SORTED: one for each (token, slot) pair, in the order of experts, so that a tile's lie side by side.
// FRAGMENT_LAYOUT: as lanes hold them in matrices (order.glsl), for fragment.comp. With SLOTTED one for each pair, at the place among those of tiles
// that the list has for it.
// The first workgroup also sets p.n_counters counters of the product to zero.
// One workgroup of WG threads per activation vector; each keeps HELD fours of it in registers, or reads them for every pass where
// HELD is 0. Activations with infinities or NaN keep them, with a factor of 1.
// With DEPENDENT_LAUNCH, weights of a norm that a thread keeps are loaded before it waits for the activations.
#version 450
#define GRID_WAIT_LATE 1
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "formats.glsl"
#include "reduce.glsl"
#ifdef GATE
#include "activations.glsl"
#endif

#ifdef FRAGMENT_LAYOUT
#include "mul_mm/fragment_order.glsl"
#endif

uvec2 b_row, other_row;
float norm_scale = 1;

uvec2 row_of(uvec2 base, uvec3 at, uint stride[3]) {
    return row_address(row_address(row_address(base, at.x, stride[0]), at.y, stride[1]), at.z, stride[2]);
}

vec4 b_four(uint e) {
#if VECTORS_B
    return e < p.k ? B_LOAD4(b_row, e) : vec4(0);
#else
    vec4 v = vec4(0);
    [[unroll]] for (uint i = 0; i < 4; i++) if (e + i < p.k) v[i] = B_LOAD(b_row, e + i);
    return v;
#endif
}

#if OTHER
vec4 other_four(uint e) {
#if VECTORS_O
    return e < p.k ? O_LOAD4(other_row, e) : vec4(0);
#else
    vec4 v = vec4(0);
    [[unroll]] for (uint i = 0; i < 4; i++) if (e + i < p.k) v[i] = O_LOAD(other_row, e + i);
    return v;
#endif
}
#endif

// Elements e .. e + 3 of the activation vector, given those of b and of the other operand.
vec4 column_four(vec4 b, vec4 other) {
#ifdef GATE
    return vec4(GATE(b.x), GATE(b.y), GATE(b.z), GATE(b.w)) * other;
#else
    return b * norm_scale * other;
#endif
}

// FOURS: every four elements of this thread, the first of them e. B4, OTHER4 and C4: of b, of the other operand and of the activation vector.
#if !OTHER
#define OTHER4(e) vec4(1)
#elif HELD
vec4 others[HELD];
#define OTHER4(e) others[h]
#else
#define OTHER4(e) other_four(e)
#endif
#if HELD
vec4 held[HELD];
#define FOURS(e) [[unroll]] for (uint h = 0, e = 4 * gl_LocalInvocationID.x; h < HELD; h++, e += 4 * WG)
#define B4(e) held[h]
#define C4(e) held[h]
#else
#define FOURS(e) for (uint e = 4 * gl_LocalInvocationID.x; e < p.padded_k; e += 4 * WG)
#define B4(e) b_four(e)
#define C4(e) column_four(b_four(e), OTHER4(e))
#endif

void main() {
    uint column = group_index();
    if (column >= p.columns) return;
#if OTHER && !defined(GATE)
    other_row = p.other;
#if HELD
    FOURS(e) others[h] = other_four(e);
#endif
#endif
    grid_wait();
    if (column == 0)
        for (uint i = gl_LocalInvocationID.x; i < p.n_counters; i += WG) U32(p.counters).v[i] = 0;
#if SORTED
    uint pair = U32(p.pairs).v[column];
    // Ids of experts that do not exist leave the end of the list unwritten.
    if (pair >= p.columns) return;
    uint token = pair / p.used;
    uvec3 at = uvec3(p.shape[0] == 1 ? 0 : pair - token * p.used, token, 0);
#elif SLOTTED
    uint place = U32(p.pairs).v[column], token = column / p.used;
    // Pairs of experts that do not exist have no place.
    if (place == ~0u) return;
    uvec3 at = uvec3(p.shape[0] == 1 ? 0 : column - token * p.used, token, 0);
#else
    uint place = column;
    uvec3 at = unravel(column, uint[4](p.shape[0], p.shape[1], p.shape[2], 1)).xyz;
#endif
    b_row = row_of(p.b, at, p.stride);
    uvec2 to = row_address(p.halves, column, 2 * p.padded_k);
#if HELD
    FOURS(e) held[h] = b_four(e);
#endif
#ifdef GATE
    other_row = row_of(p.other, at, p.other_stride);
#if HELD
    FOURS(e) others[h] = other_four(e);
#endif
#endif
#if NORMED
    float sum = 0;
    FOURS(e) {
        vec4 v = B4(e);
        sum += dot(v, v);
    }
    norm_scale = inversesqrt(wg_sum(sum) / float(p.k) + p.eps);
#endif
#if HELD
    FOURS(e) held[h] = column_four(held[h], OTHER4(e));
#endif
    float factor = 1, inverse = 1;
#if HALF
    float most = 0;
    FOURS(e) {
        vec4 v = abs(C4(e));
        most = max(most, max(max(v.x, v.y), max(v.z, v.w)));
    }
    uint exponent = floatBitsToUint(wg_max(most)) >> 23;
    if (exponent != 0 && exponent != 255) {
        exponent = max(exponent, TOP + 1);
        factor = uintBitsToFloat((exponent - TOP) << 23);
        inverse = uintBitsToFloat((254 + TOP - exponent) << 23);
    }
#endif
    if (gl_LocalInvocationID.x == 0) F32(p.factors).v[column] = factor;
    FOURS(e) {
        if (e >= p.padded_k) break;
        vec4 v = C4(e) * inverse;
#if defined(FRAGMENT_LAYOUT)
#if SLOTTED
        store_quad(PIECE, p.halves, place, ~0u, e, p.k, v);
#else
        store_quad(PIECE, p.halves, place, p.columns, e, p.k, v);
#endif
#elif HALF
        U32x2(to).v[e / 4] = uvec2(packHalf2x16(v.xy), packHalf2x16(v.zw));
#else
        U32x2(to).v[e / 4] = uvec2(bf16_bits(v.x) | bf16_bits(v.y) << 16, bf16_bits(v.z) | bf16_bits(v.w) << 16);
#endif
    }
}
