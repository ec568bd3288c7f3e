// IQ1_S: 256 values in 50 bytes. f16 d @0, low bytes of the grid indices @2[32], u16 @34[8] per 32 values: four times three
// upper bits of the indices, three bits of scale, the sign of the shift.
// d * (2 scale + 1) * (grid[index][j] + 1/8, or - 1/8 where the top bit is set)
// A code is eight times the bracket, so the scale is an eighth.
#include "formats/iq1_grid.glsl"
#define IQ1_S_GROUP 32
#define IQ1_S_BLOCK 256
#define IQ1_S_BLOCK_BYTES 50

void iq1_s_init() { iq1_fill(); }
uvec2 iq1_s_at(uvec2 row, uint e) { return offset(row, e / 256 * 50); }
// Values 4 i .. 4 i + 3 of a group, from its low bytes and its 16 bits.
uint iq1_s_four(uint low, uint high, uint i) {
    uint g = i / 2;
    return iq1_codes(((low >> (8 * g)) & 255u) | ((high >> (3 * g)) & 7u) << 8, i & 1u, high >> 15);
}
uint iq1_s_codes4(uvec2 row, uint e) {
    uvec2 b = iq1_s_at(row, e);
    uint group = (e & 255u) / 32;
    return iq1_s_four(two_halves(b, 1 + 2 * group), half_word(b, 17 + group), (e & 31u) / 4);
}
vec2 iq1_s_scale(uvec2 row, uint e) {
    uvec2 b = iq1_s_at(row, e);
    uint scale = (half_word(b, 17 + (e & 255u) / 32) >> 12) & 7u;
    precise float s = half_at(b, 0) * float(2 * scale + 1) * 0.125;
    return vec2(s, 0.0);
}
void iq1_s_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = iq1_s_at(row, e);
    uint group = (e & 255u) / 32;
    uint low = two_halves(b, 1 + 2 * group), high = half_word(b, 17 + group);
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = iq1_s_four(low, high, i);
    lo = hi = iq1_s_scale(row, e);
}
SCALED_VALUES(iq1_s)
