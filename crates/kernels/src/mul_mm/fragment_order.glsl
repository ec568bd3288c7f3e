// Fragment order: how K is permuted, the same way in A and B, and activations stored in it.
//
// A chunk of k has QUADS pieces of PIECE consecutive elements. Quad q of a matrix takes its elements from piece q:
//
//     step     elements of each piece
//     0        0, 2, 1, 3
//     1        4, 6, 5, 7
//     s        4 s, 4 s + 2, 4 s + 1, 4 s + 3
//
// So each lane reads PIECE contiguous weights, and one shift turns bytes of a word into a pair of 16-bit floats. A chunk is STEPS steps.
#include "fragment_layout.glsl"
#define QUADS (MK / 4)
#define STEPS 16
#define CHUNK (4 * STEPS * QUADS)

// Packed activations hold, for each tile of MN vectors, chunk and step, the eight components of each lane. K is padded to a multiple of
// 256.
uint chunks_of(uint k) { return (k + 255) / 256 * (256 / CHUNK); }
// Stores the quad that begins with element e (a multiple of 4) of a column of k elements, for weights whose lanes take `pieces` elements together. Where a lane's second column is not among `columns` it becomes
// zeros: memory that is written in part must be read before the rest of it can be.
void store_quad(uint pieces, uvec2 halves, uint column, uint columns, uint e, uint k, vec4 v) {
    uint q = e / pieces % QUADS, c = column % MN, chunk = e / CHUNK;
    uint step = e % CHUNK / (QUADS * pieces) * (pieces / 4) + e % pieces / 4;
    uint at = ((column / MN * chunks_of(k) + chunk) * STEPS + step) * SG;
#if HALF
    uvec2 pairs = uvec2(packHalf2x16(v.xz), packHalf2x16(v.yw));
#else
    uvec2 pairs = uvec2(bf16_bits(v.x) | bf16_bits(v.z) << 16, bf16_bits(v.y) | bf16_bits(v.w) << 16);
#endif
#if FRAGMENT_LAYOUT == 0
    uint lane = at + c % 8 * 4 + q;
    if (c < 8 && column + 8 >= columns)
        U32x4(halves).v[lane] = uvec4(pairs, 0, 0);
    else
        U32x2(halves).v[lane * 2 + c / 8] = pairs;
#else
    [[unroll]] for (uint i = 0; i < 4; i++) U16(halves).v[(at + 4 * q + i) * 8 + c] = uint16_t(pairs[i / 2] >> (16 * (i % 2)) & 0xffffu);
#endif
}
