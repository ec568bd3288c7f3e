// Q4_K: 256 values in 144 bytes, 8 sub-blocks of 32. Head @0[16], nibbles @16[128]: element 64 c + l in the low half of
// byte 16 + 32 c + l, element 64 c + 32 + l in the high half. d * scale * code - dmin * min
#include "formats/k4_scales.glsl"
#define Q4_K_GROUP 32
#define Q4_K_BLOCK 256
#define Q4_K_BLOCK_BYTES 144

void q4_k_init() {}
uvec2 q4_k_at(uvec2 row, uint e) { return offset(row, e / 256 * 144); }
uint q4_k_codes4(uvec2 row, uint e) {
    uint word = 4 + (e & 192u) / 8 + (e & 31u) / 4;
    return (U32(q4_k_at(row, e)).v[word] >> ((e & 32u) / 8)) & 0x0f0f0f0fu;
}
vec2 q4_k_scale(uvec2 row, uint e) { return k4_scale(U32x4(q4_k_at(row, e)).v[0], (e & 255u) / 32); }
struct q4_k_piece { uvec4 head, q[2]; };
q4_k_piece q4_k_fetch(uvec2 row, uint e) {
    uint i = e / 256 * 9, q = i + 1 + (e & 192u) / 32;
    return q4_k_piece(U32x4(row).v[i], uvec4[2](U32x4(row).v[q], U32x4(row).v[q + 1]));
}
void q4_k_unfold(q4_k_piece x, uint e, uint j, out uint codes[8], out vec2 lo, out vec2 hi) {
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = (x.q[i / 4][i % 4] >> (4 * j)) & 0x0f0f0f0fu;
    lo = hi = k4_scale_of(x.head, k4_pairs(x.head, (e & 255u) / 64), j);
}
vec4 q4_k_parts(q4_k_piece x, uint e, float middle) { return k4_parts_of(x.head, k4_pairs(x.head, (e & 255u) / 64), middle); }
uint q4_k_factor(q4_k_piece x) { return x.head.x; }
uint q4_k_nibbles(q4_k_piece x, uint i) { return x.q[i / 4][i % 4]; }
GROUP_OF_PIECE(q4_k, group32, 2)
VALUES_WITH_MIN(q4_k)
