// Q1_0: 128 values in 18 bytes. f16 d @0, bits @2[16] (element e is bit e % 8 of byte e / 8). +d where the bit is set, else -d
#include "formats/codes.glsl"
#define Q1_0_GROUP 32
#define Q1_0_BLOCK 128
#define Q1_0_BLOCK_BYTES 18

void q1_0_init() {}
uvec2 q1_0_at(uvec2 row, uint e) { return offset(row, e / 128 * 18); }
uint q1_0_signs(uint bits) { return minus_bytes(bits_to_bytes(bits) << 1, 0x01010101u); }
uint q1_0_codes4(uvec2 row, uint e) {
    return q1_0_signs(half_word(q1_0_at(row, e), 1 + (e & 127u) / 16) >> (e & 15u));
}
vec2 q1_0_scale(uvec2 row, uint e) { return vec2(half_at(q1_0_at(row, e), 0), 0.0); }
void q1_0_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = q1_0_at(row, e);
    uint bits = two_halves(b, 1 + (e & 127u) / 16);
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = q1_0_signs(bits >> (4 * i));
    lo = hi = vec2(half_at(b, 0), 0.0);
}
SCALED_VALUES(q1_0)
