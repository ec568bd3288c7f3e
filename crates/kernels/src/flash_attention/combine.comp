// flash_attention, after the splits: adds up their partial results where no split did it itself.
// Grid: (token, head, batch), threads over the elements of a row.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "flash_attention/view.glsl"
#include "flash_attention/combine.glsl"

void main() {
    uint token = gl_WorkGroupID.x, head = gl_WorkGroupID.y, batch = gl_WorkGroupID.z;
    uint row = result_row(token, head, batch);
    for (uint i = gl_LocalInvocationID.x; i < HSV / 4; i += WG) combine(row, head, i, p.splits);
}
