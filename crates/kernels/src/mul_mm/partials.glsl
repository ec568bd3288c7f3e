// Sums over parts of k that workgroups sharing a tile leave behind: for each of p.splits all activations, with all rows of a
// rounded up to whole vectors. SAME_LAUNCH: the workgroup that adds them runs in the same launch.
#if SAME_LAUNCH
layout(buffer_reference, std430, buffer_reference_align = 16) coherent buffer Partials { vec4 v[]; };
#else
layout(buffer_reference, std430, buffer_reference_align = 16) buffer Partials { vec4 v[]; };
#endif

uvec2 partials_of(uint split, uint n) { return row_address(p.partials, split * p.n + n, (p.m + 3) / 4 * 16); }
