// IQ4_NL: 32 values in 18 bytes. f16 d @0, nibbles @2[16] (element e low in byte e, e + 16 high): indices into a table of
// sixteen values that lie denser around zero. d * table[nibble]
#include "formats/iq4_table.glsl"
#define IQ4_NL_GROUP 32
#define IQ4_NL_BLOCK 32
#define IQ4_NL_BLOCK_BYTES 18

void iq4_nl_init() { iq4_init(); }
uvec2 iq4_nl_at(uvec2 row, uint e) { return offset(row, e / 32 * 18); }
uint iq4_nl_codes4(uvec2 row, uint e) {
    uvec2 c = iq4_codes(two_halves(iq4_nl_at(row, e), 1 + (e & 12u) / 2));
    return (e & 16u) == 0 ? c.x : c.y;
}
vec2 iq4_nl_scale(uvec2 row, uint e) { return vec2(half_at(iq4_nl_at(row, e), 0), 0.0); }
void iq4_nl_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = iq4_nl_at(row, e);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uvec2 c = iq4_codes(two_halves(b, 1 + 2 * i));
        codes[i] = c.x;
        codes[i + 4] = c.y;
    }
    lo = hi = vec2(half_at(b, 0), 0.0);
}
SCALED_VALUES(iq4_nl)
