// Rounding of numbers to one or two signed bytes: the largest magnitude of a group becomes 127 or 32512.

// Four values of magnitude up to 127 as bytes. The sum with 1.5 * 2^23 is the rounded integer in its lowest bits, without
// the conversions, which are slow on many GPUs.
uint rounded_bytes(vec4 x) {
    uvec4 u = floatBitsToUint(x + 12582912.0) & 255u;
    return u.x | u.y << 8 | u.z << 16 | u.w << 24;
}
// Values times a factor, of magnitude up to 32512 then, as integers plus 128 in 16 bits each: the first and third, the second and
// fourth. With the 128 an upper byte is rounded as it should be.
uvec2 rounded_halves(vec4 x, float factor) {
    uvec4 u = floatBitsToUint(fma(x, vec4(factor), vec4(12582912.0 + 128.0)));
    return uvec2((u.x & 0xffffu) | u.z << 16, (u.y & 0xffffu) | u.w << 16);
}
// The same four as two signed bytes each: 256 * high + low. The lower byte has 128 too much: its highest bit is turned. Bytes of all
// four are moved together.
uvec2 bytes_of_halves(uvec2 halves) {
    uint high = ((halves.x >> 8) & 0x00ff00ffu) | (halves.y & 0xff00ff00u);
    uint low = (halves.x & 0x00ff00ffu) | (halves.y & 0x00ff00ffu) << 8;
    return uvec2(high, low ^ 0x80808080u);
}
uvec2 rounded_pairs(vec4 x, float factor) { return bytes_of_halves(rounded_halves(x, factor)); }
// What a group is multiplied with so that its largest magnitude becomes `levels`: near enough, as codes are rounded after it.
float inverse_of(float most, float levels) { return most > 0.0 ? levels * (1.0 / most) : 0.0; }
float most_of(vec4 x) { return max(max(abs(x.x), abs(x.y)), max(abs(x.z), abs(x.w))); }
