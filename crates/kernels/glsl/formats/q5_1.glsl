// Q5_1: 32 values in 24 bytes. f16 d @0, f16 m @2, fifth bits u32 @4 (bit e of element e), nibbles @8[16] as in Q4_1.
// (nibble + 16 * bit) * d + m
#include "formats/codes.glsl"
#define Q5_1_GROUP 32
#define Q5_1_BLOCK 32
#define Q5_1_BLOCK_BYTES 24

void q5_1_init() {}
uvec2 q5_1_at(uvec2 row, uint e) { return offset(row, e / 32 * 24); }
uint q5_1_codes4(uvec2 row, uint e) {
    uvec2 b = q5_1_at(row, e);
    uint q = (U32(b).v[2 + (e & 12u) / 4] >> ((e & 16u) / 4)) & 0x0f0f0f0fu;
    return q | bits_to_bytes(U32(b).v[1] >> (e & 31u)) << 4;
}
vec2 q5_1_scale(uvec2 row, uint e) {
    uvec2 b = q5_1_at(row, e);
    return vec2(half_at(b, 0), half_at(b, 1));
}
void q5_1_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = q5_1_at(row, e);
    uint high = U32(b).v[1];
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uint q = U32(b).v[2 + i];
        codes[i] = (q & 0x0f0f0f0fu) | bits_to_bytes(high >> (4 * i)) << 4;
        codes[i + 4] = ((q >> 4) & 0x0f0f0f0fu) | bits_to_bytes(high >> (4 * i + 16)) << 4;
    }
    lo = hi = vec2(half_at(b, 0), half_at(b, 1));
}
VALUES_WITH_MIN(q5_1)
