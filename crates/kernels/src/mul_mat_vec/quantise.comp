// Activations of mul_mat_vec as integers, where they are too large for shared memory. Of 8 bits: for 128 elements 144 bytes, four factors
// of f32, then the codes. WIDE, of 16 bits: for 128 elements 272 bytes, four factors of f32, then the upper bytes of the codes, then
// the lower ones. Activations that no norm has been at may be of any magnitude, so factors are not halves. PARTS workgroups an activation vector, one with NORM.
// With NORM, what follows all activations is 1 / sqrt(mean of squares + eps) of each, and the weight is in the codes.
#version 450
#include "kiln.glsl"
layout(local_size_x = WG) in;
#include "formats.glsl"
#include "mul_mat_vec/round32.glsl"
#if NORM
#include "reduce.glsl"
#endif

void main() {
    uint column = group_index() / PARTS, part = group_index() % PARTS;
    if (column >= p.columns) return;
    B_INIT();
    uint i1 = column % p.b1, rest = column / p.b1;
    uvec2 from = row_address(row_address(row_address(p.b, i1, p.b_stride[0]), rest % p.b2, p.b_stride[1]), rest / p.b2, p.b_stride[2]);
    uvec2 to = row_address(p.scratch, column, p.activation_bytes);
    float squares = 0;
    // The last 128 elements may be fewer; what is missing is never read.
    for (uint g = part * WG + gl_LocalInvocationID.x; g < p.k / 32; g += PARTS * WG) {
#if WIDE
        vec4 x[8];
        float most = load32(from, g, x, squares);
        float inverse = inverse_of(most, 32512.0);
        uint at = g / 4 * 68;
        [[unroll]] for (uint i = 0; i < 8; i++) {
            uvec2 codes = rounded_pairs(x[i], inverse);
            U32(to).v[at + 4 + (g & 3u) * 8 + i] = codes.x;
            U32(to).v[at + 36 + (g & 3u) * 8 + i] = codes.y;
        }
        F32(to).v[at + (g & 3u)] = most * (1.0 / 32512.0);
#else
        uint codes[8];
        float scale = round32(from, g, codes, squares);
        uint at = g / 4 * 36;
        [[unroll]] for (uint i = 0; i < 8; i++) U32(to).v[at + 4 + (g & 3u) * 8 + i] = codes[i];
        F32(to).v[at + (g & 3u)] = scale;
#endif
    }
#if NORM
    float factor = inversesqrt(wg_sum(squares) / float(p.k) + p.eps);
    if (gl_LocalInvocationID.x == 0) F32(p.factors).v[column] = factor;
#endif
}
