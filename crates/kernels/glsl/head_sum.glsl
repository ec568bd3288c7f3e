// Sums over heads of S elements: S / 4 neighbouring threads of a workgroup of WG for each head, four elements a thread. They
// add up through shared memory: heads are short, and no subgroup needs to fit them. Needs `quads.glsl`.

#define HEAD_LANES (S / 4)

shared vec4 head_space[WG];

// The sum over the threads of a head, `tid` the thread's number. All threads of the workgroup must come here.
vec4 sum_of_head(vec4 x, uint tid) {
    barrier();
    head_space[tid] = x;
    barrier();
    precise vec4 sum = vec4(0);
    [[unroll]] for (uint n = 0; n < HEAD_LANES; n++) sum += head_space[tid / HEAD_LANES * HEAD_LANES + n];
    return sum;
}
