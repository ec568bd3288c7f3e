// Kernels that wait for those before them by themselves (HANDOVER), not by a barrier between dispatches. Every workgroup of a
// dispatch adds one to a counter at its end, whatever it did; those of the next dispatch are there by then, have loaded what
// depends on nobody, and go on when the counter before has reached `hand_from`. What was written before is visible then, and
// all that came before that: each waited for the one before.
// A kernel calls `await_inputs` once, before it touches what others have written or may still read; unless it does
// (HANDOVER_LATE), it is done for it at the start.
#ifdef HANDOVER
#extension GL_KHR_memory_scope_semantics : require

layout(buffer_reference, std430, buffer_reference_align = 4) buffer HandCounter { uint v[]; };
#define HAND_BOTH_WAYS (gl_SemanticsAcquireRelease | gl_SemanticsMakeAvailable | gl_SemanticsMakeVisible)
// Looks at a counter after which something must be wrong, about a second; between two looks whether another gave up.
#define HAND_PATIENCE 1048576u
#define HAND_LOOKS 1024u

void await_inputs() {
    if (p.hand_from > 0) {
        if (gl_LocalInvocationIndex == 0) {
            HandCounter before = HandCounter(offset(p.hand, p.hand_at - 128)), mark = HandCounter(p.hand);
            uint looks = 0;
            while (atomicLoad(before.v[0], gl_ScopeQueueFamily, 0, 0) < p.hand_from) {
                looks++;
                if (looks % HAND_LOOKS != 0) continue;
                bool given_up = atomicLoad(mark.v[0], gl_ScopeQueueFamily, 0, 0) != 0;
                if (!given_up && looks < HAND_PATIENCE) continue;
                atomicStore(mark.v[0], 1u, gl_ScopeQueueFamily, 0, 0);
                break;
            }
            atomicLoad(before.v[0], gl_ScopeQueueFamily, gl_StorageSemanticsBuffer, gl_SemanticsAcquire | gl_SemanticsMakeVisible);
        }
        controlBarrier(gl_ScopeWorkgroup, gl_ScopeWorkgroup, gl_StorageSemanticsBuffer, HAND_BOTH_WAYS);
    }
}

void hand_on() {
    controlBarrier(gl_ScopeWorkgroup, gl_ScopeWorkgroup, gl_StorageSemanticsBuffer, HAND_BOTH_WAYS);
    if (gl_LocalInvocationIndex == 0) {
        HandCounter mine = HandCounter(offset(p.hand, p.hand_at));
        atomicAdd(mine.v[0], 1u, gl_ScopeQueueFamily, gl_StorageSemanticsBuffer, HAND_BOTH_WAYS);
    }
}

// What the file calls `main` runs between the two.
void kernel_main();
void main() {
#ifndef HANDOVER_LATE
    await_inputs();
#endif
    kernel_main();
    hand_on();
}
#define main kernel_main
#else
void await_inputs() {}
#endif
