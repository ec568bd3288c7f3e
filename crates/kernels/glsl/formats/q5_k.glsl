// Q5_K: 256 values in 176 bytes, 8 sub-blocks of 32. Head @0[16] as in Q4_K, fifth bits @16[32] (bit i of byte l for
// element 32 i + l), nibbles @48[128] as in Q4_K. d * scale * code - dmin * min
#include "formats/k4_scales.glsl"
#define Q5_K_GROUP 32
#define Q5_K_BLOCK 256
#define Q5_K_BLOCK_BYTES 176

void q5_k_init() {}
uvec2 q5_k_at(uvec2 row, uint e) { return offset(row, e / 256 * 176); }
uint q5_k_codes4(uvec2 row, uint e) {
    uvec2 b = q5_k_at(row, e);
    uint l = (e & 31u) / 4;
    uint low = (U32(b).v[12 + (e & 192u) / 8 + l] >> ((e & 32u) / 8)) & 0x0f0f0f0fu;
    return low | ((U32(b).v[4 + l] >> ((e & 255u) / 32)) & 0x01010101u) << 4;
}
vec2 q5_k_scale(uvec2 row, uint e) { return k4_scale(U32x4(q5_k_at(row, e)).v[0], (e & 255u) / 32); }
struct q5_k_piece { uvec4 head, high[2], q[2]; };
q5_k_piece q5_k_fetch(uvec2 row, uint e) {
    uint i = e / 256 * 11, q = i + 3 + (e & 192u) / 32;
    uvec4 high[2] = uvec4[2](U32x4(row).v[i + 1], U32x4(row).v[i + 2]);
    return q5_k_piece(U32x4(row).v[i], high, uvec4[2](U32x4(row).v[q], U32x4(row).v[q + 1]));
}
void q5_k_unfold(q5_k_piece x, uint e, uint j, out uint codes[8], out vec2 lo, out vec2 hi) {
    uint part = (e & 255u) / 32 + j;
    [[unroll]] for (uint i = 0; i < 8; i++) {
        uint fifth = (x.high[i / 4][i % 4] >> part) & 0x01010101u;
        codes[i] = ((x.q[i / 4][i % 4] >> (4 * j)) & 0x0f0f0f0fu) | fifth << 4;
    }
    lo = hi = k4_scale_of(x.head, k4_pairs(x.head, (e & 255u) / 64), j);
}
vec4 q5_k_parts(q5_k_piece x, uint e, float middle) { return k4_parts_of(x.head, k4_pairs(x.head, (e & 255u) / 64), middle); }
uint q5_k_factor(q5_k_piece x) { return x.head.x; }
GROUP_OF_PIECE(q5_k, group32, 2)
VALUES_WITH_MIN(q5_k)
