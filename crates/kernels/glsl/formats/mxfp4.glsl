// MXFP4: 32 values in 17 bytes. Exponent @0 (a power of two, biased by 127), 4-bit floats @1[16] (element e low in byte e,
// e + 16 high). Doubled float * 2^(exponent - 128)
// Blocks lie at any byte, so whole words are loaded and shifted: up to three bytes before and after a block are read.
#include "formats/mxfp4_values.glsl"
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
uint mxfp4_exponent(uvec2 row, uint e) { return byte_at(mxfp4_at(row, e), 0); }
void mxfp4_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = mxfp4_at(row, e);
    uvec2 words = uvec2(b.x & ~3u, b.y);
    uint shift = (b.x & 3u) * 8;
    uint w[5];
    [[unroll]] for (uint i = 0; i < 5; i++) w[i] = U32(words).v[i];
    lo = hi = vec2(mxfp4_power((w[0] >> shift) & 255u), 0.0);
    uvec4 q;
    [[unroll]] for (uint i = 0; i < 4; i++) q[i] = mxfp4_word(w[i], w[i + 1], shift);
    e2m1_codes32(q, codes);
}
MXFP4_VALUES(mxfp4)
