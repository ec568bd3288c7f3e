// wkv6 and gla in chunks on matrix units, first launch: the counter of workgroups and the marks of chunks become zero.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;

void main() {
    uint at = group_index() * WG + gl_LocalInvocationID.x;
    if (at <= p.chunks * p.heads) U32(p.marks).v[at] = 0;
}
