// IQ2_XS: 256 values in 74 bytes. f16 d @0, u16 @2[32] per 8 values: nine bits of grid index, seven sign bits; scales
// @66[8]: a nibble per 16 values. d * (0.5 + scale) / 4 * grid[index][j], with sign
#include "formats/iq2_xs_grid.glsl"
#define IQ2_XS_GROUP 16
#define IQ2_XS_BLOCK 256
#define IQ2_XS_BLOCK_BYTES 74

void iq2_xs_init() { iq2_xs_fill(); }
uvec2 iq2_xs_at(uvec2 row, uint e) { return offset(row, e / 256 * 74); }
uint iq2_xs_four(uint word, uint h) {
    return with_signs(iq2_xs_entry(word & 511u, h), even_signs(word >> 9) >> (4 * h));
}
uint iq2_xs_codes4(uvec2 row, uint e) {
    return iq2_xs_four(half_word(iq2_xs_at(row, e), 1 + (e & 255u) / 8), (e & 4u) / 4);
}
vec2 iq2_xs_scale(uvec2 row, uint e) {
    uvec2 b = iq2_xs_at(row, e);
    return half_steps(half_at(b, 0), byte_at(b, 66 + (e & 255u) / 32) >> ((e & 16u) / 4), 0.25);
}
void iq2_xs_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = iq2_xs_at(row, e);
    [[unroll]] for (uint g = 0; g < 4; g++) {
        uint word = half_word(b, 1 + (e & 255u) / 8 + g);
        codes[2 * g] = iq2_xs_four(word, 0);
        codes[2 * g + 1] = iq2_xs_four(word, 1);
    }
    float d = half_at(b, 0);
    uint scales = byte_at(b, 66 + (e & 255u) / 32);
    lo = half_steps(d, scales, 0.25);
    hi = half_steps(d, scales >> 4, 0.25);
}
SCALED_VALUES(iq2_xs)
