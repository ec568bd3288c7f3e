// Keys and values of a tile of MN keys in the registers of lanes, and how they become components of matrices.
//
// Keys are the columns of a right operand, their elements its elements of k; a lane has quad_of(lane) of each step of keys
// row_of(lane, h). Values are the other way round: their elements are columns, keys are elements of k, and a lane has keys key_of(quad, i)
// of columns row_of(lane, h). Elements of a head may be taken in any order that queries and results keep to, so a lane takes elements
// that lie together: chunks of eight half floats (16 bytes), or, of formats with blocks of 32 codes, a part of every block.
//
// What is loaded stays in plain arrays of words, KEY_PARTS or VALUE_PARTS of them for a chunk: of arrays within structures a driver made
// memory of its own, and the kernel took eight times as long.

// The key of a tile that element i of a quad stands for.
uint key_of(uint quad, uint i) {
#if FRAGMENT_LAYOUT == 0
    return 2 * quad + i % 2 + i / 2 * 8;
#else
    return 4 * quad + i;
#endif
}
#define QUADS (MK / 4)

#if CODES
// Bytes of a block, whose first two are its scale.
#if CODES == 8
#define BLOCK_BYTES 34
#else
#define BLOCK_BYTES 18
#endif
// Bytes 0 and 2 of a word become the mantissas of halves from 1024 on, which is exact; elements of a quad come in that order, then.
// The codes of Q8_0 have a sign: 128 is added to them on the way.
f16vec2 pair_of(uint codes, f16vec2 scale) {
#if CODES == 8
    uint halves = (codes & 0x00ff00ffu) ^ 0x64806480u;
    const float16_t centre = float16_t(1024 + 128);
#else
    uint halves = (codes & 0x000f000fu) | 0x64006400u;
    const float16_t centre = float16_t(1024 + 8);
#endif
    return (unpackFloat2x16(halves) - f16vec2(centre)) * scale;
}
// Blocks of odd numbers have codes at multiples of 4 bytes; those of even ones are two bytes late, and are loaded from two bytes before.
uvec2 near_word(uvec2 row, uint block, uint word) { return offset(row, block * BLOCK_BYTES + 4 * word + block % 2 * 2); }
#define CODE_WORD(WORDS, AT, BLOCK) ((BLOCK) % 2 == 1 ? WORDS[AT] : WORDS[AT] >> 16 | WORDS[(AT) + 1] << 16)
// The word that has a block's scale, and the scale twice: that of an even block is the lower half.
uint scale_word(uvec2 row, uint block) { return U32(offset(row, block * BLOCK_BYTES - block % 2 * 2)).v[0]; }
f16vec2 scale_of(uint word, uint block) { return block % 2 == 1 ? unpackFloat2x16(word).yy : unpackFloat2x16(word).xx; }

// A lane has KEY_WORDS neighbouring words of every block of its keys, so that neighbours load neighbouring words and a block's number is
// known when the kernel is compiled; or every word of some blocks: a software GPU loads what all lanes share even where none of them
// is to load, so its lanes share no scale. Words of nibbles are two quads, 16 elements apart.
#define Part uint
#if FRAGMENT_LAYOUT == 0
#define KEY_WORDS (CODES / QUADS)
uint block_of(uint lane, uint n) { return n; }
uint first_word(uint lane) { return KEY_WORDS * quad_of(lane); }
#else
#define KEY_WORDS CODES
uint block_of(uint lane, uint n) { return n * QUADS + quad_of(lane); }
uint first_word(uint lane) { return 0; }
#endif
#define K_STEPS (8 * KEY_WORDS / CODES)
#define K_CHUNKS (HSK / 4 / QUADS / K_STEPS)
#define KEY_PARTS (KEY_WORDS + 2)
#define LOAD_KEY(K, AT, ROW, LANE, N)                                                                    \
    {                                                                                                    \
        uint block = block_of(LANE, N);                                                                  \
        U32 from = U32(near_word(ROW, block, first_word(LANE)));                                         \
        STEP_LOOP for (uint w = 0; w < KEY_WORDS; w++) K[(AT) + w] = from.v[w];                          \
        if (block % 2 == 0) K[(AT) + KEY_WORDS] = from.v[KEY_WORDS];                                     \
        K[(AT) + KEY_WORDS + 1] = scale_word(ROW, block);                                                \
    }
f16vec2[2] quad_of_word(uint codes, f16vec2 scale) { return f16vec2[2](pair_of(codes, scale), pair_of(codes >> 8, scale)); }
// The quad of step S of a chunk.
#define KEY_QUAD(K, AT, LANE, N, S)                                                                      \
    quad_of_word(CODE_WORD(K, (AT) + (S) % KEY_WORDS, block_of(LANE, N)) >> (S) / KEY_WORDS * 4,         \
                 scale_of(K[(AT) + KEY_WORDS + 1], block_of(LANE, N)))
// The first element of the quad of a step, as queries have it, and the order of its elements.
uint key_element(uint lane, uint n, uint s) {
    return 32 * block_of(lane, n) + s / KEY_WORDS * 16 + 4 * (first_word(lane) + s % KEY_WORDS);
}
#define IN_ORDER(V) V.xzyw

