// IQ4_XS: 256 values in 136 bytes, 8 sub-blocks of 32. f16 d @0, upper two bits of the scales u16 @2 (bits 2 i), lower four
// @4[4] (nibble i % 2 of byte i / 2), nibbles @8[128], 16 bytes a sub-block as in IQ4_NL. d * (scale - 32) * table[nibble]
#include "formats/iq4_table.glsl"
#define IQ4_XS_GROUP 32
#define IQ4_XS_BLOCK 256
#define IQ4_XS_BLOCK_BYTES 136

void iq4_xs_init() { iq4_init(); }
uvec2 iq4_xs_at(uvec2 row, uint e) { return offset(row, e / 256 * 136); }
uint iq4_xs_codes4(uvec2 row, uint e) {
    uvec2 c = iq4_codes(U32(iq4_xs_at(row, e)).v[2 + (e & 224u) / 8 + (e & 12u) / 4]);
    return (e & 16u) == 0 ? c.x : c.y;
}
// From the first eight bytes of a block and the number of the sub-block.
vec2 iq4_xs_scale_of(uvec2 head, uint i) {
    uint low = (head.y >> (4 * i)) & 15u, high = (head.x >> (16 + 2 * i)) & 3u;
    precise float s = unpackHalf2x16(head.x).x * float(int(low | high << 4) - 32);
    return vec2(s, 0.0);
}
vec2 iq4_xs_scale(uvec2 row, uint e) { return iq4_xs_scale_of(U32x2(iq4_xs_at(row, e)).v[0], (e & 255u) / 32); }
void iq4_xs_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = iq4_xs_at(row, e);
    uint sub = (e & 255u) / 32;
    [[unroll]] for (uint i = 0; i < 2; i++) {
        uvec2 q = U32x2(b).v[1 + 2 * sub + i];
        uvec2 c = iq4_codes(q.x), d = iq4_codes(q.y);
        codes[2 * i] = c.x;
        codes[2 * i + 1] = d.x;
        codes[2 * i + 4] = c.y;
        codes[2 * i + 5] = d.y;
    }
    lo = hi = iq4_xs_scale_of(U32x2(b).v[0], sub);
}
SCALED_VALUES(iq4_xs)
