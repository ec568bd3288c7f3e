// Q2_K: 256 values in 84 bytes, 16 sub-blocks of 16. Scales @0[16] (low nibble scale, high nibble minimum), two-bit codes
// @16[64], f16 d @80, f16 dmin @82. Element 128 n + 32 g + l sits at bit 2 g of byte 16 + 32 n + l.
// d * scale * code - dmin * min
#include "formats/codes.glsl"
#define Q2_K_GROUP 16
#define Q2_K_BLOCK 256
#define Q2_K_BLOCK_BYTES 84

void q2_k_init() {}
uvec2 q2_k_at(uvec2 row, uint e) { return offset(row, e / 256 * 84); }
uint q2_k_codes4(uvec2 row, uint e) {
    return (U32(q2_k_at(row, e)).v[4 + (e & 128u) / 16 + (e & 31u) / 4] >> ((e & 96u) / 16)) & 0x03030303u;
}
// From d, dmin and the byte of a sub-block.
vec2 q2_k_scale_of(vec2 d, uint packed) {
    precise vec2 s = d * vec2(packed & 15u, (packed >> 4) & 15u);
    return vec2(s.x, -s.y);
}
vec2 q2_k_scale(uvec2 row, uint e) {
    uvec2 b = q2_k_at(row, e);
    return q2_k_scale_of(unpackHalf2x16(U32(b).v[20]), byte_at(b, (e & 255u) / 16));
}
void q2_k_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = q2_k_at(row, e);
    uint word = 4 + (e & 128u) / 16, shift = (e & 96u) / 16;
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = (U32(b).v[word + i] >> shift) & 0x03030303u;
    vec2 d = unpackHalf2x16(U32(b).v[20]);
    uint scales = half_word(b, (e & 255u) / 32);
    lo = q2_k_scale_of(d, scales);
    hi = q2_k_scale_of(d, scales >> 8);
}
VALUES_WITH_MIN(q2_k)
