// The end of a product that tile.comp split over k: d[m, n] = scale * sum of partial sums (+ bias[m]) (+ residual[m, n])
// p.partials: p.splits sums for every element of d (partials.glsl), added in the order of k; d: F32 or F16.
// The p.splits workgroups of a tile share its elements, four for a thread: a launch of its own, because the last of
// those that multiply would add alone what all of them can add together, and needs counters that a launch sets to zero.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "mul_mm/place.glsl"
#include "mul_mm/partials.glsl"

// Four rows of activation vector n from m on: summed in the order of k, whichever workgroup finishes first.
vec4 sum_of_partials(uint m, uint n) {
    vec4 sums = vec4(0);
    for (uint from = 0; from < p.splits; from += 8) {
        // Loads first, so that all are on their way at once.
        vec4 got[8];
        [[unroll]] for (uint i = 0; i < 8; i++) got[i] = Partials(partials_of(min(from + i, p.splits - 1), n)).v[m / 4];
        [[unroll]] for (uint i = 0; i < 8; i++) if (from + i < p.splits) sums += got[i];
    }
    return sums;
}

void main() {
    if (!find_tile()) return;
    for (uint at = tile_split * WG + gl_LocalInvocationID.x; at < TILE_M / 4 * TILE_N; at += p.splits * WG) {
        uint m = first_m + at % (TILE_M / 4) * 4, n = first_n + at / (TILE_M / 4);
        if (m < p.m && n < end_n) put_four(sum_of_partials(m, n), bias_from(m), m, n);
    }
}
