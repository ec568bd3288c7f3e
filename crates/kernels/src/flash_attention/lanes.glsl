// Keys and values of a tile of MN keys in the registers of lanes, and how they become components of matrices.
//
// Keys are the columns of a right operand, their elements its elements of k; a lane has quad_of(lane) of each step of keys
// row_of(lane, h). Values are the other way round: their elements are columns, keys are elements of k, and a lane has keys key_of(quad, i)
// of columns row_of(lane, h). Elements of a head may be taken in any order that queries and results keep to, so a lane takes elements
// that lie together: chunks of eight half floats (16 bytes), or, of formats with blocks of 32 codes, whole blocks of keys and half blocks of values.
// Bytes 0 and 2 of a word, or 1 and 3, become a pair of half floats at once; elements of a quad come in that order, then.

// The key of a tile that element i of a quad stands for.
uint key_of(uint quad, uint i) {
#if ORDER == 0
    return 2 * quad + i % 2 + i / 2 * 8;
#else
    return 4 * quad + i;
#endif
}
#define QUADS (MK / 4)

#if CODES
// Bytes of a block, whose first two are its scale, and of codes or pairs of codes.
#if CODES == 8
#define BLOCK_BYTES 34
#define CENTRE 128
#else
#define BLOCK_BYTES 18
#define CENTRE 8
#endif
// Blocks are loaded from the multiple of 8 bytes before them: `late` says how many pairs of bytes that is, 0 to 3. Four blocks are a
// multiple of 8 bytes, and so are rows.
uint late_of(uint block) { return block % 4; }
uvec2 before_block(uvec2 row, uint block) { return offset(row, block * BLOCK_BYTES - 2 * late_of(block)); }
#define WORD(W, I) W[(I) / 2][(I) % 2]
// Word i of the codes that begin 2 late + 2 bytes behind where W was loaded from.
#define CODE_WORD(W, I, LATE)                                                                            \
    ((LATE) == 0   ? WORD(W, I) >> 16 | WORD(W, (I) + 1) << 16                                           \
     : (LATE) == 1 ? WORD(W, (I) + 1)                                                                    \
     : (LATE) == 2 ? WORD(W, (I) + 1) >> 16 | WORD(W, (I) + 2) << 16                                     \
                   : WORD(W, (I) + 2))
// Bytes 0 and 2 of codes from 0 on become the mantissas of halves from 1024 on, which is exact.
f16vec2 pair_of(uint codes, f16vec2 scale) {
#if CODES == 8
    codes ^= 0x80808080u;
#endif
    return (unpackFloat2x16((codes & 0x00ff00ffu) | 0x64006400u) - f16vec2(float16_t(1024 + CENTRE))) * scale;
}
f16vec2 scale_of(uint halves, bool upper) { return upper ? unpackFloat2x16(halves).yy : unpackFloat2x16(halves).xx; }

#define K_LOADS (CODES == 8 ? 5 : 3)
#define K_CHUNKS (HSK / (32 * QUADS))
#define K_STEPS 8
struct KeyChunk { uvec2 w[K_LOADS]; };
uint block_of(uint lane, uint n) { return n * QUADS + quad_of(lane); }
KeyChunk load_key(uvec2 row, uint lane, uint n) {
    KeyChunk x;
    U32x2 from = U32x2(before_block(row, block_of(lane, n)));
    [[unroll]] for (uint i = 0; i < K_LOADS; i++) x.w[i] = from.v[i];
    return x;
}
// The quad of step s of a chunk.
f16vec2[2] key_quad(KeyChunk x, uint lane, uint n, uint s) {
    uint late = late_of(block_of(lane, n));
    f16vec2 scale = scale_of(late < 2 ? x.w[0].x : x.w[0].y, late % 2 == 1);
#if CODES == 8
    uint codes = CODE_WORD(x.w, s, late);
#else
    uint codes = CODE_WORD(x.w, s % 4, late) >> s / 4 * 4 & 0x0f0f0f0fu;
#endif
    return f16vec2[2](pair_of(codes, scale), pair_of(codes >> 8, scale));
}
// The first element of the quad of a step, as queries have it, and the order of its elements.
uint key_element(uint lane, uint n, uint s) { return 32 * block_of(lane, n) + 4 * s; }
#define IN_ORDER(V) V.xzyw

