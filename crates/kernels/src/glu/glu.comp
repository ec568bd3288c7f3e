// glu: dst = f(gate) * up, element by element; GATE(gate, up) is given from Rust.
// gate, up, dst: same extents, any strides (two tensors, or the halves of one); dst may be either of them.
// Each thread computes PER units of VEC elements.
#version 450
#include "kiln.glsl"
#include "elementwise.glsl"
#include "activations.glsl"

float gated(float gate, float up) { return FUNCTION(gate) * up; }

float swiglu_oai(float gate, float up) {
    gate = min(gate, p.limit);
    return gate * sigmoid(p.alpha * gate) * (1.0 + clamp(up, -p.limit, p.limit));
}

float swiglu_limited(float gate, float up) { return min(silu(gate), p.limit) * clamp(up, -p.limit, p.limit); }

float swiglu_bounded(float gate, float up) { return silu(min(gate, p.limit)) * clamp(up, -p.limit, p.limit); }

// beta and linear stand in alpha and limit.
float bounded(float x, float most) { return most * tanh_of(x / most); }

float situ(float gate, float up) {
    return bounded(gate, p.alpha) * sigmoid(gate) * (p.limit > 0.0 ? bounded(up, p.limit) : up);
}

VALUE compute(uint unit, out uint dst_at) {
#if DENSE
    uint gate_at = unit * VEC, up_at = unit * VEC;
    dst_at = unit * VEC;
#else
    uvec4 at = unravel(unit, p.shape);
    uint gate_at = ravel(at, p.gate_stride), up_at = ravel(at, p.up_stride);
    dst_at = ravel(at, p.dst_stride);
#endif
    VALUE gate = LOAD_G(element(p.gate, gate_at, SHIFT_G));
    VALUE up = LOAD_U(element(p.up, up_at, SHIFT_U));
    return EACH2(GATE, gate, up);
}
