// argsort: dst = indices of each row of x in order, equal elements by index. First pass: sorts TILE elements each.
// x: [cols, rows...], any strides. One workgroup of WG threads per tile. A row of one tile goes to dst, of which the
// first `keep` indices are kept; tiles of longer rows go to scratch as pairs (key, index) for merge.comp.
#version 450
#include "kiln.glsl"
#include "order.glsl"
#include "row_start.glsl"
#include "sort.glsl"

layout(local_size_x = WG) in;

void main() {
    uint group = group_index();
    if (group >= p.groups) return;
    uint row = group / p.groups_per_row;
    uint first = group % p.groups_per_row * TILE;

    uvec2 x = row_start(p.x, row, p.outer, p.x_stride);
    for (uint t = gl_LocalInvocationID.x; t < TILE; t += WG) {
        uint i = first + t;
        tile[t] = i < p.cols ? uvec2(order_key(U32(x).v[i * p.x_stride[0]]) ^ p.flip, i) : NOTHING;
    }
    sort_tile();

    uvec2 to = row_address(p.to, row, p.cols * 8);
    uvec2 dst = row_start(p.dst, row, p.outer, p.dst_stride);
    for (uint t = gl_LocalInvocationID.x; t < TILE; t += WG) {
        if (p.groups_per_row > 1) {
            if (first + t < p.cols) U32x2(to).v[first + t] = tile[t];
        } else if (t < p.keep) {
            U32(dst).v[t * p.dst_stride[0]] = tile[t].y;
        }
    }
}
