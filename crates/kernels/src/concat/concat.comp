// concat: dst = a, then b along dimension `dim`; bits are moved as they are.
// a, b, dst: extents agree but for `dim`; any strides. Each thread moves PER units of VEC elements in dst's order.
#version 450
#include "kiln.glsl"
#include "elementwise.glsl"

VALUE compute(uint unit, out uint dst_at) {
    uvec4 at = unravel(unit, p.shape);
    dst_at = ravel(at, p.dst_stride);
    if (at[p.dim] < p.split) return LOAD_D(element(p.a, ravel(at, p.a_stride), SHIFT_D));
    at[p.dim] -= p.split;
    return LOAD_D(element(p.b, ravel(at, p.b_stride), SHIFT_D));
}
