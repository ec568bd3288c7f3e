// copy where the elements of a row of dst lie rows apart in src, whose dimension 1 is dense: a transposition.
// One workgroup of 32 x ROWS threads moves a tile of 32 x 32 elements through shared memory, so that both reading and
// writing are in the order of memory. Elements are converted on the way as `copy` does.
#version 450
#define WG (32 * ROWS)
#define VEC 1
#define OWN_MAIN
#include "kiln.glsl"
#include "elementwise.glsl"

// A column more than a tile has, so that neither direction hits one bank of shared memory again and again.
shared VALUE tile[32][33];

void main() {
    uvec4 tiles = uvec4((p.shape[0] + 31) / 32, (p.shape[1] + 31) / 32, p.shape[2], p.shape[3]);
    uint group = group_index();
    if (group >= p.groups) return;
    uvec4 at = unravel(group, uint[4](tiles.x, tiles.y, tiles.z, tiles.w));
    uint x = gl_LocalInvocationID.x % 32;
    uint y = gl_LocalInvocationID.x / 32;
    uint first0 = at.x * 32, first1 = at.y * 32;
    for (uint j = y; j < 32; j += ROWS) {
        uvec4 from = uvec4(first0 + j, first1 + x, at.zw);
        if (from.x < p.shape[0] && from.y < p.shape[1]) {
            tile[j][x] = LOAD_S(element(p.src, ravel(from, p.src_stride), SHIFT_S));
        }
    }
    barrier();
    for (uint j = y; j < 32; j += ROWS) {
        uvec4 to = uvec4(first0 + x, first1 + j, at.zw);
        if (to.x < p.shape[0] && to.y < p.shape[1]) {
            STORE_D(element(p.dst, ravel(to, p.dst_stride), SHIFT_D), tile[x][j]);
        }
    }
}
