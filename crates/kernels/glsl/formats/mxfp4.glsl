// MXFP4: 32 values in 17 bytes. Exponent @0 (a power of two, biased by 127), 4-bit floats @1[16] (element e low in byte e,
// e + 16 high). Doubled float * 2^(exponent - 128)
// The smallest values are subnormal, which drivers may flush when they multiply; load and load4 give them exactly.
// Blocks lie at any byte, so whole words are loaded and shifted: up to three bytes before and after a block are read.
#include "formats/e2m1.glsl"
#define MXFP4_GROUP 32
#define MXFP4_BLOCK 32
#define MXFP4_BLOCK_BYTES 17

void mxfp4_init() {}
uvec2 mxfp4_at(uvec2 row, uint e) { return offset(row, e / 32 * 17); }
// The bytes 1 .. 4 after the one at bit `shift` of `low`.
uint mxfp4_word(uint low, uint high, uint shift) { return (low >> shift >> 8) | high << (24 - shift); }
uint mxfp4_codes4(uvec2 row, uint e) {
    uvec2 b = mxfp4_at(row, e);
    uvec2 words = uvec2(b.x & ~3u, b.y);
    uint i = (e & 12u) / 4;
    uint q = mxfp4_word(U32(words).v[i], U32(words).v[i + 1], (b.x & 3u) * 8);
    return e2m1_codes(q >> ((e & 16u) / 4));
}
// 2^(exponent - 128); the two smallest are subnormal.
float mxfp4_power(uint exponent) {
    return uintBitsToFloat(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
}
vec2 mxfp4_scale(uvec2 row, uint e) { return vec2(mxfp4_power(byte_at(mxfp4_at(row, e), 0)), 0.0); }
void mxfp4_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = mxfp4_at(row, e);
    uvec2 words = uvec2(b.x & ~3u, b.y);
    uint shift = (b.x & 3u) * 8;
    uint low = U32(words).v[0];
    lo = hi = vec2(mxfp4_power((low >> shift) & 255u), 0.0);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uint high = U32(words).v[i + 1];
        uint q = mxfp4_word(low, high, shift);
        codes[i] = e2m1_codes(q);
        codes[i + 4] = e2m1_codes(q >> 4);
        low = high;
    }
}
// code * 2^(exponent - 128), in integers where the product of floats could be flushed.
float mxfp4_value(float code, uint exponent) {
    if (exponent >= 4 || code == 0.0) return code * mxfp4_power(exponent);
    uint bits = floatBitsToUint(code), sign = bits & 0x80000000u, mantissa = bits & 0x007fffffu;
    int power = int((bits >> 23) & 255u) + int(exponent) - 128;
    uint size = power > 0 ? uint(power) << 23 | mantissa : (mantissa | 0x00800000u) >> (1 - power);
    return uintBitsToFloat(sign | size);
}
vec4 mxfp4_load4(uvec2 row, uint e) {
    vec4 c = signed_bytes(mxfp4_codes4(row, e));
    uint x = byte_at(mxfp4_at(row, e), 0);
    return vec4(mxfp4_value(c.x, x), mxfp4_value(c.y, x), mxfp4_value(c.z, x), mxfp4_value(c.w, x));
}
float mxfp4_load(uvec2 row, uint e) {
    return mxfp4_value(signed_byte(mxfp4_codes4(row, e & ~3u), e & 3u), byte_at(mxfp4_at(row, e), 0));
}
