// IQ1_M: 256 values in 56 bytes. Low bytes of the grid indices @0[32], a nibble per 8 values @32[16] (three upper bits of the
// index, the sign of the shift), u16 @48[4]: four times three bits of scale, one per 16 values, and on top a nibble of the
// f16 d, lowest first. d * (2 scale + 1) * (grid[index][j] + 1/8, or - 1/8 where the nibble's top bit is set)
// A code is eight times the bracket, so the scale is an eighth.
#include "formats/iq1_grid.glsl"
#define IQ1_M_GROUP 16
#define IQ1_M_BLOCK 256
#define IQ1_M_BLOCK_BYTES 56

void iq1_m_init() { iq1_fill(); }
uvec2 iq1_m_at(uvec2 row, uint e) { return offset(row, e / 256 * 56); }
// Values 4 i .. 4 i + 3 of a group, from its low bytes and its nibbles.
uint iq1_m_four(uint low, uint nibbles, uint i) {
    uint g = i / 2, nibble = nibbles >> (4 * g);
    return iq1_codes(((low >> (8 * g)) & 255u) | (nibble & 7u) << 8, i & 1u, (nibble >> 3) & 1u);
}
uint iq1_m_codes4(uvec2 row, uint e) {
    uvec2 b = iq1_m_at(row, e);
    uint group = (e & 255u) / 32;
    return iq1_m_four(U32(b).v[group], half_word(b, 16 + group), (e & 31u) / 4);
}
// An eighth of the scales of the two halves of a group, from the last eight bytes of a block.
vec2 iq1_m_scales(uvec2 tail, uint group) {
    uvec2 top = (tail >> 12) & 0x000f000fu;
    uint d = (top.x & 15u) | top.x >> 12 | (top.y & 15u) << 8 | top.y >> 16 << 12;
    uint word = (group & 4u) == 0 ? tail.x : tail.y;
    uint bits = word >> (16 * (group / 2 & 1u) + 6 * (group & 1u));
    precise vec2 s = unpackHalf2x16(d).x * vec2(2 * (bits & 7u) + 1, 2 * ((bits >> 3) & 7u) + 1) * 0.125;
    return s;
}
vec2 iq1_m_scale(uvec2 row, uint e) {
    vec2 s = iq1_m_scales(U32x2(iq1_m_at(row, e)).v[6], (e & 255u) / 32);
    return vec2((e & 16u) == 0 ? s.x : s.y, 0.0);
}
void iq1_m_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = iq1_m_at(row, e);
    uint group = (e & 255u) / 32;
    uint low = U32(b).v[group], nibbles = half_word(b, 16 + group);
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = iq1_m_four(low, nibbles, i);
    vec2 s = iq1_m_scales(U32x2(b).v[6], group);
    lo = vec2(s.x, 0.0);
    hi = vec2(s.y, 0.0);
}
SCALED_VALUES(iq1_m)
