// The last of the workgroups that share a tile adds up the sums that all of them left, in the order of k, and stores the results. Needs
// last_one.glsl, finish.glsl and what those need.
#define SAME_LAUNCH 1
#include "mul_mm/partials.glsl"

// Vectors of sums that a thread adds up at once.
#define FOURS (TILE_M / 4 * TILE_N % (4 * WG) == 0 ? 4 : TILE_M / 4 * TILE_N % (2 * WG) == 0 ? 2 : 1)

void add_partials() {
    for (uint first = gl_LocalInvocationIndex; first < TILE_M / 4 * TILE_N; first += FOURS * WG) {
        vec4 sums[FOURS];
        [[unroll]] for (uint i = 0; i < FOURS; i++) sums[i] = vec4(0);
        // All loads of a round at once; sums past the end are those of the last row and column, and not stored.
        for (uint from = 0; from < SPLITS; from += 4) {
            vec4 got[FOURS][4];
            [[unroll]] for (uint i = 0; i < FOURS; i++) {
                uint at = first + i * WG, column = min(first_n + at / (TILE_M / 4), end_n - 1);
                uint four = partial_four(min(first_m + at % (TILE_M / 4) * 4, p.m - 1));
                [[unroll]] for (uint j = 0; j < 4; j++) got[i][j] = Partials(partials_of(min(from + j, SPLITS - 1), column)).v[four];
            }
            [[unroll]] for (uint i = 0; i < FOURS; i++)
                [[unroll]] for (uint j = 0; j < 4; j++) if (from + j < SPLITS) sums[i] += got[i][j];
        }
        [[unroll]] for (uint i = 0; i < FOURS; i++) {
            uint at = first + i * WG, row = at % (TILE_M / 4) * 4, column = at / (TILE_M / 4);
            if (first_m + row < p.m && first_n + column < end_n) put_four(sums[i], row, column);
        }
    }
}
