// Q8_0x8: 256 values of Q8_0 in 272 bytes: int8 of the first halves of eight blocks @0[8][16], of the second halves
// @128[8][16], f16 d of each block @256[8]. q * d
#include "formats/codes.glsl"
#define Q8_0X8_GROUP 32
#define Q8_0X8_BLOCK 256
#define Q8_0X8_BLOCK_BYTES 272

void q8_0x8_init() {}
uvec2 q8_0x8_at(uvec2 row, uint e) { return offset(row, e / 256 * 272); }
uint q8_0x8_codes4(uvec2 row, uint e) {
    return U32(q8_0x8_at(row, e)).v[(e & 16u) * 2 + (e & 224u) / 8 + (e & 12u) / 4];
}
vec2 q8_0x8_scale(uvec2 row, uint e) { return vec2(half_at(q8_0x8_at(row, e), 128 + (e & 255u) / 32), 0.0); }
struct q8_0x8_piece { uvec4 q[2]; uint d; };
q8_0x8_piece q8_0x8_fetch(uvec2 row, uint e) {
    uvec2 b = q8_0x8_at(row, e);
    uint i = (e & 255u) / 32;
    return q8_0x8_piece(uvec4[2](U32x4(b).v[i], U32x4(b).v[8 + i]), half_word(b, 128 + i));
}
void q8_0x8_unfold(q8_0x8_piece x, uint e, uint j, out uint codes[8], out vec2 lo, out vec2 hi) {
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = x.q[i / 4][i % 4];
    lo = hi = vec2(unpackHalf2x16(x.d).x, 0.0);
}
GROUP_OF_PIECE(q8_0x8, group32, 1)
SCALED_VALUES(q8_0x8)
