// Q3_K: 256 values in 110 bytes, 16 sub-blocks of 16. High bits @0[32] (bit 4 n + g of byte l), two-bit codes @32[64] as in
// Q2_K, six-bit scales @96[12], f16 d @108. Scale i: four bits at nibble i / 8 of byte 96 + i % 8, two bits at bit
// 2 (i / 4) of byte 104 + i % 4. d * (scale - 32) * (low + 4 * high - 4)
#include "formats/codes.glsl"
#define Q3_K_GROUP 16
#define Q3_K_BLOCK 256
#define Q3_K_BLOCK_BYTES 110

void q3_k_init() {}
uvec2 q3_k_at(uvec2 row, uint e) { return offset(row, e / 256 * 110); }
// Codes of elements e .. e + 3 of a block; e counts from its start.
uint q3_k_block_codes(uvec2 b, uint e) {
    uint low = two_halves(b, 16 + (e & 128u) / 8 + (e & 31u) / 2) >> ((e & 96u) / 16);
    uint high = two_halves(b, (e & 31u) / 2) >> (e / 32);
    return minus_bytes((low & 0x03030303u) | (high & 0x01010101u) << 2, 0x04040404u);
}
uint q3_k_codes4(uvec2 row, uint e) { return q3_k_block_codes(q3_k_at(row, e), e & 255u); }
vec2 q3_k_scale(uvec2 row, uint e) {
    uvec2 b = q3_k_at(row, e);
    uint i = (e & 255u) / 16;
    uint low = byte_at(b, 96 + (i & 7u)) >> (i / 8 * 4);
    uint high = byte_at(b, 104 + (i & 3u)) >> (i / 4 * 2);
    precise float s = half_at(b, 54) * float(int((low & 15u) | (high & 3u) << 4) - 32);
    return vec2(s, 0.0);
}
void q3_k_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = q3_k_at(row, e);
    uint first = e & 255u;
    [[unroll]] for (uint j = 0; j < 8; j++) codes[j] = q3_k_block_codes(b, first + 4 * j);
    // Two neighbouring scales share a 16-bit word: i is even.
    uint i = first / 16;
    uint low = half_word(b, 48 + (i & 7u) / 2) >> (i / 8 * 4);
    uint high = half_word(b, 52 + (i & 3u) / 2) >> (i / 4 * 2);
    uint packed = (low & 0x0f0fu) | (high & 0x0303u) << 4;
    precise vec2 s = half_at(b, 54) * vec2(int(packed & 255u) - 32, int(packed >> 8) - 32);
    lo = vec2(s.x, 0.0);
    hi = vec2(s.y, 0.0);
}
SCALED_VALUES(q3_k)
