// Values of MXFP4: doubled 4-bit float * 2^(exponent - 128), the exponent a byte.
// The smallest values are subnormal, which drivers may flush when they multiply; load and load4 give them exactly.
#include "formats/e2m1.glsl"

// 2^(exponent - 128); the two smallest are subnormal.
float mxfp4_power(uint exponent) {
    return uintBitsToFloat(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
}
// code * 2^(exponent - 128), in integers where the product of floats could be flushed.
float mxfp4_value(float code, uint exponent) {
    if (exponent >= 4 || code == 0.0) return code * mxfp4_power(exponent);
    uint bits = floatBitsToUint(code), sign = bits & 0x80000000u, mantissa = bits & 0x007fffffu;
    int power = int((bits >> 23) & 255u) + int(exponent) - 128;
    uint size = power > 0 ? uint(power) << 23 | mantissa : (mantissa | 0x00800000u) >> (1 - power);
    return uintBitsToFloat(sign | size);
}

// What follows from F_exponent(row, e) and F_codes4(row, e).
#define MXFP4_VALUES(F)                                                        \
    vec2 F##_scale(uvec2 row, uint e) { return vec2(mxfp4_power(F##_exponent(row, e)), 0.0); } \
    vec4 F##_load4(uvec2 row, uint e) {                                        \
        vec4 c = signed_bytes(F##_codes4(row, e));                             \
        uint x = F##_exponent(row, e);                                         \
        return vec4(mxfp4_value(c.x, x), mxfp4_value(c.y, x), mxfp4_value(c.z, x), mxfp4_value(c.w, x)); \
    }                                                                          \
    float F##_load(uvec2 row, uint e) {                                        \
        return mxfp4_value(signed_byte(F##_codes4(row, e & ~3u), e & 3u), F##_exponent(row, e)); \
    }
