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
struct iq4_nlx8_piece { uvec4 q; uint d; };
iq4_nlx8_piece iq4_nlx8_fetch(uvec2 row, uint e) {
    uvec2 b = iq4_nlx8_at(row, e);
    uint i = (e & 255u) / 32;
    return iq4_nlx8_piece(U32x4(b).v[i], half_word(b, 64 + i));
}
void iq4_nlx8_unfold(iq4_nlx8_piece x, uint e, uint j, out uint codes[8], out vec2 lo, out vec2 hi) {
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uvec2 c = iq4_codes(x.q[i]);
        codes[i] = c.x;
        codes[4 + i] = c.y;
    }
    lo = hi = vec2(unpackHalf2x16(x.d).x, 0.0);
}
GROUP_OF_PIECE(iq4_nlx8, group32, 1)
SCALED_VALUES(iq4_nlx8)
