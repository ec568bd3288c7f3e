// argmax: dst[0, i1, i2, i3] = index of the largest element of row (i1, i2, i3) of x, the first of equal ones
// x: [cols, rows...], any strides. One workgroup of WG threads per row, each with AHEAD loads in flight.
#version 450
#include "kiln.glsl"
#include "order.glsl"
#include "row_start.glsl"

layout(local_size_x = WG) in;

#define AHEAD 8

// Key and index of the best element so far.
shared uvec2 best[WG];

void main() {
    uint row = group_index();
    if (row >= p.rows) return;
    uvec2 x = row_start(p.x, row, p.outer, p.x_stride);
    uint tid = gl_LocalInvocationID.x;

    // The key of NaN is 0 and never better; a row of nothing else answers 0.
    uvec2 mine = uvec2(0, 0xffffffffu);
    for (uint first = tid; first < p.cols; first += WG * AHEAD) {
        uint bits[AHEAD];
        [[unroll]] for (uint j = 0; j < AHEAD; j++) {
            // Past the end the last element is read again, which changes nothing.
            bits[j] = U32(x).v[min(first + j * WG, p.cols - 1) * p.x_stride[0]];
        }
        [[unroll]] for (uint j = 0; j < AHEAD; j++) {
            uint key = order_key(bits[j]);
            if (key > mine.x) mine = uvec2(key, min(first + j * WG, p.cols - 1));
        }
    }
    best[tid] = mine;
    barrier();
    for (uint half_size = WG / 2; half_size > 0; half_size >>= 1) {
        if (tid < half_size) {
            uvec2 a = best[tid], b = best[tid + half_size];
            if (b.x > a.x || (b.x == a.x && b.y < a.y)) best[tid] = b;
        }
        barrier();
    }
    if (tid == 0) {
        uint index = best[0].y == 0xffffffffu ? 0 : best[0].y;
        I32(row_start(p.dst, row, p.outer, p.dst_stride)).v[0] = int(index);
    }
}
