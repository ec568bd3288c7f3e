// How a workgroup hands what its threads wrote to other workgroups, under the Vulkan memory model: in two steps, each with the narrowest
// scope that will do.
// 1. All threads meet at a barrier that makes their writes available to the workgroup (`meet`).
// 2. One thread releases by an atomic that makes them available to the queue family (`count_one`, `raise`).
// Step 2 covers the writes of all threads: availability operations to growing scopes, each performed inside the scope before and
// after it, are a chain whose source is that of the first ("Availability and Visibility" in Vulkan's memory model). A barrier of queue-family scope
// would make every thread wait for memory where one is enough.
// The way back is the same chain with shrinking scopes: one thread acquires from the queue family (`acquire`, `count_one`), and `meet` makes
// what it acquired visible to the others.
// Included again where it is needed: the first place that names it may be one that is left out.
#ifndef RELEASE_GLSL
#define RELEASE_GLSL
#define BOTH_WAYS (gl_SemanticsAcquireRelease | gl_SemanticsMakeAvailable | gl_SemanticsMakeVisible)
#define HANDED_OVER (gl_StorageSemanticsBuffer | gl_StorageSemanticsShared)

layout(buffer_reference, std430, buffer_reference_align = 4) coherent buffer Counter { uint v[]; };

void meet() { controlBarrier(gl_ScopeWorkgroup, gl_ScopeWorkgroup, HANDED_OVER, BOTH_WAYS); }

// Adds one for the workgroup and gives the number before.
uint count_one(uvec2 counter) {
    return atomicAdd(Counter(counter).v[0], 1u, gl_ScopeQueueFamily, gl_StorageSemanticsBuffer, BOTH_WAYS);
}

void raise(uvec2 mark) {
    atomicStore(Counter(mark).v[0], 1u, gl_ScopeQueueFamily, gl_StorageSemanticsBuffer, gl_SemanticsRelease | gl_SemanticsMakeAvailable);
}

// The value of a counter. A relaxed load: a waiting workgroup polls it and acquires once at the end.
uint look(uvec2 counter) { return atomicLoad(Counter(counter).v[0], gl_ScopeQueueFamily, 0, 0); }

uint acquire(uvec2 counter) {
    return atomicLoad(Counter(counter).v[0], gl_ScopeQueueFamily, gl_StorageSemanticsBuffer, gl_SemanticsAcquire | gl_SemanticsMakeVisible);
}
#endif
