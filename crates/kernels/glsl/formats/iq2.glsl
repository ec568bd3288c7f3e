// What the IQ2 and IQ3 formats share: grid values, signs of even number, scales of sixteen half steps.
#include "formats/codes.glsl"

// Four two-bit indices into 8, 25, 43, as bytes.
uint iq2_bytes(uint bits) {
    uint x = pairs_to_bytes(bits);
    return x * 17u + 0x08080808u + ((x >> 1) & 0x01010101u);
}
// The eight signs that seven bits stand for: the number of minus signs is even, so the eighth bit is their parity.
uint even_signs(uint seven) {
    seven &= 127u;
    return seven | (uint(bitCount(seven)) & 1u) << 7;
}
// Bytes, negated where a bit of `signs` is set.
uint with_signs(uint bytes, uint signs) { return negate_bytes(bytes, bits_to_bytes(signs)); }
// d * (0.5 + step) * part
vec2 half_steps(float d, uint step_bits, float part) {
    precise float s = d * (0.5 + float(step_bits & 15u)) * part;
    return vec2(s, 0.0);
}
