// Elements 32 g .. 32 g + 31 of a column (after the weight of NORM) as signed bytes; gives their factor back, the
// largest magnitude / 127, and adds their squares (before the weight) to `squares`.
float round32(uvec2 column, uint g, out uint codes[8], inout float squares) {
    vec4 x[8];
    vec4 most = vec4(0);
    [[unroll]] for (uint i = 0; i < 8; i++) {
        x[i] = B_LOAD4(column, 32 * g + 4 * i);
#if NORM
        squares += dot(x[i], x[i]);
#if NORM_WEIGHT
        x[i] *= F32x4(p.norm_weight).v[8 * g + i];
#endif
#endif
        most = max(most, abs(x[i]));
    }
    float amax = max(max(most.x, most.y), max(most.z, most.w));
    float inverse = amax > 0.0 ? 127.0 / amax : 0.0;
    [[unroll]] for (uint i = 0; i < 8; i++) {
        ivec4 q = ivec4(round(x[i] * inverse)) & 255;
        codes[i] = uint(q.x | q.y << 8 | q.z << 16 | q.w << 24);
    }
    return amax / 127.0;
}
