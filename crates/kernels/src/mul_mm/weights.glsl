// Weights that lanes decode in registers and write to the components of matrices: what is fetched of a row (fetch), what becomes of
// it (unfold), and the quad of a step (quad). For lanes.comp and staged.comp; needs order.glsl, formats.glsl, place.glsl and STRIDE.
// Two elements of a matrix: halves, or bfloat16 beside such weights.
#if HALF
#define ELEMENT float16_t
#define Pair f16vec2
Pair pair_of(uint bits) { return unpackFloat2x16(bits); }
#else
#define ELEMENT bfloat16_t
#define Pair bf16vec2
Pair pair_of(uint bits) { return uintBitsToBFloat16EXT(unpack16(bits)); }
#endif
#define MATRIX_A coopmat<ELEMENT, gl_ScopeSubgroup, MM, MK, gl_MatrixUseA>
#define MATRIX_B coopmat<ELEMENT, gl_ScopeSubgroup, MK, MN, gl_MatrixUseB>
#define MATRIX_C coopmat<float, gl_ScopeSubgroup, MM, MN, gl_MatrixUseAccumulator>

// What is fetched at once of a row: UNIT elements, as their words lie where the format keeps loading and unfolding apart.
#if A_BLOCKS && A_PIECE
#define UNIT (32 * A_PIECE)
#define Words A_PIECE_TYPE
Words fetch(uvec2 row, uint e) { return A_FETCH(row, e); }
#elif A_BLOCKS
#define UNIT 32
struct Words { uint codes[8]; vec2 lo, hi; };
Words fetch(uvec2 row, uint e) {
    Words x;
    A_GROUP32(row, e, x.codes, x.lo, x.hi);
    return x;
}
#else
#define UNIT 32
// Sixteen bytes of PIECE elements, from four pieces.
struct Words { uvec4 w[4]; };
Words fetch(uvec2 row, uint e) {
    Words x;
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uint at = e + i * QUADS * PIECE;
        x.w[i] = U32x4(row).v[(at < p.k ? at : 0) / 8];
    }
    return x;
}
#endif
#define UNITS (4 * STEPS / UNIT)
// Steps of a group: elements that are unfolded at once.
#define GROUP_STEPS 8
#if A_BLOCKS
// value = (code - CENTRE) * scale + minimum. Codes become the mantissas of halves from 1024 on, which is exact. Where values
// have a minimum it is taken at the middle of the codes: there it is small, and its rounding with it.
#if A_SHIFTED
#define CENTRE A_MIDDLE
#elif A_PIECE && A_BIAS
#define CENTRE A_BIAS
#else
#define CENTRE 128
#define SIGNED 1
#endif
#if A_PARTS
// Scales that are whole numbers multiply codes without any rounding, which leaves that of the value itself. Codes of four bits
// become the upper bits of mantissas: 16 + code and its product with a scale below 64 both fit a half. Those of five bits must
// lose the 1024 first.
struct Group { uint codes[8]; f16vec2 scale, less, factor, least; };
Group unfold(Words x, uint e, uint j) {
    Group g;
    vec4 parts = A_PARTS_OF(x, e, float(CENTRE));
    // Of both groups, a half each: all arithmetic in pairs.
    f16vec2 whole = unpackFloat2x16(packHalf2x16(parts.xy)), least = unpackFloat2x16(packHalf2x16(parts.zw));
    f16vec2 scale = CENTRE == 8 ? whole * float16_t(16.0) : whole, less = whole * float16_t(-24.0);
    g.scale = j == 0 ? scale.xx : scale.yy;
    g.less = j == 0 ? less.xx : less.yy;
    g.least = j == 0 ? least.xx : least.yy;
    g.factor = unpackFloat2x16(A_FACTOR(x)).xx;
#if CENTRE == 8
    [[unroll]] for (uint i = 0; i < 8; i++) g.codes[i] = A_NIBBLES(x, i);
#else
    vec2 unused[2];
    A_UNFOLD(x, e, j, g.codes, unused[0], unused[1]);
#endif
    return g;
}
#if CENTRE == 8
f16vec2 values(uint mantissas, Group g) {
    return fma(fma(unpackFloat2x16((mantissas & 0x03c003c0u) | 0x3c003c00u), g.scale, g.less), g.factor, g.least);
}
f16vec2[2] quad(Group g, uint j, uint s) {
    uint x = g.codes[s];
    return j == 0 ? f16vec2[2](values(x << 6, g), values(x >> 2, g)) : f16vec2[2](values(x << 2, g), values(x >> 6, g));
}
#else
f16vec2 values(uint pair, Group g) {
    f16vec2 code = unpackFloat2x16((pair & 0x00ff00ffu) | 0x64006400u) - f16vec2(float16_t(1024 + CENTRE));
    return fma(code * g.scale, g.factor, g.least);
}
f16vec2[2] quad(Group g, uint j, uint s) { return f16vec2[2](values(g.codes[s], g), values(g.codes[s] >> 8, g)); }
#endif
#else
struct Group { uint codes[8]; f16vec2 scale[2], least[2]; };
Group unfold(Words x, uint e, uint j) {
    Group g;
    vec2 s[2];
#if A_PIECE
    A_UNFOLD(x, e, j, g.codes, s[0], s[1]);
#else
    g.codes = x.codes;
    s[0] = x.lo;
    s[1] = x.hi;
#endif
    [[unroll]] for (uint i = 0; i < 2; i++) {
        g.scale[i] = f16vec2(vec2(s[i].x));
        g.least[i] = f16vec2(vec2(A_SHIFTED != 0 ? s[i].y + float(CENTRE) * s[i].x : 0.0));
    }
    return g;
}
f16vec2 values(uint pair, f16vec2 scale, f16vec2 least) {
    f16vec2 v = unpackFloat2x16((pair & 0x00ff00ffu) | 0x64006400u) - f16vec2(float16_t(1024 + CENTRE));
#if A_SHIFTED
    return fma(v, scale, least);
#else
    return v * scale;
#endif
}
// The quad of step s of a group, as two pairs.
f16vec2[2] quad(Group g, uint j, uint s) {
    uint code = g.codes[s];
#if SIGNED
    code ^= 0x80808080u;
#endif
    return f16vec2[2](values(code, g.scale[s / 4], g.least[s / 4]), values(code >> 8, g.scale[s / 4], g.least[s / 4]));
}
#endif
#else
#define Group Words
Group unfold(Words x, uint e, uint j) { return x; }
Pair[2] quad(Group g, uint j, uint s) {
    uint low = g.w[s / 2][s % 2 * 2], high = g.w[s / 2][s % 2 * 2 + 1];
    return Pair[2](pair_of((low & 0xffffu) | high << 16), pair_of(low >> 16 | (high & 0xffff0000u)));
}
#endif

// Of the chunks of k this subgroup has number `number` and every STRIDE-th from there on, `units` units in all.
uint lane, units, number;
uvec2 rows[QUADS_OF_LANE];
uint chunk_of(uint u) { return number + u / UNITS * STRIDE; }
// The first element of unit u of this subgroup for this lane; the last chunk may reach past the end, where the columns are zeros:
// any weights will do there.
uint element(uint u) {
    uint e = chunk_of(u) * CHUNK + u % UNITS * (UNIT < PIECE ? UNIT : UNIT * QUADS) + quad_of(lane) * PIECE;
    return e < p.k ? e : 0;
}
// Past the last unit that one again, which is not used.
#define FETCH(INTO, U)                                                         \
    STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) INTO[h] = fetch(rows[h], element(min(U, units - 1)));
