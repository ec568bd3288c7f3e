// quantise_q8_1: activations to blocks of 128 values for integer-dot kernels. x: [cols, ..] F32 or F16, any row strides;
// y: 144 bytes per 128 values of a row: four pairs (f16 d, f16 s), then 128 int8. Per 32 values d = max|x| / 127,
// q = round(x / d) with the rounded d, s = d * sum(q). Past the end of a row values count as zero.
// Eight threads share 32 values, four each.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "formats.glsl"
#include "half_bits.glsl"

shared float most[WG];
shared int sums[WG];

uvec2 row_of(uvec2 base, uvec3 at, uint stride[3]) {
    return row_address(row_address(row_address(base, at.x, stride[0]), at.y, stride[1]), at.z, stride[2]);
}

float take(uvec2 x, uint e) { return e < p.cols ? A_LOAD(x, e) : 0.0; }

void main() {
    uint t = gl_LocalInvocationID.x;
    uint unit = group_index() * WG + t;
    bool mine = unit < p.units;
    uint row = unit / p.row_units;
    uint e = (unit - row * p.row_units) * 4;
    uvec4 at = unravel(row, uint[4](p.shape[0], p.shape[1], p.shape[2], 1));
    vec4 v = vec4(0.0);
    if (mine) {
        uvec2 x = row_of(p.x, at.xyz, p.x_stride);
#if FOURS
        if (e < p.cols) v = A_LOAD4(x, e);
#else
        v = vec4(take(x, e), take(x, e + 1), take(x, e + 2), take(x, e + 3));
#endif
    }
    vec4 size = abs(v);
    most[t] = max(max(size.x, size.y), max(size.z, size.w));
    barrier();
    uint first = t & ~7u;
    float largest = most[first];
    [[unroll]] for (uint i = 1; i < 8; i++) largest = max(largest, most[first + i]);
    uint d_bits = half_bits(largest / 127.0);
    float d = unpackHalf2x16(d_bits).x;
    float inverse = d_bits == 0 ? 0.0 : 1.0 / d;
    vec4 level = v * inverse;
    ivec4 q = ivec4(clamp(level + mix(vec4(0.5), vec4(-0.5), lessThan(level, vec4(0.0))), -127.0, 127.0));
    sums[t] = q.x + q.y + q.z + q.w;
    barrier();
    if (!mine) return;
    uvec2 y = offset(row_of(p.y, at.xyz, p.y_stride), e / 128 * 144);
    uvec4 u = uvec4(q) & 255u;
    U32(y).v[4 + (e & 127u) / 4] = u.x | u.y << 8 | u.z << 16 | u.w << 24;
    if (t != first) return;
    int sum = sums[first];
    [[unroll]] for (uint i = 1; i < 8; i++) sum += sums[first + i];
    U32(y).v[(e & 127u) / 32] = d_bits | half_bits(d * float(sum)) << 16;
}
