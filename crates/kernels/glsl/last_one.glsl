// Results that workgroups of one launch exchange through `coherent` buffers, and which workgroup may read them.
// Shaders with matrices live under the Vulkan memory model (they define MEMORY_MODEL): there each step names the memory it
// orders and for whom, and a barrier of a workgroup says nothing about buffers unless told to.
#if defined(MEMORY_MODEL)
#include_again "release.glsl"
#else
layout(buffer_reference, std430, buffer_reference_align = 4) coherent buffer Counter { uint v[]; };
void meet() {
    memoryBarrierBuffer();
    barrier();
    memoryBarrierBuffer();
}
uint count_one(uvec2 counter) { return atomicAdd(Counter(counter).v[0], 1); }
#endif

shared bool last_one_flag;

// Whether this is the last of `n` workgroups to come here: then what all of them wrote may be read. The counter is zero
// before, and zero again after the last one for the next launch.
bool is_last_of(uvec2 counter, uint n) {
    meet();
    if (gl_LocalInvocationIndex == 0) {
        last_one_flag = count_one(counter) + 1 == n;
        if (last_one_flag) Counter(counter).v[0] = 0;
    }
    meet();
    return last_one_flag;
}
