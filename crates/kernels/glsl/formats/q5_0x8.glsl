// Q5_0x8: 256 values of Q5_0 in 176 bytes: the nibbles of eight blocks @0[8][16] as in Q4_0x8, fifth bits of each @128[8][4],
// f16 d of each @160[8]. (nibble + 16 * bit - 16) * d
#include "formats/fifth_bits.glsl"
#define Q5_0X8_GROUP 32
#define Q5_0X8_BLOCK 256
#define Q5_0X8_BLOCK_BYTES 176

void q5_0x8_init() {}
uvec2 q5_0x8_at(uvec2 row, uint e) { return offset(row, e / 256 * 176); }
uint q5_0x8_codes4(uvec2 row, uint e) {
    uvec2 b = q5_0x8_at(row, e);
    uint q = U32(b).v[(e & 224u) / 8 + (e & 12u) / 4];
    return minus_bytes(five_bits4(q, U32(b).v[32 + (e & 255u) / 32], e), 0x10101010u);
}
vec2 q5_0x8_scale(uvec2 row, uint e) { return vec2(half_at(q5_0x8_at(row, e), 80 + (e & 255u) / 32), 0.0); }
struct q5_0x8_piece { uvec4 q; uint high; uint d; };
q5_0x8_piece q5_0x8_fetch(uvec2 row, uint e) {
    uvec2 b = q5_0x8_at(row, e);
    uint i = (e & 255u) / 32;
    return q5_0x8_piece(U32x4(b).v[i], U32(b).v[32 + i], half_word(b, 80 + i));
}
void q5_0x8_unfold(q5_0x8_piece x, uint e, uint j, out uint codes[8], out vec2 lo, out vec2 hi) {
    five_bits32(x.q, x.high, codes);
    lo = hi = vec2(unpackHalf2x16(x.d).x, 0.0);
}
GROUP_OF_PIECE(q5_0x8, raw32, 1)
GROUP32_OF_RAW(q5_0x8, 16)
SCALED_VALUES(q5_0x8)
