// IQ2_S: 256 values in 82 bytes. f16 d @0, low bytes of the grid indices @2[32], signs @34[32] (a bit per value), upper two
// bits of the indices @66[8], scales @74[8]: a nibble per 16 values. d * (0.5 + scale) / 4 * grid[index][j], with sign
#include "formats/iq2_s_grid.glsl"
#define IQ2_S_GROUP 16
#define IQ2_S_BLOCK 256
#define IQ2_S_BLOCK_BYTES 82

void iq2_s_init() { iq2_s_fill(); }
uvec2 iq2_s_at(uvec2 row, uint e) { return offset(row, e / 256 * 82); }
// Values 4 i .. 4 i + 3 of a group, from its low bytes, its signs and its upper bits.
uint iq2_s_four(uint low, uint signs, uint high, uint i) {
    uint g = i / 2, h = i & 1u;
    uint index = ((low >> (8 * g)) & 255u) | ((high >> (2 * g)) & 3u) << 8;
    return with_signs(iq2_s_entry(index, h), signs >> (4 * i));
}
uint iq2_s_codes4(uvec2 row, uint e) {
    uvec2 b = iq2_s_at(row, e);
    uint group = (e & 255u) / 32;
    return iq2_s_four(two_halves(b, 1 + 2 * group), two_halves(b, 17 + 2 * group), byte_at(b, 66 + group), (e & 31u) / 4);
}
vec2 iq2_s_scale(uvec2 row, uint e) {
    uvec2 b = iq2_s_at(row, e);
    return half_steps(half_at(b, 0), byte_at(b, 74 + (e & 255u) / 32) >> ((e & 16u) / 4), 0.25);
}
void iq2_s_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = iq2_s_at(row, e);
    uint group = (e & 255u) / 32;
    uint low = two_halves(b, 1 + 2 * group), signs = two_halves(b, 17 + 2 * group), high = byte_at(b, 66 + group);
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = iq2_s_four(low, signs, high, i);
    float d = half_at(b, 0);
    uint scales = byte_at(b, 74 + group);
    lo = half_steps(d, scales, 0.25);
    hi = half_steps(d, scales >> 4, 0.25);
}
SCALED_VALUES(iq2_s)
