// hadamard: blocks of BLOCK elements of each row times H, H[i, j] = (-1)^popcount(i & j) / sqrt(BLOCK), with a sign for each element before
// (BACK 0) or behind (BACK 1). x, y: dense rows, any other strides; y may be x. A workgroup for each block: sums and differences of
// neighbours, then of pairs, and so on, in shared memory.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;

shared float held[BLOCK];

void main() {
    uint block = group_index(), thread = gl_LocalInvocationID.x;
    if (block >= p.blocks) return;
    uint start = block % p.per_row * BLOCK;
    uvec4 at = unravel(block / p.per_row, uint[4](p.shape[0], p.shape[1], p.shape[2], 1));
    uint x0 = at.x * p.x_stride[0] + at.y * p.x_stride[1] + at.z * p.x_stride[2] + start;
    uint y0 = at.x * p.y_stride[0] + at.y * p.y_stride[1] + at.z * p.y_stride[2] + start;
    for (uint i = thread; i < BLOCK; i += WG) {
        float x = F32(p.x).v[x0 + i];
#if SIGNS && !BACK
        x *= F32(p.signs).v[start + i];
#endif
        held[i] = x;
    }
    barrier();
    [[unroll]] for (uint half_width = 1; half_width < BLOCK; half_width *= 2) {
        for (uint pair = thread; pair < BLOCK / 2; pair += WG) {
            uint low = pair / half_width * 2 * half_width + pair % half_width;
            float a = held[low], b = held[low + half_width];
            held[low] = a + b;
            held[low + half_width] = a - b;
        }
        barrier();
    }
    for (uint i = thread; i < BLOCK; i += WG) {
        float y = held[i] * inversesqrt(float(BLOCK));
#if SIGNS && BACK
        y *= F32(p.signs).v[start + i];
#endif
        F32(p.y).v[y0 + i] = y;
    }
}
