// Q8_0: 32 values in 34 bytes. f16 d @0, int8 @2[32]. q * d
#include "formats/codes.glsl"
#define Q8_0_GROUP 32
#define Q8_0_BLOCK 32
#define Q8_0_BLOCK_BYTES 34

void q8_0_init() {}
uvec2 q8_0_at(uvec2 row, uint e) { return offset(row, e / 32 * 34); }
uint q8_0_codes4(uvec2 row, uint e) { return two_halves(q8_0_at(row, e), 1 + (e & 31u) / 2); }
vec2 q8_0_scale(uvec2 row, uint e) { return vec2(half_at(q8_0_at(row, e), 0), 0.0); }
void q8_0_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = q8_0_at(row, e);
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = two_halves(b, 1 + 2 * i);
    lo = hi = vec2(half_at(b, 0), 0.0);
}
SCALED_VALUES(q8_0)
