// argsort, later passes: merges neighbouring runs of `run` sorted pairs into runs of twice the length.
// One thread per pair: its place in the merged run is its place in its own run plus the number of pairs of the other
// run that come before it, found by bisection. All pairs of a row differ, so no two get the same place.
#version 450
#include "kiln.glsl"
#include "row_start.glsl"

layout(local_size_x = WG) in;

bool before(uvec2 a, uvec2 b) { return a.x < b.x || (a.x == b.x && a.y < b.y); }

void main() {
    uint group = group_index();
    if (group >= p.groups) return;
    uint row = group / p.groups_per_row;
    uint i = group % p.groups_per_row * WG + gl_LocalInvocationID.x;
    if (i >= p.cols) return;

    U32x2 from = U32x2(row_address(p.from, row, p.cols * 8));
    uvec2 mine = from.v[i];
    uint own = i / p.run;
    uint other_start = min((own ^ 1) * p.run, p.cols);
    uint low = other_start;
    uint high = min(other_start + p.run, p.cols);
    while (low < high) {
        uint middle = (low + high) / 2;
        if (before(from.v[middle], mine)) low = middle + 1;
        else high = middle;
    }
    uint place = (own & ~1u) * p.run + i % p.run + (low - other_start);

    if (p.last == 0) {
        U32x2(row_address(p.to, row, p.cols * 8)).v[place] = mine;
    } else if (place < p.keep) {
        U32(row_start(p.dst, row, p.outer, p.dst_stride)).v[place * p.dst_stride[0]] = mine.y;
    }
}
