// Eight elements of a row of K or V as they come from memory, so that loads can be far ahead of their use: chunk e of a
// row is its elements QUAD0(e) .. + 3 and QUAD1(e) .. + 3. Formats of nibbles keep elements 16 apart in one byte, so their
// chunks are of two such quads.

#if WIDE_K8 || WIDE_V8
// Chunk e of a row of Q8_0 at a multiple of 8 bytes, of a whole number of 128 elements: its codes begin 2, 4, 6 or 8 bytes
// after a multiple of 8, the same for all rows, and end inside the row.
void q8_0_chunk(uvec2 row, uint e, out uvec2 codes, out float scale) {
    uint at = e / 4 * 34 + 2 + e % 4 * 8;
    uvec2 near = offset(row, at & ~7u);
    uvec2 a = U32x2(near).v[0], b = U32x2(near).v[(at & 7u) == 0 ? 0 : 1];
    bool word = (at & 4u) != 0, half_word = (at & 2u) != 0;
    uint x = word ? a.y : a.x, y = word ? b.x : a.y, z = word ? b.y : b.x;
    codes = half_word ? uvec2(x >> 16 | y << 16, y >> 16 | z << 16) : uvec2(x, y);
    scale = float(F16(offset(row, e / 4 * 34)).v[0]);
}
#endif

// Codes as floats: a number below 2^23 is put into the mantissa of 2^23, which is exact and cheaper than a conversion.
vec4 code_values(uint codes) {
    uint u = codes ^ 0x80808080u;
    uvec4 bytes = uvec4(u & 255u, (u >> 8) & 255u, (u >> 16) & 255u, u >> 24);
    return uintBitsToFloat(bytes | 0x4b000000u) - 8388736.0;
}

#if K_NIBBLES
uint k_quad0(uint e) { return e / 4 * 32 + e % 4 * 4; }
uint k_quad1(uint e) { return k_quad0(e) + 16; }
#else
uint k_quad0(uint e) { return 8 * e; }
uint k_quad1(uint e) { return 8 * e + 4; }
#endif
#if V_NIBBLES
uint v_quad0(uint e) { return e / 4 * 32 + e % 4 * 4; }
uint v_quad1(uint e) { return v_quad0(e) + 16; }
#else
uint v_quad0(uint e) { return 8 * e; }
uint v_quad1(uint e) { return 8 * e + 4; }
#endif

// Blocks: codes and their scale and minimum.
struct Blocks {
    uvec2 codes;
    vec2 scale;
};
void values_of(Blocks x, out vec4 a, out vec4 b, bool has_min) {
    a = code_values(x.codes.x) * x.scale.x;
    b = code_values(x.codes.y) * x.scale.x;
    if (has_min) {
        a += x.scale.y;
        b += x.scale.y;
    }
}
// F16 at multiples of 16 bytes.
void values_of(uvec4 u, out vec4 a, out vec4 b) {
    a = vec4(unpackHalf2x16(u.x), unpackHalf2x16(u.y));
    b = vec4(unpackHalf2x16(u.z), unpackHalf2x16(u.w));
}
// Everything else.
struct Floats { vec4 a, b; };

#if K_HALVES
#define RawK uvec4
void fetch_k(uvec2 row, uint e, out RawK x) { x = U32x4(row).v[e]; }
void k_values(RawK x, out vec4 a, out vec4 b) { values_of(x, a, b); }
#elif K_BLOCKS
#define RawK Blocks
void fetch_k(uvec2 row, uint e, out RawK x) {
#if WIDE_K8
    x.scale = vec2(0.0);
    q8_0_chunk(row, e, x.codes, x.scale.x);
#else
    x.codes = uvec2(K_CODES4(row, k_quad0(e)), K_CODES4(row, k_quad1(e)));
    x.scale = K_SCALE(row, k_quad0(e));
#endif
}
void k_values(RawK x, out vec4 a, out vec4 b) { values_of(x, a, b, K_HAS_MIN == 1); }
#else
#define RawK Floats
void fetch_k(uvec2 row, uint e, out RawK x) {
    x.a = K_LOAD4(row, 8 * e);
    x.b = K_LOAD4(row, 8 * e + 4);
}
void k_values(RawK x, out vec4 a, out vec4 b) { a = x.a; b = x.b; }
#endif

#if V_HALVES
#define RawV uvec4
void fetch_v(uvec2 row, uint e, out RawV x) { x = U32x4(row).v[e]; }
void v_values(RawV x, out vec4 a, out vec4 b) { values_of(x, a, b); }
#elif V_BLOCKS
#define RawV Blocks
void fetch_v(uvec2 row, uint e, out RawV x) {
#if WIDE_V8
    x.scale = vec2(0.0);
    q8_0_chunk(row, e, x.codes, x.scale.x);
#else
    x.codes = uvec2(V_CODES4(row, v_quad0(e)), V_CODES4(row, v_quad1(e)));
    x.scale = V_SCALE(row, v_quad0(e));
#endif
}
void v_values(RawV x, out vec4 a, out vec4 b) { values_of(x, a, b, V_HAS_MIN == 1); }
#else
#define RawV Floats
void fetch_v(uvec2 row, uint e, out RawV x) {
    x.a = V_LOAD4(row, 8 * e);
    x.b = V_LOAD4(row, 8 * e + 4);
}
void v_values(RawV x, out vec4 a, out vec4 b) { a = x.a; b = x.b; }
#endif
