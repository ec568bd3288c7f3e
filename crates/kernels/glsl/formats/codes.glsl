// What the formats share: loads at the alignment of a block, arithmetic on four packed bytes, and values from codes.
//
// Every block format F has the same functions; `row` is the address of the first byte of a row, `e` an element of it:
//   uint  F_codes4(row, e)   signed 8-bit codes of elements e .. e + 3 (e a multiple of 4), first one lowest
//   vec2  F_scale(row, e)    scale and minimum of e's group: value = scale * code + minimum
//   void  F_group32(row, e, codes, lo, hi)   codes of elements e .. e + 31 (e a multiple of 32), scale and minimum of
//                            the first and of the second 16, with as few loads as the block allows
//   void  F_raw32(row, e, codes, lo, hi)   the same before what all codes are too large by is taken from them; only formats
//                            whose line in `formats.rs` names that number, and their codes are below 128
// Formats whose line in `formats.rs` names pieces keep loading and unfolding apart, so that loads can be far ahead:
//   F_piece F_fetch(row, e)  the words of the piece that begins at element e, as they lie
//   void  F_unfold(piece, e, j, codes, lo, hi)   what `raw32`, or else `group32`, gives for its group j of 32 elements
// and where pieces have two groups, whose scales are whole numbers below 64 times a factor of the piece (their PARTS is 1):
//   uint  F_factor(piece)    the factor, an f16 in the lower half
//   vec4  F_parts(piece, e, middle)   those numbers, and the minimums of both groups where `middle` is taken from codes
//   uint  F_nibbles(piece, i)   codes 4 i .. 4 i + 3 of both groups, those of the second in the upper halves of bytes: 4-bit codes
//   vec4  F_load4(row, e), float F_load(row, e)   values
//   void  F_init()           fills the format's table; every thread calls it once before anything else
// and F_GROUP (elements of a scale), F_BLOCK (elements of a block), F_BLOCK_BYTES. Plain floats have load, load4, init.
// Kernels declare their local size before they include formats: `init` asks for it.

// Threads of a workgroup.
#define THREADS (gl_WorkGroupSize.x * gl_WorkGroupSize.y * gl_WorkGroupSize.z)

// The 32 bits that begin at 16-bit word i.
uint two_halves(uvec2 b, uint i) { return uint(U16(b).v[i]) | uint(U16(b).v[i + 1]) << 16; }
uint half_word(uvec2 b, uint i) { return uint(U16(b).v[i]); }
uint byte_at(uvec2 b, uint i) { return uint(U8(b).v[i]); }
// The f16 at 16-bit word i.
float half_at(uvec2 b, uint i) { return float(F16(b).v[i]); }

vec4 signed_bytes(uint c) {
    int i = int(c);
    return vec4(bitfieldExtract(i, 0, 8), bitfieldExtract(i, 8, 8), bitfieldExtract(i, 16, 8), i >> 24);
}
float signed_byte(uint c, uint i) { return float(bitfieldExtract(int(c), int(i) * 8, 8)); }

// A number in each byte.
uint in_bytes(uint x) { return x * 0x01010101u; }
// a - b in each byte, for a and b below 128: the top bits keep borrows from reaching the next byte.
uint minus_bytes(uint a, uint b) { return ((a | 0x80808080u) - b) ^ 0x80808080u; }
// -a where the byte of `minus` is 1, a where it is 0; a below 128.
uint negate_bytes(uint a, uint minus) { return ((a ^ 0x80808080u ^ (minus * 255u)) + minus) ^ 0x80808080u; }
// Bits 0 to 3 of x as the lowest bits of four bytes.
uint bits_to_bytes(uint x) { return ((x & 15u) * 0x00204081u) & 0x01010101u; }
// Bits 0 to 7 of x, two a value, as four bytes.
uint pairs_to_bytes(uint x) {
    x = ((x & 255u) | x << 12) & 0x000f000fu;
    return (x | x << 6) & 0x03030303u;
}

// The low nibbles of sixteen bytes, then the high ones.
void nibbles32(uvec4 q, out uint codes[8]) {
    [[unroll]] for (uint i = 0; i < 4; i++) {
        codes[i] = q[i] & 0x0f0f0f0fu;
        codes[4 + i] = (q[i] >> 4) & 0x0f0f0f0fu;
    }
}

// `raw32` or `group32` of formats with pieces of N groups.
#define GROUP_OF_PIECE(F, NAME, N)                                             \
    void F##_##NAME(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) { \
        uint first = e & ~(32u * N - 1u);                                      \
        F##_unfold(F##_fetch(row, first), first, (e - first) / 32, codes, lo, hi); \
    }

// Codes that may be negative, from those of `raw32`.
#define GROUP32_OF_RAW(F, ZERO_POINT)                                        \
    void F##_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) { \
        F##_raw32(row, e, codes, lo, hi);                                      \
        [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = minus_bytes(codes[i], in_bytes(ZERO_POINT)); \
    }

// Values from codes. `precise` keeps product and sum apart, as the format defines the value with two roundings.
#define SCALED_VALUES(F)                                                       \
    vec4 F##_load4(uvec2 row, uint e) {                                        \
        precise vec4 v = signed_bytes(F##_codes4(row, e)) * F##_scale(row, e).x; \
        return v;                                                              \
    }                                                                          \
    float F##_load(uvec2 row, uint e) {                                        \
        precise float v = signed_byte(F##_codes4(row, e & ~3u), e & 3u) * F##_scale(row, e).x; \
        return v;                                                              \
    }
#define VALUES_WITH_MIN(F)                                                      \
    vec4 F##_load4(uvec2 row, uint e) {                                        \
        vec2 s = F##_scale(row, e);                                            \
        precise vec4 v = signed_bytes(F##_codes4(row, e)) * s.x;               \
        precise vec4 w = v + s.y;                                              \
        return w;                                                              \
    }                                                                          \
    float F##_load(uvec2 row, uint e) {                                        \
        vec2 s = F##_scale(row, e);                                            \
        precise float v = signed_byte(F##_codes4(row, e & ~3u), e & 3u) * s.x; \
        precise float w = v + s.y;                                             \
        return w;                                                              \
    }
