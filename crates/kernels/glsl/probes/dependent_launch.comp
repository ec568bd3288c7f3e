// One stage of a chain that proves that kernels can wait for each other: each checks the whole column that the stage before
// wrote, COLUMN numbers that must all be its own number, and writes its part of the next one. A stage that starts before the one
// before it has ended, or sees what was there before, finds other numbers.
// column: two columns in turn; errors: wrong numbers found, counted by all.
#version 450
#define GRID_WAIT_LATE 1
#include "kiln.glsl"

layout(local_size_x = WG) in;

void main() {
    grid_wait();
    uint group = group_index(), wrong = 0;
    uvec2 from = row_address(p.column, p.stage % 2, COLUMN * 4), to = row_address(p.column, (p.stage + 1) % 2, COLUMN * 4);
    if (p.stage > 0)
        for (uint i = gl_LocalInvocationID.x; i < COLUMN; i += WG) wrong += U32(from).v[i] == p.stage ? 0 : 1;
    if (wrong > 0) atomicAdd(U32(p.errors).v[0], wrong);
    for (uint i = group * WG + gl_LocalInvocationID.x; i < COLUMN; i += p.groups * WG) U32(to).v[i] = p.stage + 1;
}
