// Rounding of columns to one or two signed bytes, 32 elements with one factor: the largest magnitude / 127 or / 32512.

// Four values of magnitude up to 127 as bytes. The sum with 1.5 * 2^23 is the rounded integer in its lowest bits, without
// the conversions, which are slow on many GPUs.
uint rounded_bytes(vec4 x) {
    uvec4 u = floatBitsToUint(x + 12582912.0) & 255u;
    return u.x | u.y << 8 | u.z << 16 | u.w << 24;
}
// Values times a factor, of magnitude up to 32512 then, as two signed bytes each: 256 * high + low. The lowest 16 bits of
// the sum are the rounded integer plus 128, so the upper byte is rounded as it should be, and the lower one has 128 too much:
// its highest bit is turned. Bytes of all four are moved together.
uvec2 rounded_pairs(vec4 x, float factor) {
    uvec4 u = floatBitsToUint(fma(x, vec4(factor), vec4(12582912.0 + 128.0)));
    uint even = (u.x & 0xffffu) | u.z << 16, odd = (u.y & 0xffffu) | u.w << 16;
    uint high = ((even >> 8) & 0x00ff00ffu) | (odd & 0xff00ff00u);
    uint low = (even & 0x00ff00ffu) | (odd & 0x00ff00ffu) << 8;
    return uvec2(high, low ^ 0x80808080u);
}
// What a group is multiplied with so that its largest magnitude becomes `levels`: near enough, as codes are rounded after it.
float inverse_of(float most, float levels) { return most > 0.0 ? levels * (1.0 / most) : 0.0; }
float most_of(vec4 x) { return max(max(abs(x.x), abs(x.y)), max(abs(x.z), abs(x.w))); }

// Elements 4 q .. 4 q + 3 of a column, after the weight of NORM; adds their squares (before the weight) to `squares`.
vec4 column_values(uvec2 column, uint q, inout float squares) {
    vec4 x = B_LOAD4(column, 4 * q);
#if NORM
    squares += dot(x, x);
#if NORM_WEIGHT
    x *= F32x4(p.norm_weight).v[q];
#endif
#endif
    return x;
}

// Elements 32 g .. 32 g + 31 of a column; gives their largest magnitude back.
float load32(uvec2 column, uint g, out vec4 x[8], inout float squares) {
    float most = 0.0;
    [[unroll]] for (uint i = 0; i < 8; i++) {
        x[i] = column_values(column, 8 * g + i, squares);
        most = max(most, most_of(x[i]));
    }
    return most;
}

// The same as codes of 8 bits; gives their factor back.
float round32(uvec2 column, uint g, out uint codes[8], inout float squares) {
    vec4 x[8];
    float most = load32(column, g, x, squares);
    float inverse = inverse_of(most, 127.0);
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = rounded_bytes(x[i] * inverse);
    return most / 127.0;
}
