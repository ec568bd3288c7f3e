// The columns: as floats where they lie, or as 8-bit integers with one factor for 32 elements, in shared memory (STAGED) or
// in memory where `quantise.comp` put them: 144 bytes for 128 elements, four pairs of f16 (factor, sum), then the codes.
// With NORM, `factor` of a column becomes 1 / sqrt(mean + eps); the weight is multiplied into the elements.

#if !INT
#if NORM
float squares[COLS];
#endif

void start_columns(uvec2 b) {
#if NORM
    [[unroll]] for (uint c = 0; c < COLS; c++) squares[c] = 0;
#endif
}

#if SLICE > 1
vec4 column_quad(uint c, uint e) {
    vec4 x = B_LOAD4(columns[c], e);
#if NORM
    squares[c] += dot(x, x);
#if NORM_WEIGHT
    x *= F32x4(p.norm_weight).v[e / 4];
#endif
#endif
    return x;
}
#else
float column_element(uint c, uint e) {
    float x = B_LOAD(columns[c], e);
#if NORM
    squares[c] += x * x;
#if NORM_WEIGHT
    x *= F32(p.norm_weight).v[e];
#endif
#endif
    return x;
}
#endif

#if NORM
#if TEAM == WG
shared float square_sums[COLS][WG];
#endif
// Each team saw every element of the columns once.
void finish_columns() {
    [[unroll]] for (uint c = 0; c < COLS; c++) {
#if TEAM == WG
        uint t = gl_LocalInvocationID.x;
        square_sums[c][t] = squares[c];
        barrier();
        for (uint s = WG / 2; s > 0; s >>= 1) {
            if (t < s) square_sums[c][t] += square_sums[c][t + s];
            barrier();
        }
        float sum = square_sums[c][0];
#else
        float sum = subgroupAdd(squares[c]);
#endif
        factor[c] = p.scale * inversesqrt(sum / float(p.k) + p.eps);
    }
}
#else
void finish_columns() {
    [[unroll]] for (uint c = 0; c < COLS; c++) factor[c] = p.scale;
}
#endif

#elif STAGED
#include "mul_mat_vec/round32.glsl"
#extension GL_EXT_integer_dot_product : require
shared uint staged_codes[COLS * (K / 4)];
shared float staged_scales[COLS * (K / 32)];
#if NORM
shared float square_sums[WG];
#endif

// A thread for 32 elements.
void start_columns(uvec2 b) {
    uint t = gl_LocalInvocationID.x;
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        float squares = 0;
        for (uint g = t; g < K / 32; g += WG) {
            uint codes[8];
            staged_scales[c * (K / 32) + g] = round32(columns[c], g, codes, squares);
            [[unroll]] for (uint i = 0; i < 8; i++) staged_codes[c * (K / 4) + 8 * g + i] = codes[i];
        }
#if NORM
        square_sums[t] = squares;
        barrier();
        for (uint s = WG / 2; s > 0; s >>= 1) {
            if (t < s) square_sums[t] += square_sums[t + s];
            barrier();
        }
        factor[c] = p.scale * inversesqrt(square_sums[0] / float(K) + p.eps);
        barrier();
#else
        factor[c] = p.scale;
#endif
    }
    barrier();
}
void finish_columns() {}

uint column_codes(uint c, uint e) { return staged_codes[c * (K / 4) + e / 4]; }
float column_scale(uint c, uint e) { return staged_scales[c * (K / 32) + e / 32]; }

#else
#extension GL_EXT_integer_dot_product : require
void start_columns(uvec2 b) {}
void finish_columns() {
    [[unroll]] for (uint c = 0; c < COLS; c++) {
#if NORM
        factor[c] = p.scale * F32(p.norm_factors).v[first_column + c];
#else
        factor[c] = p.scale;
#endif
    }
}
uint column_codes(uint c, uint e) { return U32(columns[c]).v[e / 128 * 36 + 4 + (e & 127u) / 4]; }
float column_scale(uint c, uint e) { return float(F16(columns[c]).v[e / 128 * 72 + (e & 127u) / 32 * 2]); }
#endif
