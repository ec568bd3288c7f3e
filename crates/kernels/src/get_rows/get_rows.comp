// get_rows: dst(i0, i10, i11, i12) = the values of row ids(i10, i11, i12) of src in batch (i11, i12).
// src: any format; ids: I32; dst: F32 or F16. Each thread takes PER units of UNIT (4 or 1) elements.
// An id outside of src reads nothing and gives a row of zeros.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "formats.glsl"
#include "block_values.glsl"

void get_unit(uint unit) {
    uint row = unit / p.row_units;
    uint e = (unit - row * p.row_units) * UNIT;
    uvec4 at = unravel(row, uint[4](p.shape[0], p.shape[1], p.shape[2], 1));
    int id = I32(row_of(p.ids, at.xyz, p.ids_stride)).v[0];
    uvec2 dst = row_of(p.dst, at.xyz, p.dst_stride);
    if (uint(id) < p.src_rows) {
        put_values(row_of(p.src, uvec3(id, at.yz), p.src_stride), e, dst);
        return;
    }
#if UNIT == 4
    PUT4_D(dst, e, vec4(0.0));
#else
    STORE_D(dst, e, 0.0);
#endif
}

void main() {
    A_INIT();
    uint first = group_index() * (WG * PER) + gl_LocalInvocationID.x;
    for (uint k = 0; k < PER; k++) {
        if (first + k * WG < p.units) get_unit(first + k * WG);
    }
}
