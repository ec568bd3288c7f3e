// Q3_Kx1: 256 values of Q3_K in 112 bytes, 2 of them unused, in groups of 32: low two bits @0[8][8] (of each 16 elements,
// element l in bits 2 (l / 4) of byte l % 4), high bits @64[8][4] (element e in bit e / 4 of byte e % 4), six-bit scales
// @96[12] (of scale i four bits in nibble i of the first eight bytes, two bits at 2 i of the last four), f16 d @108.
// d * (scale - 32) * (low + 4 * high - 4)
#include "formats/codes.glsl"
#define Q3_KX1_GROUP 16
#define Q3_KX1_BLOCK 256
#define Q3_KX1_BLOCK_BYTES 112

void q3_kx1_init() {}
uvec2 q3_kx1_at(uvec2 row, uint e) { return offset(row, e / 256 * 112); }
uint q3_kx1_codes4(uvec2 row, uint e) {
    uvec2 b = q3_kx1_at(row, e);
    uint low = U32(b).v[(e & 255u) / 16] >> ((e & 12u) / 2);
    uint high = U32(b).v[16 + (e & 255u) / 32] >> ((e & 31u) / 4);
    return minus_bytes((low & 0x03030303u) | (high & 0x01010101u) << 2, 0x04040404u);
}
// Scale i of a block whose last 16 bytes are `tail`.
float q3_kx1_scale_of(uvec4 tail, uint i) {
    uint low = (i < 8 ? tail.x : tail.y) >> (4 * (i & 7u)), high = tail.z >> (2 * i);
    precise float s = unpackHalf2x16(tail.w).x * float(int((low & 15u) | (high & 3u) << 4) - 32);
    return s;
}
vec2 q3_kx1_scale(uvec2 row, uint e) {
    return vec2(q3_kx1_scale_of(U32x4(q3_kx1_at(row, e)).v[6], (e & 255u) / 16), 0.0);
}
struct q3_kx1_piece { uvec2 low; uint high; uvec4 tail; };
q3_kx1_piece q3_kx1_fetch(uvec2 row, uint e) {
    uvec2 b = q3_kx1_at(row, e);
    uint i = (e & 255u) / 32;
    return q3_kx1_piece(U32x2(b).v[i], U32(b).v[16 + i], U32x4(b).v[6]);
}
void q3_kx1_unfold(q3_kx1_piece x, uint e, uint j, out uint codes[8], out vec2 lo, out vec2 hi) {
    [[unroll]] for (uint i = 0; i < 4; i++) {
        codes[i] = (x.low.x >> (2 * i)) & 0x03030303u;
        codes[4 + i] = ((x.low.y >> (2 * i)) & 0x03030303u) | ((x.high >> (2 + i)) & 0x04040404u);
    }
    codes[0] |= (x.high << 2) & 0x04040404u;
    codes[1] |= (x.high << 1) & 0x04040404u;
    codes[2] |= x.high & 0x04040404u;
    codes[3] |= (x.high >> 1) & 0x04040404u;
    uint i = (e & 255u) / 32;
    lo = vec2(q3_kx1_scale_of(x.tail, 2 * i), 0.0);
    hi = vec2(q3_kx1_scale_of(x.tail, 2 * i + 1), 0.0);
}
GROUP_OF_PIECE(q3_kx1, raw32, 1)
GROUP32_OF_RAW(q3_kx1, 4)
SCALED_VALUES(q3_kx1)
