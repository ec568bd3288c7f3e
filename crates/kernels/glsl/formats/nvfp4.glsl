// NVFP4: 64 values in 36 bytes, 4 sub-blocks of 16. Scales @0[4], 4-bit floats @4[32]: element 16 s + r in byte
// 4 + 8 s + r % 8, low half for r < 8. Doubled float * scale / 2
#include "formats/nvfp4_values.glsl"
#define NVFP4_GROUP 16
#define NVFP4_BLOCK 64
#define NVFP4_BLOCK_BYTES 36

void nvfp4_init() {}
uvec2 nvfp4_at(uvec2 row, uint e) { return offset(row, e / 64 * 36); }
uint nvfp4_codes4(uvec2 row, uint e) {
    return nvfp4_codes_of(U32(nvfp4_at(row, e)).v[1 + (e & 48u) / 8 + (e & 4u) / 4], e);
}
vec2 nvfp4_scale(uvec2 row, uint e) {
    return vec2(nvfp4_half_scales(byte_at(nvfp4_at(row, e), (e & 63u) / 16)).x, 0.0);
}
#define nvfp4_piece nvfp4_words
nvfp4_piece nvfp4_fetch(uvec2 row, uint e) {
    uvec2 b = nvfp4_at(row, e);
    uint i = 1 + (e & 32u) / 8;
    uvec4 q = uvec4(U32(b).v[i], U32(b).v[i + 1], U32(b).v[i + 2], U32(b).v[i + 3]);
    return nvfp4_piece(q, half_word(b, (e & 32u) / 32));
}
NVFP4_PIECES(nvfp4)
