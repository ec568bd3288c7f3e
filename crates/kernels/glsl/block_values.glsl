// Rows by their indices, and runs of UNIT values from a row of operand A (see formats) to a row of dst, for the kernels
// that turn blocks into floats. PUT_D and PUT4_D store to dst.

uvec2 row_of(uvec2 base, uvec3 at, uint stride[3]) {
    return row_address(row_address(row_address(base, at.x, stride[0]), at.y, stride[1]), at.z, stride[2]);
}

void put4_f32(uvec2 dst, uint e, vec4 v) { F32x4(dst).v[e / 4] = v; }
void put4_f16(uvec2 dst, uint e, vec4 v) { F16x4(dst).v[e / 4] = f16vec4(v); }

#if UNIT == 32
// Values of four codes with this scale and minimum, rounded as the format says.
vec4 four_values(uint codes, vec2 s) {
    precise vec4 v = signed_bytes(codes) * s.x;
#if A_HAS_MIN
    precise vec4 w = v + s.y;
    return w;
#else
    return v;
#endif
}
void put_values(uvec2 src, uint e, uvec2 dst) {
    uint codes[8];
    vec2 lo, hi;
    A_GROUP32(src, e, codes, lo, hi);
    [[unroll]] for (uint i = 0; i < 8; i++) PUT4_D(dst, e + 4 * i, four_values(codes[i], i < 4 ? lo : hi));
}
#elif UNIT == 4
void put_values(uvec2 src, uint e, uvec2 dst) { PUT4_D(dst, e, A_LOAD4(src, e)); }
#else
void put_values(uvec2 src, uint e, uvec2 dst) { STORE_D(dst, e, A_LOAD(src, e)); }
#endif
