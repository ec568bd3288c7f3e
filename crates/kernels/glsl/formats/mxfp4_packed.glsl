// MXFP4 packed for devices: N blocks of 32 values: 4-bit floats @0[N][16] (element e low in byte e, e + 16 high), exponents
// @16 N[N]; BYTES in all. Doubled float * 2^(exponent - 128)
#include "formats/mxfp4_values.glsl"

#define MXFP4_PACKED(F, N, BYTES)                                              \
    void F##_init() {}                                                         \
    uvec2 F##_at(uvec2 row, uint e) { return offset(row, e / (32 * N) * BYTES); } \
    uint F##_codes4(uvec2 row, uint e) {                                       \
        uint q = U32(F##_at(row, e)).v[e % (32 * N) / 32 * 4 + (e & 12u) / 4]; \
        return e2m1_codes(q >> ((e & 16u) / 4));                               \
    }                                                                          \
    uint F##_exponent(uvec2 row, uint e) { return byte_at(F##_at(row, e), 16 * N + e % (32 * N) / 32); } \
    struct F##_piece { uvec4 q; uint exponent; };                              \
    F##_piece F##_fetch(uvec2 row, uint e) {                                   \
        uvec2 b = F##_at(row, e);                                              \
        uint i = e % (32 * N) / 32;                                            \
        return F##_piece(U32x4(b).v[i], byte_at(b, 16 * N + i));               \
    }                                                                          \
    void F##_unfold(F##_piece x, uint e, uint j, out uint codes[8], out vec2 lo, out vec2 hi) { \
        e2m1_codes32(x.q, codes);                                              \
        lo = hi = vec2(mxfp4_power(x.exponent), 0.0);                          \
    }                                                                          \
    GROUP_OF_PIECE(F, group32, 1)                                              \
    MXFP4_VALUES(F)
