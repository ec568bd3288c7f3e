// Kernels that sum over heads: [S, heads, tokens], S / 4 threads for each head, four elements a thread.
#include "quads.glsl"
#include "head_sum.glsl"

layout(local_size_x = WG) in;

// The number of the thread's head, its four elements in it, and the same four among the channels of all heads.
uint row, lane, channel;

// The thread's four elements of a tensor.
#define QUAD(BASE) F32x4(row_address(BASE, row, S * 4)).v[lane]
#define CHANNEL(BASE) F32x4(BASE).v[channel]

// Finds the thread's head; false where there is none.
bool find_head() {
    uint tid = gl_LocalInvocationID.x;
    lane = tid % HEAD_LANES;
    row = group_index() * (WG / HEAD_LANES) + tid / HEAD_LANES;
    channel = row % p.heads * HEAD_LANES + lane;
    return row < p.rows;
}
