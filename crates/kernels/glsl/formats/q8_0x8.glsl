// Q8_0x8: 256 values of Q8_0 in 272 bytes: int8 of the first halves of eight blocks @0[8][16], of the second halves
// @128[8][16], f16 d of each block @256[8]. q * d
#include "formats/codes.glsl"
#define Q8_0X8_GROUP 32
#define Q8_0X8_BLOCK 256
#define Q8_0X8_BLOCK_BYTES 272

void q8_0x8_init() {}
uvec2 q8_0x8_at(uvec2 row, uint e) { return offset(row, e / 256 * 272); }
uint q8_0x8_codes4(uvec2 row, uint e) {
    return U32(q8_0x8_at(row, e)).v[(e & 16u) * 2 + (e & 224u) / 8 + (e & 12u) / 4];
}
vec2 q8_0x8_scale(uvec2 row, uint e) { return vec2(half_at(q8_0x8_at(row, e), 128 + (e & 255u) / 32), 0.0); }
void q8_0x8_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = q8_0x8_at(row, e);
    uint i = (e & 255u) / 32;
    uvec4 first = U32x4(b).v[i], second = U32x4(b).v[8 + i];
    [[unroll]] for (uint j = 0; j < 4; j++) {
        codes[j] = first[j];
        codes[4 + j] = second[j];
    }
    lo = hi = vec2(half_at(b, 128 + i), 0.0);
}
SCALED_VALUES(q8_0x8)
