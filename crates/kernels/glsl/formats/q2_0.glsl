// Q2_0: 64 values in 18 bytes. f16 d @0, two-bit codes @2[16] (element e at bit 2 (e % 4) of byte e / 4). (code - 1) * d
#include "formats/codes.glsl"
#define Q2_0_GROUP 32
#define Q2_0_BLOCK 64
#define Q2_0_BLOCK_BYTES 18

void q2_0_init() {}
uvec2 q2_0_at(uvec2 row, uint e) { return offset(row, e / 64 * 18); }
uint q2_0_codes4(uvec2 row, uint e) {
    return minus_bytes(pairs_to_bytes(byte_at(q2_0_at(row, e), 2 + (e & 63u) / 4)), 0x01010101u);
}
vec2 q2_0_scale(uvec2 row, uint e) { return vec2(half_at(q2_0_at(row, e), 0), 0.0); }
void q2_0_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = q2_0_at(row, e);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uint q = half_word(b, 1 + (e & 63u) / 8 + i);
        codes[2 * i] = minus_bytes(pairs_to_bytes(q), 0x01010101u);
        codes[2 * i + 1] = minus_bytes(pairs_to_bytes(q >> 8), 0x01010101u);
    }
    lo = hi = vec2(half_at(b, 0), 0.0);
}
SCALED_VALUES(q2_0)
