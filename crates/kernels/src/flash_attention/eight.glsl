// Eight elements of a row of K or V at once, from element e on, a multiple of 8: load_k8 and load_v8 as floats, half_k8
// and half_v8 as halves. Rows of F16 at multiples of 16 bytes (K_HALVES, V_HALVES) come with one load.

#define EIGHT(NAME, LOAD4)                                                     \
    void NAME(uvec2 row, uint e, out vec4 a, out vec4 b) {                     \
        a = LOAD4(row, e);                                                     \
        b = LOAD4(row, e + 4);                                                 \
    }
#define EIGHT_WIDE(NAME)                                                       \
    void NAME(uvec2 row, uint e, out vec4 a, out vec4 b) {                     \
        uvec4 u = U32x4(row).v[e / 8];                                         \
        a = vec4(unpackHalf2x16(u.x), unpackHalf2x16(u.y));                    \
        b = vec4(unpackHalf2x16(u.z), unpackHalf2x16(u.w));                    \
    }
#if K_HALVES
EIGHT_WIDE(load_k8)
#else
EIGHT(load_k8, K_LOAD4)
#endif
#if V_HALVES
EIGHT_WIDE(load_v8)
#else
EIGHT(load_v8, V_LOAD4)
#endif

#ifdef HALVES
// Nothing becomes infinite on the way to halves.
f16vec4 to_halves(vec4 x) { return f16vec4(clamp(x, -65504.0, 65504.0)); }

#define EIGHT_HALVES(NAME, LOAD)                                               \
    void NAME(uvec2 row, uint e, out f16vec4 a, out f16vec4 b) {               \
        vec4 x, y;                                                             \
        LOAD(row, e, x, y);                                                    \
        a = to_halves(x);                                                      \
        b = to_halves(y);                                                      \
    }
#define EIGHT_HALVES_WIDE(NAME)                                                \
    void NAME(uvec2 row, uint e, out f16vec4 a, out f16vec4 b) {               \
        uvec4 u = U32x4(row).v[e / 8];                                         \
        a = f16vec4(unpackFloat2x16(u.x), unpackFloat2x16(u.y));               \
        b = f16vec4(unpackFloat2x16(u.z), unpackFloat2x16(u.w));               \
    }
#if K_HALVES
EIGHT_HALVES_WIDE(half_k8)
#else
EIGHT_HALVES(half_k8, load_k8)
#endif
#if V_HALVES
EIGHT_HALVES_WIDE(half_v8)
#else
EIGHT_HALVES(half_v8, load_v8)
#endif
#endif
