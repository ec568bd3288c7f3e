// NVFP4x4: 256 values of NVFP4 in 144 bytes: the 4-bit floats of four blocks @0[4][32], their scales @128[4][4].
// Doubled float * scale / 2
#include "formats/nvfp4_values.glsl"
#define NVFP4X4_GROUP 16
#define NVFP4X4_BLOCK 256
#define NVFP4X4_BLOCK_BYTES 144

void nvfp4x4_init() {}
uvec2 nvfp4x4_at(uvec2 row, uint e) { return offset(row, e / 256 * 144); }
uint nvfp4x4_codes4(uvec2 row, uint e) {
    return nvfp4_codes_of(U32(nvfp4x4_at(row, e)).v[(e & 240u) / 8 + (e & 4u) / 4], e);
}
vec2 nvfp4x4_scale(uvec2 row, uint e) {
    return vec2(nvfp4_half_scales(byte_at(nvfp4x4_at(row, e), 128 + (e & 255u) / 16)).x, 0.0);
}
#define nvfp4x4_piece nvfp4_words
nvfp4x4_piece nvfp4x4_fetch(uvec2 row, uint e) {
    uvec2 b = nvfp4x4_at(row, e);
    uint i = (e & 255u) / 32;
    return nvfp4x4_piece(U32x4(b).v[i], half_word(b, 64 + i));
}
NVFP4_PIECES(nvfp4x4)
