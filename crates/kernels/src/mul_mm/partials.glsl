// Sums over parts of k that workgroups sharing a tile leave behind, and how they are added: for each of p.splits all
// columns, with all rows of a rounded up to whole vectors. SAME_LAUNCH: who adds them runs beside those who left them.
#if SAME_LAUNCH
layout(buffer_reference, std430, buffer_reference_align = 16) coherent buffer Partials { vec4 v[]; };
#else
layout(buffer_reference, std430, buffer_reference_align = 16) buffer Partials { vec4 v[]; };
#endif

uvec2 partials_of(uint split, uint n) { return row_address(p.partials, split * p.n + n, (p.m + 3) / 4 * 16); }

// Four rows of column n from m on: in the order of k, whoever comes first.
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
