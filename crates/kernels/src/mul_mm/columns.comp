// Columns of b as 16-bit floats for matrix units: halves[k, n] = b[k, n] / factor[n], and zeros up to p.padded_k.
// HALF: as F16. The factor is the power of two that brings the column's largest value to 2^14 .. 2^15: columns beyond the
// range of F16 survive, and small ones keep their 11 bits. Otherwise as BF16, which has the range of F32: factors are 1.
// With EXPERTS, columns are put in the order of their experts (one for each pair), so that a tile's lie side by side.
// The first workgroup also sets p.n_counters counters of the product to zero.
// One workgroup of WG threads per column. Columns with infinities or NaN keep them, with a factor of 1.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "formats.glsl"
#include "reduce.glsl"

vec4 four(uvec2 row, uint e) {
#if VECTORS_B
    return e < p.k ? B_LOAD4(row, e) : vec4(0);
#else
    vec4 v = vec4(0);
    [[unroll]] for (uint i = 0; i < 4; i++) if (e + i < p.k) v[i] = B_LOAD(row, e + i);
    return v;
#endif
}

void main() {
    uint column = group_index();
    if (column >= p.columns) return;
    if (column == 0)
        for (uint i = gl_LocalInvocationID.x; i < p.n_counters; i += WG) U32(p.counters).v[i] = 0;
#if EXPERTS
    uint pair = U32(p.pairs).v[column];
    // Ids of experts that do not exist leave the end of the list unwritten.
    if (pair >= p.columns) return;
    uint token = pair / p.used;
    uvec3 at = uvec3(p.shape[0] == 1 ? 0 : pair - token * p.used, token, 0);
#else
    uvec3 at = unravel(column, uint[4](p.shape[0], p.shape[1], p.shape[2], 1)).xyz;
#endif
    uvec2 row = row_address(row_address(row_address(p.b, at.x, p.stride[0]), at.y, p.stride[1]), at.z, p.stride[2]);
    uvec2 to = row_address(p.halves, column, 2 * p.padded_k);
    uint t = gl_LocalInvocationID.x;
    float factor = 1, inverse = 1;
#if HALF
    float most = 0;
    for (uint e = 4 * t; e < p.k; e += 4 * WG) {
        vec4 v = abs(four(row, e));
        most = max(most, max(max(v.x, v.y), max(v.z, v.w)));
    }
    uint exponent = floatBitsToUint(wg_max(most)) >> 23;
    if (exponent != 0 && exponent != 255) {
        exponent = max(exponent, 15);
        factor = uintBitsToFloat((exponent - 14) << 23);
        inverse = uintBitsToFloat((268 - exponent) << 23);
    }
#endif
    if (t == 0) F32(p.factors).v[column] = factor;
    for (uint e = 4 * t; e < p.padded_k; e += 4 * WG) {
        vec4 v = four(row, e) * inverse;
#if HALF
        U32x2(to).v[e / 4] = uvec2(packHalf2x16(v.xy), packHalf2x16(v.zw));
#else
        U32x2(to).v[e / 4] = uvec2(bf16_bits(v.x) | bf16_bits(v.y) << 16, bf16_bits(v.z) | bf16_bits(v.w) << 16);
#endif
    }
}
