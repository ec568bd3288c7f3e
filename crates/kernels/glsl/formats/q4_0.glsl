// Q4_0: 32 values in 18 bytes. f16 d @0, nibbles @2[16] (element e low in byte e, e + 16 high). (nibble - 8) * d
#include "formats/codes.glsl"
#define Q4_0_GROUP 32
#define Q4_0_BLOCK 32
#define Q4_0_BLOCK_BYTES 18

void q4_0_init() {}
uvec2 q4_0_at(uvec2 row, uint e) { return offset(row, e / 32 * 18); }
uint q4_0_codes4(uvec2 row, uint e) {
    uint q = two_halves(q4_0_at(row, e), 1 + (e & 12u) / 2) >> ((e & 16u) / 4);
    return minus_bytes(q & 0x0f0f0f0fu, 0x08080808u);
}
vec2 q4_0_scale(uvec2 row, uint e) { return vec2(half_at(q4_0_at(row, e), 0), 0.0); }
void q4_0_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = q4_0_at(row, e);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uint q = two_halves(b, 1 + 2 * i);
        codes[i] = minus_bytes(q & 0x0f0f0f0fu, 0x08080808u);
        codes[i + 4] = minus_bytes((q >> 4) & 0x0f0f0f0fu, 0x08080808u);
    }
    lo = hi = vec2(half_at(b, 0), 0.0);
}
SCALED_VALUES(q4_0)
