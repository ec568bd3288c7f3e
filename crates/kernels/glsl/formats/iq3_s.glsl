// IQ3_S: 256 values in 110 bytes. f16 d @0, low bytes of the grid indices @2[64], their ninth bits @66[8], signs @74[32]
// (a bit per value), scales @106[4]: a nibble per 32 values. d * (1 + 2 scale) * grid[index][j], with sign
#include "formats/iq2.glsl"
#include "formats/iq3_s_grid.glsl"
#define IQ3_S_GROUP 32
#define IQ3_S_BLOCK 256
#define IQ3_S_BLOCK_BYTES 110

void iq3_s_init() { iq3_s_fill(); }
uvec2 iq3_s_at(uvec2 row, uint e) { return offset(row, e / 256 * 110); }
// Values 4 i .. 4 i + 3 of a group.
uint iq3_s_four(uint low, uint high, uint signs, uint i) {
    return with_signs(iq3_s_grid[low | ((high >> i) & 1u) << 8], signs >> (4 * i));
}
uint iq3_s_codes4(uvec2 row, uint e) {
    uvec2 b = iq3_s_at(row, e);
    uint group = (e & 255u) / 32;
    uint signs = two_halves(b, 37 + 2 * group);
    return iq3_s_four(byte_at(b, 2 + (e & 255u) / 4), byte_at(b, 66 + group), signs, (e & 31u) / 4);
}
vec2 iq3_s_scale(uvec2 row, uint e) {
    uvec2 b = iq3_s_at(row, e);
    uint group = (e & 255u) / 32;
    uint scale = (byte_at(b, 106 + group / 2) >> (4 * (group & 1u))) & 15u;
    precise float s = half_at(b, 0) * float(1 + 2 * scale);
    return vec2(s, 0.0);
}
void iq3_s_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = iq3_s_at(row, e);
    uint group = (e & 255u) / 32;
    uint high = byte_at(b, 66 + group), signs = two_halves(b, 37 + 2 * group);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uint low = half_word(b, 1 + 4 * group + i);
        codes[2 * i] = iq3_s_four(low & 255u, high, signs, 2 * i);
        codes[2 * i + 1] = iq3_s_four(low >> 8, high, signs, 2 * i + 1);
    }
    lo = hi = iq3_s_scale(row, e);
}
SCALED_VALUES(iq3_s)
