// Q5_0: 32 values in 22 bytes. f16 d @0, fifth bits u32 @2 (bit e of element e), nibbles @6[16] as in Q4_0.
// (nibble + 16 * bit - 16) * d
#include "formats/codes.glsl"
#define Q5_0_GROUP 32
#define Q5_0_BLOCK 32
#define Q5_0_BLOCK_BYTES 22

void q5_0_init() {}
uvec2 q5_0_at(uvec2 row, uint e) { return offset(row, e / 32 * 22); }
uint q5_0_codes4(uvec2 row, uint e) {
    uvec2 b = q5_0_at(row, e);
    uint q = (two_halves(b, 3 + (e & 12u) / 2) >> ((e & 16u) / 4)) & 0x0f0f0f0fu;
    return minus_bytes(q | bits_to_bytes(two_halves(b, 1) >> (e & 31u)) << 4, 0x10101010u);
}
vec2 q5_0_scale(uvec2 row, uint e) { return vec2(half_at(q5_0_at(row, e), 0), 0.0); }
void q5_0_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = q5_0_at(row, e);
    uint high = two_halves(b, 1);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uint q = two_halves(b, 3 + 2 * i);
        codes[i] = minus_bytes((q & 0x0f0f0f0fu) | bits_to_bytes(high >> (4 * i)) << 4, 0x10101010u);
        codes[i + 4] = minus_bytes(((q >> 4) & 0x0f0f0f0fu) | bits_to_bytes(high >> (4 * i + 16)) << 4, 0x10101010u);
    }
    lo = hi = vec2(half_at(b, 0), 0.0);
}
SCALED_VALUES(q5_0)
