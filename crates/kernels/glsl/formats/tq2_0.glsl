// TQ2_0: 256 values in 66 bytes. Two-bit codes @0[64], f16 d @64. Element 128 n + 32 g + l sits at bit 2 g of byte 32 n + l.
// (code - 1) * d
#include "formats/codes.glsl"
#define TQ2_0_GROUP 32
#define TQ2_0_BLOCK 256
#define TQ2_0_BLOCK_BYTES 66

void tq2_0_init() {}
uvec2 tq2_0_at(uvec2 row, uint e) { return offset(row, e / 256 * 66); }
// Codes of elements e .. e + 3 of a block; e counts from its start.
uint tq2_0_block_codes(uvec2 b, uint e) {
    uint q = two_halves(b, (e & 128u) / 8 + (e & 31u) / 2) >> ((e & 96u) / 16);
    return minus_bytes(q & 0x03030303u, 0x01010101u);
}
uint tq2_0_codes4(uvec2 row, uint e) { return tq2_0_block_codes(tq2_0_at(row, e), e & 255u); }
vec2 tq2_0_scale(uvec2 row, uint e) { return vec2(half_at(tq2_0_at(row, e), 32), 0.0); }
void tq2_0_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = tq2_0_at(row, e);
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = tq2_0_block_codes(b, (e & 255u) + 4 * i);
    lo = hi = vec2(half_at(b, 32), 0.0);
}
SCALED_VALUES(tq2_0)
