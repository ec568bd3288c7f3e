// Q8_1: 32 values in 36 bytes. f16 d @0, f16 s @2 (d times the sum of the codes), int8 @4[32]. q * d
#include "formats/codes.glsl"
#define Q8_1_GROUP 32
#define Q8_1_BLOCK 32
#define Q8_1_BLOCK_BYTES 36

void q8_1_init() {}
uvec2 q8_1_at(uvec2 row, uint e) { return offset(row, e / 32 * 36); }
uint q8_1_codes4(uvec2 row, uint e) { return U32(q8_1_at(row, e)).v[1 + (e & 31u) / 4]; }
vec2 q8_1_scale(uvec2 row, uint e) { return vec2(half_at(q8_1_at(row, e), 0), 0.0); }
void q8_1_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = q8_1_at(row, e);
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = U32(b).v[1 + i];
    lo = hi = vec2(half_at(b, 0), 0.0);
}
SCALED_VALUES(q8_1)
