// Multiplies and adds in registers: CHAINS independent chains per thread, p.rounds long, of f32 (KIND 0), of pairs of f16
// (1), or of packed products of four bytes each (2).
#version 450
#include "kiln.glsl"
#if KIND == 1
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#define NUMBER f16vec2
#define STEP(c) fma(c, a, b)
#elif KIND == 2
#extension GL_EXT_integer_dot_product : require
#define NUMBER int
#define STEP(c) (c + dotPacked4x8EXT(c, a))
#else
#define NUMBER float
#define STEP(c) fma(c, a, b)
#endif

layout(local_size_x = WG) in;

void main() {
    NUMBER c[CHAINS];
    NUMBER a = NUMBER(p.factor + 1e-7 * float(gl_LocalInvocationID.x)), b = NUMBER(p.factor);
    [[unroll]] for (uint i = 0; i < CHAINS; i++) c[i] = NUMBER(float(i) + p.factor);
    for (uint round = 0; round < p.rounds; round++) {
        [[unroll]] for (uint i = 0; i < CHAINS; i++) c[i] = STEP(c[i]);
    }
    NUMBER sum = NUMBER(0);
    [[unroll]] for (uint i = 0; i < CHAINS; i++) sum += c[i];
    if (sum == NUMBER(p.never)) F32(p.sink).v[0] = 1.0;
}
