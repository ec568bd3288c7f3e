// Copies memory: each thread moves LOADS vectors of 16 bytes, each workgroup one stretch of WG * LOADS * 16 bytes.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;

void main() {
    uint group = group_index();
    if (group >= p.groups) return;
    uvec2 x = row_address(p.x, group, WG * LOADS * 16u);
    uvec2 y = row_address(p.y, group, WG * LOADS * 16u);
    uvec4 part[LOADS];
    [[unroll]] for (uint i = 0; i < LOADS; i++) part[i] = U32x4(x).v[gl_LocalInvocationID.x + i * WG];
    [[unroll]] for (uint i = 0; i < LOADS; i++) U32x4(y).v[gl_LocalInvocationID.x + i * WG] = part[i];
}
