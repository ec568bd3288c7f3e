// Rounding of columns to signed bytes, 32 elements with one factor: the largest magnitude / 127.

// Four values of magnitude up to 127 as bytes. The sum with 1.5 * 2^23 is the rounded integer in its lowest bits, without
// the conversions, which are slow on many GPUs.
uint rounded_bytes(vec4 x) {
    uvec4 u = floatBitsToUint(x + 12582912.0) & 255u;
    return u.x | u.y << 8 | u.z << 16 | u.w << 24;
}
// Values of magnitude up to 32512 as two bytes each, 256 * high + low.
uvec2 rounded_pairs(vec4 x) {
    ivec4 q = floatBitsToInt(x + 12582912.0) - 0x4b400000;
    ivec4 high = (q + 128) >> 8;
    uvec4 h = uvec4(high) & 255u, l = uvec4(q - (high << 8)) & 255u;
    return uvec2(h.x | h.y << 8 | h.z << 16 | h.w << 24, l.x | l.y << 8 | l.z << 16 | l.w << 24);
}
// What a group is multiplied with so that its largest magnitude becomes `levels`.
float inverse_of(float most, float levels) { return most > 0.0 ? levels / most : 0.0; }
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

// Elements 32 g .. 32 g + 31 of a column; gives their factor back.
float round32(uvec2 column, uint g, out uint codes[8], inout float squares) {
    vec4 x[8];
    float most = 0.0;
    [[unroll]] for (uint i = 0; i < 8; i++) {
        x[i] = column_values(column, 8 * g + i, squares);
        most = max(most, most_of(x[i]));
    }
    float inverse = inverse_of(most, 127.0);
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = rounded_bytes(x[i] * inverse);
    return most / 127.0;
}