// Of values, a lane has VALUE_WORDS neighbouring words (Q8_0) or halves of words (Q4_0) of every block, as many columns of all of its tiles.
#define V_CHUNKS (HSV / 32)
#define V_TILES (32 / MN)
#if FRAGMENT_LAYOUT == 0
#define VALUE_WORDS 1
#define FIRST_WORD(LANE) ((LANE) / 4)
#else
#define VALUE_WORDS 8
#define FIRST_WORD(LANE) 0
#endif
#define VALUE_PARTS (VALUE_WORDS + 2)
#if CODES == 8
#define LOAD_VALUE(V, AT, ROW, LANE, N)                                                                  \
    {                                                                                                    \
        U32 from = U32(near_word(ROW, N, FIRST_WORD(LANE)));                                             \
        STEP_LOOP for (uint w = 0; w < VALUE_WORDS; w++) V[(AT) + w] = from.v[w];                            \
        if ((N) % 2 == 0) V[(AT) + VALUE_WORDS] = from.v[VALUE_WORDS];                                           \
        V[(AT) + VALUE_WORDS + 1] = scale_word(ROW, N);                                                        \
    }
#if FRAGMENT_LAYOUT == 0
#define VALUE(V, AT, N, J, H) pair_of(CODE_WORD(V, AT, N) >> 8 * (J), scale_of(V[(AT) + VALUE_WORDS + 1], N))[H]
uint value_element(uint n, uint j, uint column) { return 32 * n + 4 * (column % 8) + j + column / 8 * 2; }
#else
#define VALUE(V, AT, N, J, H) pair_of(CODE_WORD(V, (AT) + 2 * (J) + (H) / 4, N) >> (H) % 2 * 8, scale_of(V[(AT) + VALUE_WORDS + 1], N))[(H) % 4 / 2]
#endif
#else
#define LOAD_VALUE(V, AT, ROW, LANE, N)                                                                  \
    {                                                                                                    \
        U16 from = U16(offset(ROW, (N) * BLOCK_BYTES + 2 + 2 * FIRST_WORD(LANE)));                       \
        STEP_LOOP for (uint w = 0; w < VALUE_WORDS; w++) V[(AT) + w] = uint(from.v[w]);                      \
        V[(AT) + VALUE_WORDS + 1] = scale_word(ROW, N);                                                        \
    }
// Two bytes with four codes: those of the lower nibbles, or of the upper ones, 16 elements on, as a pair.
f16vec2 nibbles_of(uint bytes, uint upper, f16vec2 scale) { return pair_of((bytes | bytes << 8) >> 4 * upper, scale); }
#if FRAGMENT_LAYOUT == 0
#define VALUE(V, AT, N, J, H) nibbles_of(V[AT], J, scale_of(V[(AT) + VALUE_WORDS + 1], N))[H]
uint value_element(uint n, uint j, uint column) { return 32 * n + 16 * j + 2 * (column % 8) + column / 8; }
#else
#define VALUE(V, AT, N, J, H) nibbles_of(V[(AT) + (J) % 2 * 4 + (H) / 2], (J) / 2, scale_of(V[(AT) + VALUE_WORDS + 1], N))[(H) % 2]
#endif
#endif
#if FRAGMENT_LAYOUT != 0
uint value_element(uint n, uint j, uint column) { return 32 * n + 8 * j + column; }
#endif

#else
// Half floats.
#define Part uvec4
#define KEY_PARTS 1
#define VALUE_PARTS 1
#define K_CHUNKS (HSK / (8 * QUADS))
#define K_STEPS 2
#define LOAD_KEY(K, AT, ROW, LANE, N) K[AT] = U32x4(ROW).v[(N) * QUADS + quad_of(LANE)];
f16vec2[2] quad_of_halves(uint first, uint second) { return f16vec2[2](unpackFloat2x16(first), unpackFloat2x16(second)); }
#define KEY_QUAD(K, AT, LANE, N, S) quad_of_halves(K[AT][2 * (S)], K[AT][2 * (S) + 1])
uint key_element(uint lane, uint n, uint s) { return 8 * (n * QUADS + quad_of(lane)) + 4 * s; }
#define IN_ORDER(V) V

#if FRAGMENT_LAYOUT == 0
#define V_CHUNKS (HSV / 64)
#define V_TILES 4
#define VALUE(V, AT, N, J, H) unpackFloat2x16(V[AT][J])[H]
uint value_chunk(uint lane, uint n) { return n * 8 + lane / 4; }
uint value_element(uint n, uint j, uint column) { return n * 64 + column % 8 * 8 + 2 * j + column / 8; }
#else
#define V_CHUNKS (HSV / 8)
#define V_TILES 1
#define VALUE(V, AT, N, J, H) unpackFloat2x16(V[AT][(H) / 2])[(H) % 2]
uint value_chunk(uint lane, uint n) { return n; }
uint value_element(uint n, uint j, uint column) { return n * 8 + column; }
#endif
#define LOAD_VALUE(V, AT, ROW, LANE, N) V[AT] = U32x4(ROW).v[value_chunk(LANE, N)];
#endif
#define K_HELD (QUADS_OF_LANE * K_CHUNKS * KEY_PARTS)
#define V_HELD (4 * V_CHUNKS * VALUE_PARTS)
