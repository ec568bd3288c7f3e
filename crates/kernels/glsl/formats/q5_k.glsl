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
void q5_k_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = q5_k_at(row, e);
    uint sub = (e & 255u) / 32, shift = (e & 32u) / 8;
    [[unroll]] for (uint i = 0; i < 2; i++) {
        uvec4 low = (U32x4(b).v[3 + (e & 192u) / 32 + i] >> shift) & 0x0f0f0f0fu;
        uvec4 q = low | ((U32x4(b).v[1 + i] >> sub) & 0x01010101u) << 4;
        codes[4 * i] = q.x;
        codes[4 * i + 1] = q.y;
        codes[4 * i + 2] = q.z;
        codes[4 * i + 3] = q.w;
    }
    lo = hi = k4_scale(U32x4(b).v[0], sub);
}
SHIFTED_VALUES(q5_k)
