// Rows by their indices, and runs of 32 values from a row of operand A (see formats) to a row of dst, for the kernels
// that turn blocks into floats. UNIT is 32 for block formats with dst rows that take vectors, else 1.

uvec2 row_of(uvec2 base, uvec3 at, uint stride[3]) {
    return row_address(row_address(row_address(base, at.x, stride[0]), at.y, stride[1]), at.z, stride[2]);
}

#if UNIT == 32
void put4_f32(uvec2 dst, uint e, vec4 v) { F32x4(dst).v[e / 4] = v; }
void put4_f16(uvec2 dst, uint e, vec4 v) { F16x4(dst).v[e / 4] = f16vec4(v); }

void put_group(uvec2 src, uint e, uvec2 dst) {
    uint codes[8];
    vec2 lo, hi;
    A_GROUP32(src, e, codes, lo, hi);
    [[unroll]] for (uint i = 0; i < 8; i++) {
        vec2 s = i < 4 ? lo : hi;
        precise vec4 v = signed_bytes(codes[i]) * s.x;
#if A_SHIFTED
        precise vec4 w = v + s.y;
        PUT4_D(dst, e + 4 * i, w);
#else
        PUT4_D(dst, e + 4 * i, v);
#endif
    }
}
#endif
