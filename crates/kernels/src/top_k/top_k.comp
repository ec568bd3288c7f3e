// top_k: dst[0..k, i1, i2, i3] = indices of the k largest elements of row (i1, i2, i3) of x, largest first, equal
// elements by index. x: [cols, rows...], any strides. k is at most half a tile of 2048.
// Each pass sorts tiles of TILE elements, one workgroup of WG threads each, and keeps the k best of every tile as pairs
// (key, index), until one tile is left; its k best go to dst. The first pass reads x, later ones the pairs (PAIRS).
#version 450
#include "kiln.glsl"
#include "order.glsl"
#include "row_start.glsl"
#include "sort.glsl"

layout(local_size_x = WG) in;

void main() {
    uint group = group_index();
    if (group >= p.groups) return;
    uint row = group / p.tiles;
    uint number = group % p.tiles;

#if PAIRS
    uvec2 from = row_address(p.from, row, p.count * 8);
#else
    uvec2 from = row_start(p.x, row, p.outer, p.x_stride);
#endif
    for (uint t = gl_LocalInvocationID.x; t < TILE; t += WG) {
        uint i = number * TILE + t;
        uvec2 pair = NOTHING;
        if (i < p.count) {
#if PAIRS
            pair = U32x2(from).v[i];
#else
            pair = uvec2(~order_key(U32(from).v[i * p.x_stride[0]]), i);
#endif
        }
        tile[t] = pair;
    }
    sort_tile();

    uvec2 to = row_address(p.to, row, p.tiles * p.k * 8);
    uvec2 dst = row_start(p.dst, row, p.outer, p.dst_stride);
    for (uint t = gl_LocalInvocationID.x; t < p.k; t += WG) {
        // A tile that is smaller than k hands on what sorts behind everything.
        if (p.tiles > 1) U32x2(to).v[number * p.k + t] = tile[t];
        else U32(dst).v[t * p.dst_stride[0]] = tile[t].y;
    }
}
