// Q6_K packed for devices: N blocks of 256 values, in groups of 32: low nibbles @0[8 N][16] (element e low in byte e, e + 16
// high), upper two bits @128 N[8 N][8] (of each 16 elements, element l in bits 2 (l / 4) of byte l % 4), int8 scales of 16
// elements @192 N[16 N], f16 d of 256 elements @208 N[N]; BYTES in all. d * scale * (code - 32)
#include "formats/codes.glsl"

// The codes before 32 is taken from them: low nibbles of 32 elements in q, upper bits in high.
void q6_k_raw_codes(uvec4 q, uvec2 high, out uint codes[8]) {
    nibbles32(q, codes);
    [[unroll]] for (uint j = 0; j < 2; j++) {
        codes[4 * j] |= (high[j] << 4) & 0x30303030u;
        codes[4 * j + 1] |= (high[j] << 2) & 0x30303030u;
        codes[4 * j + 2] |= high[j] & 0x30303030u;
        codes[4 * j + 3] |= (high[j] >> 2) & 0x30303030u;
    }
}

#define Q6_K_PACKED(F, N, BYTES)                                               \
    void F##_init() {}                                                         \
    uvec2 F##_at(uvec2 row, uint e) { return offset(row, e / (256 * N) * BYTES); } \
    uint F##_codes4(uvec2 row, uint e) {                                       \
        uvec2 b = F##_at(row, e);                                              \
        uint i = e % (256 * N) / 32;                                           \
        uint low = U32(b).v[4 * i + (e & 12u) / 4] >> ((e & 16u) / 4);         \
        uint high = U32(b).v[32 * N + 2 * i + (e & 16u) / 16] >> ((e & 12u) / 2); \
        return minus_bytes((low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4, 0x20202020u); \
    }                                                                          \
    vec2 F##_scale(uvec2 row, uint e) {                                        \
        uvec2 b = F##_at(row, e);                                              \
        uint i = e % (256 * N) / 16;                                           \
        precise float s = half_at(b, 104 * N + i / 16) * signed_byte(byte_at(b, 192 * N + i), 0); \
        return vec2(s, 0.0);                                                   \
    }                                                                          \
    struct F##_piece { uvec4 q; uvec2 high; uint scales, d; };                 \
    F##_piece F##_fetch(uvec2 row, uint e) {                                   \
        uvec2 b = F##_at(row, e);                                              \
        uint i = e % (256 * N) / 32;                                           \
        return F##_piece(U32x4(b).v[i], U32x2(b).v[16 * N + i], half_word(b, 96 * N + i), half_word(b, 104 * N + i / 8)); \
    }                                                                          \
    void F##_unfold(F##_piece x, uint e, uint j, out uint codes[8], out vec2 lo, out vec2 hi) { \
        q6_k_raw_codes(x.q, x.high, codes);                                    \
        precise vec2 s = unpackHalf2x16(x.d).x * vec2(signed_byte(x.scales, 0), signed_byte(x.scales, 1)); \
        lo = vec2(s.x, 0.0);                                                   \
        hi = vec2(s.y, 0.0);                                                   \
    }                                                                          \
    GROUP_OF_PIECE(F, raw32, 1)                                                \
    GROUP32_OF_RAW(F, 32)                                                      \
    SCALED_VALUES(F)
