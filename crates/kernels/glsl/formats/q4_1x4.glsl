// Q4_1x4: 128 values of Q4_1 in 80 bytes: the nibbles of four blocks @0[4][16] as in Q4_0x8, f16 d and m of each @64[4][2].
// nibble * d + m
#include "formats/codes.glsl"
#define Q4_1X4_GROUP 32
#define Q4_1X4_BLOCK 128
#define Q4_1X4_BLOCK_BYTES 80

void q4_1x4_init() {}
uvec2 q4_1x4_at(uvec2 row, uint e) { return offset(row, e / 128 * 80); }
uint q4_1x4_codes4(uvec2 row, uint e) {
    return (U32(q4_1x4_at(row, e)).v[(e & 96u) / 8 + (e & 12u) / 4] >> ((e & 16u) / 4)) & 0x0f0f0f0fu;
}
vec2 q4_1x4_scale(uvec2 row, uint e) { return unpackHalf2x16(U32(q4_1x4_at(row, e)).v[16 + (e & 127u) / 32]); }
struct q4_1x4_piece { uvec4 q; uint dm; };
q4_1x4_piece q4_1x4_fetch(uvec2 row, uint e) {
    uvec2 b = q4_1x4_at(row, e);
    uint i = (e & 127u) / 32;
    return q4_1x4_piece(U32x4(b).v[i], U32(b).v[16 + i]);
}
void q4_1x4_unfold(q4_1x4_piece x, uint e, uint j, out uint codes[8], out vec2 lo, out vec2 hi) {
    nibbles32(x.q, codes);
    lo = hi = unpackHalf2x16(x.dm);
}
GROUP_OF_PIECE(q4_1x4, group32, 1)
VALUES_WITH_MIN(q4_1x4)
