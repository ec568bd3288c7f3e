// Kernels that sum over heads: [S, heads, tokens], S / 4 threads for each head, four elements a thread. They add up through
// shared memory: heads are short, and no subgroup needs to fit them.

layout(local_size_x = WG) in;

#define LANES (S / 4)

shared vec4 share[WG];
// The number of the thread's head, its four elements in it, and the same four among the channels of all heads.
uint row, lane, channel;

// The thread's four elements of a tensor.
#define QUAD(BASE) F32x4(row_address(BASE, row, S * 4)).v[lane]
#define CHANNEL(BASE) F32x4(BASE).v[channel]

// Finds the thread's head; false where there is none.
bool find_head() {
    uint tid = gl_LocalInvocationID.x;
    lane = tid % LANES;
    row = group_index() * (WG / LANES) + tid / LANES;
    channel = row % p.heads * LANES + lane;
    return row < p.rows;
}

float sum4(vec4 x) { return (x.x + x.y) + (x.z + x.w); }

// The sum over the threads of a head. All threads of the workgroup must come here.
vec4 sum_of_head(vec4 x) {
    uint tid = gl_LocalInvocationID.x;
    barrier();
    share[tid] = x;
    barrier();
    vec4 sum = vec4(0);
    [[unroll]] for (uint n = 0; n < LANES; n++) sum += share[tid / LANES * LANES + n];
    return sum;
}
