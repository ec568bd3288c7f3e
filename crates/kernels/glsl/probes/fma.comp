// Multiplies and adds in registers: CHAINS independent chains of f32 per thread, p.rounds long.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;

void main() {
    float c[CHAINS];
    float a = p.factor + 1e-7 * float(gl_LocalInvocationID.x);
    [[unroll]] for (uint i = 0; i < CHAINS; i++) c[i] = float(i) + p.factor;
    for (uint round = 0; round < p.rounds; round++) {
        [[unroll]] for (uint i = 0; i < CHAINS; i++) c[i] = fma(c[i], a, p.factor);
    }
    float sum = 0.0;
    [[unroll]] for (uint i = 0; i < CHAINS; i++) sum += c[i];
    if (sum == p.never) F32(p.sink).v[0] = sum;
}
