// TQ1_0: 256 values in 54 bytes. Base-3 digits, five a byte @0[48], four a byte @48[4], f16 d @52.
// Elements 0..160: byte e % 32, digit e / 32; 160..240: byte 32 + (e - 160) % 16, digit (e - 160) / 16; 240..256: byte
// 48 + (e - 240) % 4, digit (e - 240) / 4. A byte is the digits' fraction of 256, rounded up: multiplying it by 3 moves
// the next digit into the carry. (digit - 1) * d
#include "formats/codes.glsl"
#define TQ1_0_GROUP 32
#define TQ1_0_BLOCK 256
#define TQ1_0_BLOCK_BYTES 54

void tq1_0_init() {}
uvec2 tq1_0_at(uvec2 row, uint e) { return offset(row, e / 256 * 54); }
// The next digit of the two bytes in the halves of x, after `power` = 3^k has moved k digits out of them.
uint tq1_0_digits(uint x, uint power) { return ((((x & 0x00ff00ffu) * power) & 0x00ff00ffu) * 3 >> 8) & 0x00030003u; }
// Codes of elements e .. e + 3 of a block; e counts from its start.
uint tq1_0_block_codes(uvec2 b, uint e) {
    uint at, digit;
    if (e < 160) {
        at = e & 31u;
        digit = e / 32;
    } else if (e < 240) {
        at = 32 + (e & 15u);
        digit = (e - 160) / 16;
    } else {
        at = 48;
        digit = (e - 240) / 4;
    }
    uint power = ((digit & 1u) != 0 ? 3u : 1u) * ((digit & 2u) != 0 ? 9u : 1u) * ((digit & 4u) != 0 ? 81u : 1u);
    uint q = two_halves(b, at / 2);
    return minus_bytes(tq1_0_digits(q, power) | tq1_0_digits(q >> 8, power) << 8, 0x01010101u);
}
uint tq1_0_codes4(uvec2 row, uint e) { return tq1_0_block_codes(tq1_0_at(row, e), e & 255u); }
vec2 tq1_0_scale(uvec2 row, uint e) { return vec2(half_at(tq1_0_at(row, e), 26), 0.0); }
void tq1_0_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = tq1_0_at(row, e);
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = tq1_0_block_codes(b, (e & 255u) + 4 * i);
    lo = hi = vec2(half_at(b, 26), 0.0);
}
SCALED_VALUES(tq1_0)
