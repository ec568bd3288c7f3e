// gated_add: dst = x + f(gate) * y, element by element; f is given from Rust.
// gate, y, x, dst: same extents, any strides; dst may be any of them. Each thread computes PER units of VEC elements.
#version 450
#include "kiln.glsl"
#include "elementwise.glsl"
#include "activations.glsl"

VALUE compute(uint unit, out uint dst_at) {
#if DENSE
    uint gate_at = unit * VEC, y_at = unit * VEC, x_at = unit * VEC;
    dst_at = unit * VEC;
#else
    uvec4 at = unravel(unit, p.shape);
    uint gate_at = ravel(at, p.gate_stride), y_at = ravel(at, p.y_stride), x_at = ravel(at, p.x_stride);
    dst_at = ravel(at, p.dst_stride);
#endif
    VALUE gate = LOAD_G(element(p.gate, gate_at, SHIFT_G));
    VALUE y = LOAD_Y(element(p.y, y_at, SHIFT_Y));
    VALUE x = LOAD_X(element(p.x, x_at, SHIFT_X));
    return x + EACH(FUNCTION, gate) * y;
}
