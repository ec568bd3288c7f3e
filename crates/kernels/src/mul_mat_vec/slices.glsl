// A slice: the elements of a row that a thread loads and multiplies at once, in quads of four.
//   blocks, QUADS > 0: QUADS quads that lie STEP apart (they share bytes of the block), neighbours take neighbouring quads
//   blocks, QUADS = 0: GROUPS groups of 32 elements, one after the other
//   plain types: WIDTH elements side by side (8 in one 16-byte load, 4, or 1); with 4 (`quads:1x4`) neighbours read neighbouring
//   quads of the activations, too
// A block's quads fall into RUNS of equal length; each run has one scale and one group of 32 activations' elements.

#if A_BLOCKS
#if QUADS
#define SLICE (4 * QUADS)
#define SLICE_QUADS QUADS
#define RUNS (A_GROUP == 32 && QUADS * STEP <= 32 ? 1 : QUADS)
uint slice_start(uint s) { return s / (STEP / 4) * (QUADS * STEP) + s % (STEP / 4) * 4; }
#define QUAD_AT(j) ((j) * STEP)
#else
#define SLICE (32 * GROUPS)
#define SLICE_QUADS (8 * GROUPS)
#define RUNS (32 / A_GROUP * GROUPS)
uint slice_start(uint s) { return s * SLICE; }
#define QUAD_AT(j) ((j) * 4)
#endif
#define SPAN_QUADS (SLICE_QUADS / RUNS)

// Zero point: subtracted once per group via sum(x) rather than from every quant.
#if QUADS
#define ZERO_POINT 0
#else
#define ZERO_POINT A_BIAS
#endif

// Codes, scales and minimums of a slice.
struct Values {
    uint codes[SLICE_QUADS];
    vec2 scales[RUNS];
};

#if QUADS == 0
void put_group(inout Values x, uint g, uint codes[8], vec2 lo, vec2 hi) {
    [[unroll]] for (uint i = 0; i < 8; i++) x.codes[8 * g + i] = codes[i];
#if A_GROUP == 32
    x.scales[g] = lo;
#else
    x.scales[2 * g] = lo;
    x.scales[2 * g + 1] = hi;
#endif
}
#endif

#if GROUPS && (A_PIECE == 1 || A_PIECE == 2 && GROUPS % 2 == 0)
// As the words lie in memory: what is made of them is made when they are multiplied, so that nothing waits for a load
// before it must.
struct Slice { A_PIECE_TYPE pieces[GROUPS / A_PIECE]; };
void load_slice(uvec2 row, uint e, out Slice x) {
    [[unroll]] for (uint i = 0; i < GROUPS / A_PIECE; i++) x.pieces[i] = A_FETCH(row, e + 32 * A_PIECE * i);
}
Values slice_values(Slice x, uint e) {
    Values v;
    [[unroll]] for (uint g = 0; g < GROUPS; g++) {
        uint codes[8];
        vec2 lo, hi;
        A_UNFOLD(x.pieces[g / A_PIECE], e + 32 * (g - g % A_PIECE), g % A_PIECE, codes, lo, hi);
        put_group(v, g, codes, lo, hi);
    }
    return v;
}
#else
#define Slice Values
#define slice_values(x, e) x
void load_slice(uvec2 row, uint e, out Slice x) {
#if QUADS
    [[unroll]] for (uint j = 0; j < QUADS; j++) x.codes[j] = A_CODES4(row, e + QUAD_AT(j));
    [[unroll]] for (uint r = 0; r < RUNS; r++) x.scales[r] = A_SCALE(row, e + QUAD_AT(r * SPAN_QUADS));
#else
    [[unroll]] for (uint g = 0; g < GROUPS; g++) {
        uint codes[8];
        vec2 lo, hi;
        A_RAW32(row, e + 32 * g, codes, lo, hi);
        put_group(x, g, codes, lo, hi);
    }
#endif
}
#endif

// Four codes as floats. Conversion of integers is slow on many GPUs: a number below 2^23 is put into the mantissa of 2^23
// instead, which is exact.
vec4 quad_values(uint codes) {
#if CONVERT && ZERO_POINT
    return signed_bytes(codes) - float(ZERO_POINT);
#elif CONVERT
    return signed_bytes(codes);
#elif ZERO_POINT
    uvec4 bytes = uvec4(codes & 255u, (codes >> 8) & 255u, (codes >> 16) & 255u, codes >> 24);
    return uintBitsToFloat(bytes | 0x4b000000u) - (8388608.0 + float(ZERO_POINT));
#else
    uint u = codes ^ 0x80808080u;
    uvec4 bytes = uvec4(u & 255u, (u >> 8) & 255u, (u >> 16) & 255u, u >> 24);
    return uintBitsToFloat(bytes | 0x4b000000u) - 8388736.0;
#endif
}

#else
#define SLICE WIDTH
uint slice_start(uint s) { return s * WIDTH; }
#define QUAD_AT(j) ((j) * 4)
#define SLICE_QUADS (WIDTH / 4)

vec4 quad_of_words(uvec2 u) {
#if A_BRAIN
    return uintBitsToFloat(uvec4(u.x << 16, u.x & 0xffff0000u, u.y << 16, u.y & 0xffff0000u));
#else
    return vec4(unpackHalf2x16(u.x), unpackHalf2x16(u.y));
#endif
}
#if WIDTH == 8
struct Slice { uvec4 raw; };
void load_slice(uvec2 row, uint e, out Slice x) { x.raw = U32x4(row).v[e / 8]; }
vec4 plain_quad(Slice x, uint j) { return quad_of_words(j == 0 ? x.raw.xy : x.raw.zw); }
#elif WIDTH == 4 && A_TWO_BYTES
struct Slice { uvec2 raw; };
void load_slice(uvec2 row, uint e, out Slice x) { x.raw = U32x2(row).v[e / 4]; }
vec4 plain_quad(Slice x, uint j) { return quad_of_words(x.raw); }
#elif WIDTH == 4
struct Slice { vec4 raw; };
void load_slice(uvec2 row, uint e, out Slice x) { x.raw = A_LOAD4(row, e); }
vec4 plain_quad(Slice x, uint j) { return x.raw; }
#else
struct Slice { float raw; };
void load_slice(uvec2 row, uint e, out Slice x) { x.raw = A_LOAD(row, e); }
#endif
#endif
