// Rounding of activations to one or two signed bytes, 32 elements with one factor: the largest magnitude / 127 or / 32512.
#include "rounding.glsl"

// Elements 4 q .. 4 q + 3 of an activation vector, after the weight of NORM; adds their squares (before the weight) to `squares`.
vec4 column_values(uvec2 column, uint q, inout float squares) {
    vec4 x = B_LOAD4(column, 4 * q);
#if NORM
    squares += dot(x, x);
#if NORM_WEIGHT
    x *= F32x4(p.norm_weight).v[q];
#endif
#endif
    return x;
}

// Elements 32 g .. 32 g + 31 of an activation vector; gives their largest magnitude back.
float load32(uvec2 column, uint g, out vec4 x[8], inout float squares) {
    float most = 0.0;
    [[unroll]] for (uint i = 0; i < 8; i++) {
        x[i] = column_values(column, 8 * g + i, squares);
        most = max(most, most_of(x[i]));
    }
    return most;
}

// The same as codes of 8 bits; gives their factor back.
float round32(uvec2 column, uint g, out uint codes[8], inout float squares) {
    vec4 x[8];
    float most = load32(column, g, x, squares);
    float inverse = inverse_of(most, 127.0);
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = rounded_bytes(x[i] * inverse);
    return most / 127.0;
}
