// dequantise: dst = the values of src. src: any format, rows of whole blocks; dst: F32 or F16, dense rows.
// Each thread takes PER units of UNIT (32, 4 or 1) neighbouring elements of a row. FLAT: both tensors are without gaps and
// count as one row, so that no thread divides by extents: five divisions are more work than the values themselves.
// STAGED (flat, 32 to a unit, F16): a thread decodes a whole group, with one scale and the fewest loads, but hands its 64
// bytes over in shared memory, so that what is stored at once lies side by side and fills whole lines.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "formats.glsl"
#include "block_values.glsl"

#if STAGED
shared uvec4 staged[4 * WG];
// Where quarter j of unit u of a workgroup lies: neighbours write and read in different banks.
uint place(uint u, uint j) { return 4 * u + (j ^ ((u / 2) & 3u)); }

uvec2 halves(vec4 v) { return uvec2(packHalf2x16(v.xy), packHalf2x16(v.zw)); }

void main() {
    A_INIT();
    uint t = gl_LocalInvocationID.x;
    for (uint k = 0; k < PER; k++) {
        // The first unit of the workgroup: past the end for all threads or for none.
        uint first = (group_index() * PER + k) * WG;
        if (first >= p.units) return;
        if (first + t < p.units) {
            uint codes[8];
            vec2 lo, hi;
            A_GROUP32(p.src, 32 * (first + t), codes, lo, hi);
            [[unroll]] for (uint j = 0; j < 4; j++) {
                vec2 s = j < 2 ? lo : hi;
                staged[place(t, j)] =
                    uvec4(halves(four_values(codes[2 * j], s)), halves(four_values(codes[2 * j + 1], s)));
            }
        }
        barrier();
        [[unroll]] for (uint i = 0; i < 4; i++) {
            uint piece = i * WG + t;
            if (first + piece / 4 < p.units) U32x4(p.dst).v[4 * first + piece] = staged[place(piece / 4, piece & 3u)];
        }
        if (k + 1 < PER) barrier();
    }
}
#else
void main() {
    A_INIT();
    uint first = group_index() * (WG * PER) + gl_LocalInvocationID.x;
    for (uint k = 0; k < PER; k++) {
        uint unit = first + k * WG;
        if (unit >= p.units) return;
#if FLAT
        put_values(p.src, unit * UNIT, p.dst);
#else
        uint row = unit / p.row_units;
        uint e = (unit - row * p.row_units) * UNIT;
        uvec4 at = unravel(row, uint[4](p.shape[0], p.shape[1], p.shape[2], 1));
        put_values(row_of(p.src, at.xyz, p.src_stride), e, row_of(p.dst, at.xyz, p.dst_stride));
#endif
    }
}
#endif
