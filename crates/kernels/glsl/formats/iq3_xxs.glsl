// IQ3_XXS: 256 values in 98 bytes. f16 d @0, grid indices @2[64], u32 @66[8]: four times seven sign bits and, on top, four
// bits of scale per 32 values. d * (0.5 + scale) / 2 * grid[index][j], with sign
#include "formats/iq2.glsl"
#include "formats/iq3_xxs_grid.glsl"
#define IQ3_XXS_GROUP 32
#define IQ3_XXS_BLOCK 256
#define IQ3_XXS_BLOCK_BYTES 98

void iq3_xxs_init() { iq3_xxs_fill(); }
uvec2 iq3_xxs_at(uvec2 row, uint e) { return offset(row, e / 256 * 98); }
// Values 4 i .. 4 i + 3 of a group.
uint iq3_xxs_four(uint index, uint rest, uint i) {
    return with_signs(iq3_xxs_grid[index], even_signs(rest >> (7 * (i / 2))) >> (4 * (i & 1u)));
}
uint iq3_xxs_codes4(uvec2 row, uint e) {
    uvec2 b = iq3_xxs_at(row, e);
    return iq3_xxs_four(byte_at(b, 2 + (e & 255u) / 4), two_halves(b, 33 + (e & 224u) / 16), (e & 31u) / 4);
}
vec2 iq3_xxs_scale(uvec2 row, uint e) {
    uvec2 b = iq3_xxs_at(row, e);
    return half_steps(half_at(b, 0), half_word(b, 34 + (e & 224u) / 16) >> 12, 0.5);
}
void iq3_xxs_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = iq3_xxs_at(row, e);
    uint group = (e & 255u) / 32;
    uint rest = two_halves(b, 33 + 2 * group);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uint indices = half_word(b, 1 + 4 * group + i);
        codes[2 * i] = iq3_xxs_four(indices & 255u, rest, 2 * i);
        codes[2 * i + 1] = iq3_xxs_four(indices >> 8, rest, 2 * i + 1);
    }
    lo = hi = half_steps(half_at(b, 0), rest >> 28, 0.5);
}
SCALED_VALUES(iq3_xxs)
