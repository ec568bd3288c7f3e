// binary: dst = a OP b, b repeated (index modulo its extents) in every dimension.
// a, dst: same extents, b: extents that divide them; any strides; dst may be a.
// Each thread computes PER units of VEC elements. In the DENSE walk b is repeated along the outermost dimensions only.
#version 450
#include "kiln.glsl"
#include "elementwise.glsl"

VALUE compute(uint unit, out uint dst_at) {
#if DENSE
    uint a_at = unit * VEC;
    uint b_at = (unit % p.b_units) * VEC;
    dst_at = a_at;
#else
    uvec4 at = unravel(unit, p.shape);
    uint a_at = ravel(at, p.a_stride);
    uint b_at = ravel(at % uvec4(p.b_shape[0], p.b_shape[1], p.b_shape[2], p.b_shape[3]), p.b_stride);
    dst_at = ravel(at, p.dst_stride);
#endif
    return LOAD_A(element(p.a, a_at, SHIFT_A)) OP LOAD_B(element(p.b, b_at, SHIFT_B));
}
