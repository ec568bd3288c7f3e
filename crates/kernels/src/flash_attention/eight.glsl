// Eight elements from element e on, a multiple of 8, of a row of K or V.
#define EIGHT(NAME, LOAD4)                                                     \
    void NAME(uvec2 row, uint e, out vec4 a, out vec4 b) {                     \
        a = LOAD4(row, e);                                                     \
        b = LOAD4(row, e + 4);                                                 \
    }
#define EIGHT_HALVES(NAME)                                                     \
    void NAME(uvec2 row, uint e, out vec4 a, out vec4 b) {                     \
        uvec4 u = U32x4(row).v[e / 8];                                         \
        a = vec4(unpackHalf2x16(u.x), unpackHalf2x16(u.y));                    \
        b = vec4(unpackHalf2x16(u.z), unpackHalf2x16(u.w));                    \
    }
#if K_HALVES
EIGHT_HALVES(load_k8)
#else
EIGHT(load_k8, K_LOAD4)
#endif
#if V_HALVES
EIGHT_HALVES(load_v8)
#else
EIGHT(load_v8, V_LOAD4)
#endif
