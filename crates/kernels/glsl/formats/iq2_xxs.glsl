// IQ2_XXS: 256 values in 66 bytes. f16 d @0, eight groups of two u32 @2: four grid indices of a byte each; four times seven
// sign bits and, on top, four bits of scale. d * (0.5 + scale) / 4 * grid[index][j], with sign
#include "formats/iq2_xxs_grid.glsl"
#define IQ2_XXS_GROUP 32
#define IQ2_XXS_BLOCK 256
#define IQ2_XXS_BLOCK_BYTES 66

void iq2_xxs_init() { iq2_xxs_fill(); }
uvec2 iq2_xxs_at(uvec2 row, uint e) { return offset(row, e / 256 * 66); }
// Values 4 i .. 4 i + 3 of a group.
uint iq2_xxs_four(uint indices, uint rest, uint i) {
    uint g = i / 2, h = i & 1u;
    return with_signs(iq2_xxs_entry((indices >> (8 * g)) & 255u, h), even_signs(rest >> (7 * g)) >> (4 * h));
}
uint iq2_xxs_codes4(uvec2 row, uint e) {
    uvec2 b = iq2_xxs_at(row, e);
    uint at = 1 + (e & 224u) / 8;
    return iq2_xxs_four(two_halves(b, at), two_halves(b, at + 2), (e & 31u) / 4);
}
vec2 iq2_xxs_scale(uvec2 row, uint e) {
    uvec2 b = iq2_xxs_at(row, e);
    return half_steps(half_at(b, 0), half_word(b, 4 + (e & 224u) / 8) >> 12, 0.25);
}
void iq2_xxs_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = iq2_xxs_at(row, e);
    uint at = 1 + (e & 224u) / 8;
    uint indices = two_halves(b, at), rest = two_halves(b, at + 2);
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = iq2_xxs_four(indices, rest, i);
    lo = hi = half_steps(half_at(b, 0), rest >> 28, 0.25);
}
SCALED_VALUES(iq2_xxs)
