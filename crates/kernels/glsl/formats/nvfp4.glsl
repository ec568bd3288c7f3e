// NVFP4: 64 values in 36 bytes, 4 sub-blocks of 16. Scales @0[4] (unsigned 8-bit floats, four bits of exponent, three of
// mantissa), 4-bit floats @4[32]: element 16 s + r in byte 4 + 8 s + r % 8, low half for r < 8. Doubled float * scale / 2
#include "formats/e2m1.glsl"
#define NVFP4_GROUP 16
#define NVFP4_BLOCK 64
#define NVFP4_BLOCK_BYTES 36

void nvfp4_init() {}
uvec2 nvfp4_at(uvec2 row, uint e) { return offset(row, e / 64 * 36); }
uint nvfp4_codes4(uvec2 row, uint e) {
    return e2m1_codes(U32(nvfp4_at(row, e)).v[1 + (e & 48u) / 8 + (e & 4u) / 4] >> ((e & 8u) / 2));
}
// Half the scale that a byte stands for. 0x7f means nothing and reads as zero; the sign bit is ignored.
vec2 nvfp4_half_scale(uint code) {
    uint exponent = (code >> 3) & 15u, mantissa = code & 7u;
    float normal = uintBitsToFloat((exponent + 119) << 23 | mantissa << 20);
    float scale = exponent == 0 ? float(mantissa) * (0.5 / 512.0) : normal;
    return vec2(code == 0x7fu ? 0.0 : scale, 0.0);
}
vec2 nvfp4_scale(uvec2 row, uint e) { return nvfp4_half_scale(byte_at(nvfp4_at(row, e), (e & 63u) / 16)); }
void nvfp4_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = nvfp4_at(row, e);
    uint first = (e & 32u) / 8;
    [[unroll]] for (uint s = 0; s < 2; s++) {
        [[unroll]] for (uint i = 0; i < 2; i++) {
            uint q = U32(b).v[1 + first + 2 * s + i];
            codes[4 * s + i] = e2m1_codes(q);
            codes[4 * s + i + 2] = e2m1_codes(q >> 4);
        }
    }
    uint scales = U32(b).v[0] >> ((e & 32u) / 2);
    lo = nvfp4_half_scale(scales & 255u);
    hi = nvfp4_half_scale((scales >> 8) & 255u);
}
SCALED_VALUES(nvfp4)
