// Q6_K: 256 values in 210 bytes, 16 sub-blocks of 16. Low nibbles @0[128], upper two bits @128[64], int8 scales @192[16],
// f16 d @208. Element 128 n + 32 g + l: nibble g / 2 of byte 64 n + 32 (g % 2) + l, bits 2 g of byte 128 + 32 n + l.
// d * scale * (code - 32)
#include "formats/codes.glsl"
#define Q6_K_GROUP 16
#define Q6_K_BLOCK 256
#define Q6_K_BLOCK_BYTES 210

void q6_k_init() {}
uvec2 q6_k_at(uvec2 row, uint e) { return offset(row, e / 256 * 210); }
// Codes of elements e .. e + 3 of a block; e counts from its start.
uint q6_k_block_codes(uvec2 b, uint e) {
    uint low = two_halves(b, (e & 128u) / 4 + (e & 63u) / 2) >> ((e & 64u) / 16);
    uint high = two_halves(b, 64 + (e & 128u) / 8 + (e & 31u) / 2) >> ((e & 96u) / 16);
    return minus_bytes((low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4, 0x20202020u);
}
uint q6_k_codes4(uvec2 row, uint e) { return q6_k_block_codes(q6_k_at(row, e), e & 255u); }
vec2 q6_k_scale(uvec2 row, uint e) {
    uvec2 b = q6_k_at(row, e);
    precise float s = half_at(b, 104) * signed_byte(byte_at(b, 192 + (e & 255u) / 16), 0);
    return vec2(s, 0.0);
}
void q6_k_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = q6_k_at(row, e);
    uint first = e & 255u;
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = q6_k_block_codes(b, first + 4 * i);
    uint scales = half_word(b, 96 + first / 32);
    precise vec2 s = half_at(b, 104) * vec2(signed_byte(scales, 0), signed_byte(scales, 1));
    lo = vec2(s.x, 0.0);
    hi = vec2(s.y, 0.0);
}
SCALED_VALUES(q6_k)
