// Q4_0x8: 256 values of Q4_0 in 144 bytes: the nibbles of eight blocks @0[8][16] (element e low in byte e, e + 16 high), f16
// d of each @128[8]. (nibble - 8) * d
#include "formats/codes.glsl"
#define Q4_0X8_GROUP 32
#define Q4_0X8_BLOCK 256
#define Q4_0X8_BLOCK_BYTES 144

void q4_0x8_init() {}
uvec2 q4_0x8_at(uvec2 row, uint e) { return offset(row, e / 256 * 144); }
uint q4_0x8_codes4(uvec2 row, uint e) {
    uint q = U32(q4_0x8_at(row, e)).v[(e & 224u) / 8 + (e & 12u) / 4] >> ((e & 16u) / 4);
    return minus_bytes(q & 0x0f0f0f0fu, 0x08080808u);
}
vec2 q4_0x8_scale(uvec2 row, uint e) { return vec2(half_at(q4_0x8_at(row, e), 64 + (e & 255u) / 32), 0.0); }
struct q4_0x8_piece { uvec4 q; uint d; };
q4_0x8_piece q4_0x8_fetch(uvec2 row, uint e) {
    uvec2 b = q4_0x8_at(row, e);
    uint i = (e & 255u) / 32;
    return q4_0x8_piece(U32x4(b).v[i], half_word(b, 64 + i));
}
void q4_0x8_unfold(q4_0x8_piece x, uint e, uint j, out uint codes[8], out vec2 lo, out vec2 hi) {
    nibbles32(x.q, codes);
    lo = hi = vec2(unpackHalf2x16(x.d).x, 0.0);
}
GROUP_OF_PIECE(q4_0x8, raw32, 1)
GROUP32_OF_RAW(q4_0x8, 8)
SCALED_VALUES(q4_0x8)
