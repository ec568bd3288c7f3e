// Sums and maxima over the workgroup, the same bits every run. WG is the workgroup's size, a power of two;
// SUBGROUPS says whether subgroup arithmetic may be used (`reduce_defines` in Rust sets both).
#if SUBGROUPS
#extension GL_KHR_shader_subgroup_arithmetic : require
#endif

shared float reduce_space[WG];

#if SUBGROUPS
// One partial result per subgroup, combined by every subgroup in the same way: at once, if it has as many threads.
#define WG_REDUCE(NAME, SUBGROUP_OP, COMBINE, NEUTRAL)                         \
    float NAME(float x) {                                                      \
        x = SUBGROUP_OP(x);                                                    \
        barrier();                                                             \
        if (subgroupElect()) reduce_space[gl_SubgroupID] = x;                  \
        barrier();                                                             \
        if (gl_NumSubgroups <= gl_SubgroupSize)                                \
            return SUBGROUP_OP(gl_SubgroupInvocationID < gl_NumSubgroups ? reduce_space[gl_SubgroupInvocationID] : NEUTRAL); \
        x = reduce_space[0];                                                   \
        for (uint i = 1; i < gl_NumSubgroups; i++) x = COMBINE(x, reduce_space[i]); \
        return x;                                                              \
    }
#else
#define WG_REDUCE(NAME, SUBGROUP_OP, COMBINE, NEUTRAL)                         \
    float NAME(float x) {                                                      \
        uint t = gl_LocalInvocationID.x;                                       \
        barrier();                                                             \
        reduce_space[t] = x;                                                   \
        barrier();                                                             \
        for (uint s = WG / 2; s > 0; s >>= 1) {                                \
            if (t < s) reduce_space[t] = COMBINE(reduce_space[t], reduce_space[t + s]); \
            barrier();                                                         \
        }                                                                      \
        return reduce_space[0];                                                \
    }
#endif

float plus(float a, float b) { return a + b; }

// Both must be called by every thread of the workgroup; all get the result.
WG_REDUCE(wg_sum, subgroupAdd, plus, 0.0)
WG_REDUCE(wg_max, subgroupMax, max, uintBitsToFloat(0xff800000u))
