// Results that workgroups of one launch leave for each other in `coherent` buffers, and who may read them.
// Shaders with matrices live under the Vulkan memory model (they define MEMORY_MODEL): there each step names the memory it
// orders and for whom, and a barrier of a workgroup says nothing about buffers unless told to.
layout(buffer_reference, std430, buffer_reference_align = 4) coherent buffer Counter { uint v[]; };

#if defined(MEMORY_MODEL)
#define BOTH_WAYS (gl_SemanticsAcquireRelease | gl_SemanticsMakeAvailable | gl_SemanticsMakeVisible)
// All threads of the workgroup meet. What any of them wrote before, the others may announce to other workgroups; what was
// announced to one of them, all may read.
void device_barrier() {
    controlBarrier(gl_ScopeWorkgroup, gl_ScopeQueueFamily, gl_StorageSemanticsBuffer | gl_StorageSemanticsShared, BOTH_WAYS);
}
// Adds one, announces what the workgroup wrote before its last `device_barrier`, and gives the number before.
uint announce(uvec2 counter) {
    return atomicAdd(Counter(counter).v[0], 1u, gl_ScopeQueueFamily, gl_StorageSemanticsBuffer, BOTH_WAYS);
}
#else
void device_barrier() {
    memoryBarrierBuffer();
    barrier();
    memoryBarrierBuffer();
}
uint announce(uvec2 counter) { return atomicAdd(Counter(counter).v[0], 1); }
#endif

shared bool last_one_flag;

// Whether this is the last of `n` workgroups to come here: then what all of them wrote may be read. The counter is zero
// before, and zero again after the last one for the next launch.
bool is_last_of(uvec2 counter, uint n) {
    device_barrier();
    if (gl_LocalInvocationIndex == 0) {
        last_one_flag = announce(counter) + 1 == n;
        if (last_one_flag) Counter(counter).v[0] = 0;
    }
    device_barrier();
    return last_one_flag;
}
