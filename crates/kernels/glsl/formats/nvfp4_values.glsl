// Values of NVFP4: doubled 4-bit float * scale / 2. Scales of 16 elements are unsigned 8-bit floats, four bits of exponent,
// three of mantissa.
#include "formats/e2m1.glsl"

// Halves of the scales that the two lowest bytes stand for. 0x7f means nothing and reads as zero; the sign bit is ignored.
// With the bits of a byte at those of a half float, exponents are too small by 8, and subnormal ones stay subnormal.
vec2 nvfp4_half_scales(uint two) {
    vec2 scales = unpackHalf2x16((two & 0x7fu) << 7 | (two & 0x7f00u) << 15) * 128.0;
    return vec2((two & 0xffu) == 0x7fu ? 0.0 : scales.x, (two & 0xff00u) == 0x7f00u ? 0.0 : scales.y);
}
// Codes of 32 elements: of each 16, element r in byte r % 8, low half for r < 8.
void nvfp4_codes32(uvec4 q, out uint codes[8]) {
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uvec2 both = e2m1_both(q[i]);
        codes[i / 2 * 4 + i % 2] = both.x;
        codes[i / 2 * 4 + i % 2 + 2] = both.y;
    }
}
// The same of elements e .. e + 3, from the word that holds them.
uint nvfp4_codes_of(uint q, uint e) { return e2m1_codes(q >> ((e & 8u) / 2)); }

// Pieces are the words of 32 elements and their two scales.
struct nvfp4_words { uvec4 q; uint scales; };
#define NVFP4_PIECES(F)                                                        \
    void F##_unfold(nvfp4_words x, uint e, uint j, out uint codes[8], out vec2 lo, out vec2 hi) { \
        nvfp4_codes32(x.q, codes);                                             \
        vec2 scales = nvfp4_half_scales(x.scales);                             \
        lo = vec2(scales.x, 0.0);                                              \
        hi = vec2(scales.y, 0.0);                                              \
    }                                                                          \
    GROUP_OF_PIECE(F, group32, 1)                                              \
    SCALED_VALUES(F)
