// 4-bit floats with two bits of exponent and one of mantissa, doubled so that they are integers:
// 0, 1, 2, 3, 4, 6, 8, 12 and, with bit 3 set, the same negated.
#include "formats/codes.glsl"

// The four floats in the low nibbles of the bytes of q, as signed bytes.
uint e2m1_codes(uint q) {
    uint size = q & 0x07070707u, odd = q & 0x01010101u;
    uint from4 = (size >> 2) & 0x01010101u, from6 = from4 & (size >> 1);
    size += (from4 & odd) + ((from6 + (from6 & odd)) << 1);
    return negate_bytes(size, (q >> 3) & 0x01010101u);
}
