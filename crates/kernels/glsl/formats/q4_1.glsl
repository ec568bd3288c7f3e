// Q4_1: 32 values in 20 bytes. f16 d @0, f16 m @2, nibbles @4[16] (element e low in byte e, e + 16 high). nibble * d + m
#include "formats/codes.glsl"
#define Q4_1_GROUP 32
#define Q4_1_BLOCK 32
#define Q4_1_BLOCK_BYTES 20

void q4_1_init() {}
uvec2 q4_1_at(uvec2 row, uint e) { return offset(row, e / 32 * 20); }
uint q4_1_codes4(uvec2 row, uint e) {
    return (U32(q4_1_at(row, e)).v[1 + (e & 12u) / 4] >> ((e & 16u) / 4)) & 0x0f0f0f0fu;
}
vec2 q4_1_scale(uvec2 row, uint e) {
    uvec2 b = q4_1_at(row, e);
    return vec2(half_at(b, 0), half_at(b, 1));
}
void q4_1_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = q4_1_at(row, e);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uint q = U32(b).v[1 + i];
        codes[i] = q & 0x0f0f0f0fu;
        codes[i + 4] = (q >> 4) & 0x0f0f0f0fu;
    }
    lo = hi = vec2(half_at(b, 0), half_at(b, 1));
}
VALUES_WITH_MIN(q4_1)
