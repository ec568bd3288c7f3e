// IQ4_NLx8: 256 values of IQ4_NL in 144 bytes: the nibbles of eight blocks @0[8][16] as in Q4_0x8, f16 d of each @128[8].
// d * table[nibble]
#include "formats/iq4_table.glsl"
#define IQ4_NLX8_GROUP 32
#define IQ4_NLX8_BLOCK 256
#define IQ4_NLX8_BLOCK_BYTES 144

void iq4_nlx8_init() { iq4_init(); }
uvec2 iq4_nlx8_at(uvec2 row, uint e) { return offset(row, e / 256 * 144); }
uint iq4_nlx8_codes4(uvec2 row, uint e) {
    uvec2 c = iq4_codes(U32(iq4_nlx8_at(row, e)).v[(e & 224u) / 8 + (e & 12u) / 4]);
    return (e & 16u) == 0 ? c.x : c.y;
}
vec2 iq4_nlx8_scale(uvec2 row, uint e) { return vec2(half_at(iq4_nlx8_at(row, e), 64 + (e & 255u) / 32), 0.0); }
void iq4_nlx8_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = iq4_nlx8_at(row, e);
    uint i = (e & 255u) / 32;
    uvec4 q = U32x4(b).v[i];
    [[unroll]] for (uint j = 0; j < 4; j++) {
        uvec2 c = iq4_codes(q[j]);
        codes[j] = c.x;
        codes[4 + j] = c.y;
    }
    lo = hi = vec2(half_at(b, 64 + i), 0.0);
}
SCALED_VALUES(iq4_nlx8)