// Half blocks of values.
#if ORDER == 0
#define V_CHUNKS (HSV / 128)
#define V_TILES 8
uint half_block(uint lane, uint n) { return n * 8 + lane / 4; }
#define V_WORD(J, H) ((J) / 2)
#define V_BYTE(J, H) ((J) % 2 + 2 * (H))
#else
#define V_CHUNKS (HSV / 16)
#define V_TILES 2
uint half_block(uint lane, uint n) { return n; }
#define V_WORD(J, H) ((J) % 2 * 2 + (H) / 4)
#define V_BYTE(J, H) ((H) % 4)
#endif
struct ValueChunk {
    uvec2 w[3];
#if CODES == 8
    float16_t scale;
#endif
};
ValueChunk load_value(uvec2 row, uint lane, uint n) {
    ValueChunk x;
    uint block = half_block(lane, n) / 2;
    uvec2 at = before_block(row, block);
#if CODES == 8
    x.scale = F16(offset(row, block * BLOCK_BYTES)).v[0];
    at = offset(at, half_block(lane, n) % 2 * 16);
#endif
    [[unroll]] for (uint i = 0; i < 3; i++) x.w[i] = U32x2(at).v[i];
    return x;
}
f16vec2 value_pair(ValueChunk x, uint lane, uint n, uint word, uint odd) {
    uint late = late_of(half_block(lane, n) / 2);
#if CODES == 8
    uint codes = CODE_WORD(x.w, word, late);
    f16vec2 scale = f16vec2(x.scale);
#else
    uint codes = CODE_WORD(x.w, word, late) >> half_block(lane, n) % 2 * 4 & 0x0f0f0f0fu;
    f16vec2 scale = scale_of(late < 2 ? x.w[0].x : x.w[0].y, late % 2 == 1);
#endif
    return pair_of(codes >> 8 * odd, scale);
}
// The value of column h of tile j of a chunk.
#define VALUE(X, LANE, N, J, H) value_pair(X, LANE, N, V_WORD(J, H), V_BYTE(J, H) % 2)[V_BYTE(J, H) / 2]
// The element of a head that a column stands for.
uint value_element(uint n, uint j, uint column) {
#if ORDER == 0
    return n * 128 + column % 8 * 16 + j / 2 * 4 + j % 2 + column / 8 * 2;
#else
    return n * 16 + j * 8 + column;
#endif
}

#else
// Half floats.
#define K_CHUNKS (HSK / (8 * QUADS))
#define K_STEPS 2
#define KeyChunk uvec4
KeyChunk load_key(uvec2 row, uint lane, uint n) { return U32x4(row).v[n * QUADS + quad_of(lane)]; }
f16vec2[2] key_quad(KeyChunk x, uint lane, uint n, uint s) {
    return f16vec2[2](unpackFloat2x16(x[2 * s]), unpackFloat2x16(x[2 * s + 1]));
}
uint key_element(uint lane, uint n, uint s) { return 8 * (n * QUADS + quad_of(lane)) + 4 * s; }
#define IN_ORDER(V) V

#if ORDER == 0
#define V_CHUNKS (HSV / 64)
#define V_TILES 4
#define VALUE(X, LANE, N, J, H) unpackFloat2x16(X[J])[H]
uint value_chunk(uint lane, uint n) { return n * 8 + lane / 4; }
uint value_element(uint n, uint j, uint column) { return n * 64 + column % 8 * 8 + 2 * j + column / 8; }
#else
#define V_CHUNKS (HSV / 8)
#define V_TILES 1
#define VALUE(X, LANE, N, J, H) unpackFloat2x16(X[(H) / 2])[(H) % 2]
uint value_chunk(uint lane, uint n) { return n; }
uint value_element(uint n, uint j, uint column) { return n * 8 + column; }
#endif
#define ValueChunk uvec4
ValueChunk load_value(uvec2 row, uint lane, uint n) { return U32x4(row).v[value_chunk(lane, n)]; }
#endif
