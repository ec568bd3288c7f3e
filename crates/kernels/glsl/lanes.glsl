// Sums over LANES neighbouring threads, LANES a power of two; every one of them gets the sum. SHUFFLE says whether
// subgroups exchange values (full subgroups are asked for then), else shared memory does.
#if SHUFFLE
#extension GL_KHR_shader_subgroup_shuffle : require

// Numbers the threads so that those of a subgroup follow each other.
uint thread_number() { return gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID; }

// Must be called by every thread of the LANES.
float lane_sum(float x) {
    [[unroll]] for (uint mask = 1; mask < LANES; mask <<= 1) x += subgroupShuffleXor(x, mask);
    return x;
}
#elif LANES == 1
uint thread_number() { return gl_LocalInvocationID.x; }

float lane_sum(float x) { return x; }
#else
shared float lane_space[WG];

uint thread_number() { return gl_LocalInvocationID.x; }

// Must be called by every thread of the workgroup.
float lane_sum(float x) {
    uint t = gl_LocalInvocationID.x;
    barrier();
    lane_space[t] = x;
    barrier();
    float sum[LANES];
    [[unroll]] for (uint i = 0; i < LANES; i++) sum[i] = lane_space[(t & ~uint(LANES - 1)) + i];
    // The order of additions is that of the subgroups.
    [[unroll]] for (uint step = 1; step < LANES; step <<= 1) {
        [[unroll]] for (uint i = 0; i < LANES; i += 2 * step) sum[i] += sum[i + step];
    }
    return sum[0];
}
#endif
