// Reads memory as fast as it comes: each thread has LOADS vectors of 16 bytes in flight, each workgroup one stretch of
// WG * LOADS * 16 bytes. The sum is stored only if it has a value it never has, so that the reads cannot be left out.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;

void main() {
    uint group = group_index();
    if (group >= p.groups) return;
    uvec2 x = row_address(p.x, group, WG * LOADS * 16u);
    uvec4 part[LOADS];
    [[unroll]] for (uint i = 0; i < LOADS; i++) part[i] = U32x4(x).v[gl_LocalInvocationID.x + i * WG];
    uvec4 sum = part[0];
    [[unroll]] for (uint i = 1; i < LOADS; i++) sum ^= part[i];
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == p.never) U32(p.sink).v[0] = sum.x;
}
