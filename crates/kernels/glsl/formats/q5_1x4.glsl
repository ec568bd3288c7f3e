// Q5_1x4: 128 values of Q5_1 in 96 bytes: the nibbles of four blocks @0[4][16] as in Q4_0x8, fifth bits of each @64[4][4],
// f16 d and m of each @80[4][2]. (nibble + 16 * bit) * d + m
#include "formats/fifth_bits.glsl"
#define Q5_1X4_GROUP 32
#define Q5_1X4_BLOCK 128
#define Q5_1X4_BLOCK_BYTES 96

void q5_1x4_init() {}
uvec2 q5_1x4_at(uvec2 row, uint e) { return offset(row, e / 128 * 96); }
uint q5_1x4_codes4(uvec2 row, uint e) {
    uvec2 b = q5_1x4_at(row, e);
    uint q = U32(b).v[(e & 96u) / 8 + (e & 12u) / 4];
    return five_bits4(q, U32(b).v[16 + (e & 127u) / 32], e);
}
vec2 q5_1x4_scale(uvec2 row, uint e) { return unpackHalf2x16(U32(q5_1x4_at(row, e)).v[20 + (e & 127u) / 32]); }
struct q5_1x4_piece { uvec4 q; uint high, dm; };
q5_1x4_piece q5_1x4_fetch(uvec2 row, uint e) {
    uvec2 b = q5_1x4_at(row, e);
    uint i = (e & 127u) / 32;
    return q5_1x4_piece(U32x4(b).v[i], U32(b).v[16 + i], U32(b).v[20 + i]);
}
void q5_1x4_unfold(q5_1x4_piece x, uint e, uint j, out uint codes[8], out vec2 lo, out vec2 hi) {
    five_bits32(x.q, x.high, codes);
    lo = hi = unpackHalf2x16(x.dm);
}
GROUP_OF_PIECE(q5_1x4, group32, 1)
VALUES_WITH_MIN(q5_1x4)
