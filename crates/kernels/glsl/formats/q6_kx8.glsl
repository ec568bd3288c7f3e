// Q6_Kx8: 2048 values of Q6_K in 1680 bytes, in groups of 32: low nibbles @0[64][16] (element e low in byte e, e + 16 high),
// upper two bits @1024[64][8] (of each 16 elements, element l in bits 2 (l / 4) of byte l % 4), int8 scales of 16 elements
// @1536[128], f16 d of 256 elements @1664[8]. d * scale * (code - 32)
#include "formats/codes.glsl"
#define Q6_KX8_GROUP 16
#define Q6_KX8_BLOCK 2048
#define Q6_KX8_BLOCK_BYTES 1680

void q6_kx8_init() {}
uvec2 q6_kx8_at(uvec2 row, uint e) { return offset(row, e / 2048 * 1680); }
uint q6_kx8_codes4(uvec2 row, uint e) {
    uvec2 b = q6_kx8_at(row, e);
    uint i = (e & 2047u) / 32;
    uint low = U32(b).v[4 * i + (e & 12u) / 4] >> ((e & 16u) / 4);
    uint high = U32(b).v[256 + 2 * i + (e & 16u) / 16] >> ((e & 12u) / 2);
    return minus_bytes((low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4, 0x20202020u);
}
vec2 q6_kx8_scale(uvec2 row, uint e) {
    uvec2 b = q6_kx8_at(row, e);
    uint first = e & 2047u;
    precise float s = half_at(b, 832 + first / 256) * signed_byte(byte_at(b, 1536 + first / 16), 0);
    return vec2(s, 0.0);
}
void q6_kx8_raw32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = q6_kx8_at(row, e);
    uint i = (e & 2047u) / 32;
    uvec2 high = U32x2(b).v[128 + i];
    nibbles32(U32x4(b).v[i], codes);
    [[unroll]] for (uint j = 0; j < 2; j++) {
        codes[4 * j] |= (high[j] << 4) & 0x30303030u;
        codes[4 * j + 1] |= (high[j] << 2) & 0x30303030u;
        codes[4 * j + 2] |= high[j] & 0x30303030u;
        codes[4 * j + 3] |= (high[j] >> 2) & 0x30303030u;
    }
    uint scales = half_word(b, 768 + i);
    precise vec2 s = half_at(b, 832 + i / 8) * vec2(signed_byte(scales, 0), signed_byte(scales, 1));
    lo = vec2(s.x, 0.0);
    hi = vec2(s.y, 0.0);
}
GROUP32_OF_RAW(q6_kx8, 32)
SCALED_VALUES(q6_kx8)
