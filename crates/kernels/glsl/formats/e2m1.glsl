// 4-bit floats with two bits of exponent and one of mantissa, doubled so that they are integers:
// 0, 1, 2, 3, 4, 6, 8, 12 and, with bit 3 set, the same negated.
#include "formats/codes.glsl"

// The eight floats in the nibbles of q, as signed bytes: those of the low nibbles (x) and of the high ones (y). All eight
// are made at once as long as they fit their nibbles, and no table is asked: 18 instructions.
uvec2 e2m1_both(uint q) {
    uint size = q & 0x77777777u;
    // Bit 3 of each nibble: whether it is negative, and not zero, which has no fourth bit to spare when negated.
    uint minus = q & (size + 0x77777777u) & 0x88888888u;
    // 4, 5, 6, 7 stand for 4, 6, 8, 12: what they have above 4 is added once more, and 2 to the last one.
    uint above = q & (((q >> 2) & 0x11111111u) * 3u);
    size += above + (above & (above << 1));
    uint ones = minus >> 3, all = ones * 15u;
    size = (size ^ all) + ones;
    return uvec2((size & 0x0f0f0f0fu) | ((all << 4) & 0xf0f0f0f0u), ((size >> 4) & 0x0f0f0f0fu) | (all & 0xf0f0f0f0u));
}
// The four floats in the low nibbles of the bytes of q.
uint e2m1_codes(uint q) { return e2m1_both(q).x; }
// 32 floats: those in the low nibbles of sixteen bytes, then those in the high ones.
void e2m1_codes32(uvec4 q, out uint codes[8]) {
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uvec2 both = e2m1_both(q[i]);
        codes[i] = both.x;
        codes[4 + i] = both.y;
    }
}
