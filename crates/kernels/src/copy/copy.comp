// copy: dst = src, converted to dst's type (VALUE is float), or moved bit by bit where the types agree (VALUE is raw).
// src, dst: same extents, any strides. Each thread moves PER units of VEC elements, in the order of dst.
#version 450
#include "kiln.glsl"
#include "elementwise.glsl"

VALUE compute(uint unit, out uint dst_at) {
#if DENSE
    uint src_at = unit * VEC;
    dst_at = src_at;
#else
    uvec4 at = unravel(unit, p.shape);
    uint src_at = ravel(at, p.src_stride);
    dst_at = ravel(at, p.dst_stride);
#endif
    return LOAD_S(element(p.src, src_at, SHIFT_S));
}
