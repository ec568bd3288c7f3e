// Dependent launches (DEPENDENT_LAUNCH): kernels wait for the previous dispatch by a counter instead of a barrier. Every workgroup
// increments the counter of its dispatch when it ends. Workgroups of the next dispatch run already, have loaded what depends on
// no one (weights), and continue when the previous counter has reached `wait_for`. All earlier writes are visible then, because each
// dispatch waited for the one before it.
// A kernel calls `grid_wait` once, before it touches memory that earlier dispatches write or may still read. Kernels without
// GRID_WAIT_LATE wait at their start.
#ifdef DEPENDENT_LAUNCH
#extension GL_KHR_memory_scope_semantics : require

#include_again "release.glsl"
// Looks at a counter after which something must be wrong, about a second; between two looks whether another gave up.
#define GRID_WAIT_PATIENCE 1048576u
#define GRID_WAIT_LOOKS 1024u

void grid_wait() {
    if (p.wait_for > 0) {
        if (gl_LocalInvocationIndex == 0) {
            uvec2 before = offset(p.grid_counters, p.signal_at - 128);
            uint looks = 0;
            while (look(before) < p.wait_for) {
                looks++;
                if (looks % GRID_WAIT_LOOKS != 0) continue;
                bool given_up = look(p.grid_counters) != 0;
                if (!given_up && looks < GRID_WAIT_PATIENCE) continue;
                raise(p.grid_counters);
                break;
            }
            acquire(before);
        }
        meet();
    }
}

void grid_signal() {
    meet();
    if (gl_LocalInvocationIndex == 0) count_one(offset(p.grid_counters, p.signal_at));
}

// What the file calls `main` runs between the two.
void kernel_main();
void main() {
#ifndef GRID_WAIT_LATE
    grid_wait();
#endif
    kernel_main();
    grid_signal();
}
#define main kernel_main
#else
void grid_wait() {}
#endif
