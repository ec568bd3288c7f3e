// The end of a product that tile.comp split over k: d[m, n] = scale * sum of partial sums (+ bias[m]) (+ residual[m, n])
// p.partials: p.splits sums for every element of d (partials.glsl), added in the order of k; d: F32 or F16.
// The p.splits workgroups of a tile share its elements, four for a thread: a launch of its own, because the last of
// those that multiply would add alone what all of them can add together, and needs counters that a launch sets to zero.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "mul_mm/place.glsl"
#include "mul_mm/partials.glsl"

void main() {
    if (!find_tile()) return;
    for (uint at = tile_split * WG + gl_LocalInvocationID.x; at < TILE_M / 4 * TILE_N; at += p.splits * WG) {
        uint m = first_m + at % (TILE_M / 4) * 4, n = first_n + at / (TILE_M / 4);
        if (m < p.m && n < end_n) put_four(sum_of_partials(m, n), bias_from(m), m, n);
    }
}
