// xielu: dst = beta x + positive x^2 where x > 0, beta x + negative (e^min(x, eps) - 1 - x) elsewhere.
// x, dst: same extents, any strides; dst may be x. Each thread computes PER units of VEC elements.
#version 450
#include "kiln.glsl"
#include "elementwise.glsl"
#include "activations.glsl"

float xielu(float x) {
    float bend = x > 0.0 ? p.positive * x * x : p.negative * (elu(min(x, p.eps)) - x);
    return p.beta * x + bend;
}

VALUE compute(uint unit, out uint dst_at) {
#if DENSE
    uint x_at = unit * VEC;
    dst_at = x_at;
#else
    uvec4 at = unravel(unit, p.shape);
    uint x_at = ravel(at, p.x_stride);
    dst_at = ravel(at, p.dst_stride);
#endif
    VALUE x = LOAD_X(element(p.x, x_at, SHIFT_X));
    return EACH(xielu, x);
}
