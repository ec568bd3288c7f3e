// dequantise: dst = the values of src. src: any format, rows of whole blocks; dst: F32 or F16, dense rows.
// Each thread takes PER units of UNIT (32, 4 or 1) neighbouring elements of a row.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "formats.glsl"
#include "block_values.glsl"

void main() {
    A_INIT();
    uint first = group_index() * (WG * PER) + gl_LocalInvocationID.x;
    for (uint k = 0; k < PER; k++) {
        uint unit = first + k * WG;
        if (unit >= p.units) return;
        uint row = unit / p.row_units;
        uint e = (unit - row * p.row_units) * UNIT;
        uvec4 at = unravel(row, uint[4](p.shape[0], p.shape[1], p.shape[2], 1));
        put_values(row_of(p.src, at.xyz, p.src_stride), e, row_of(p.dst, at.xyz, p.dst_stride));
    }
}
