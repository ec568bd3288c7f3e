// mul_mm in plain arithmetic: d[m, n] = scale * sum_k a[k, m] * b[k, n] (+ bias[m]) (+ residual[m, n])
// a: rows of any format; b: F32, F16 or BF16; d: F32 or F16; rows of any alignment that the formats take.
// WG = 128 threads compute 64 rows x 64 columns, 8 x 4 each, from tiles of 16 elements of k in shared memory (8.5 KiB).
// Tiles lie with k outermost, so that a thread reads four rows or four columns at once. Sums are f32, over k in order.
#version 450
#include "kiln.glsl"

#define WG 128
layout(local_size_x = WG) in;
#include "formats.glsl"
#define TILE_M 64
#define TILE_N 64
#define DEPTH 16
// In vectors of four; one more than the tile has keeps the threads of a subgroup in different banks.
#define LINE 17
#include "mul_mm/place.glsl"

shared vec4 tile_of_a[DEPTH * LINE];
shared vec4 tile_of_b[DEPTH * LINE];

// Four elements of k from e on; past the end they are zero on both sides, whatever lies there in memory.
vec4 four_of_a(uvec2 row, uint e) {
#if VECTORS_A
    return e < p.k ? A_LOAD4(row, e) : vec4(0);
#else
    vec4 v = vec4(0);
    [[unroll]] for (uint i = 0; i < 4; i++) if (e + i < p.k) v[i] = A_LOAD(row, e + i);
    return v;
#endif
}
vec4 four_of_b(uvec2 row, uint e) {
#if VECTORS_B
    return e < p.k ? B_LOAD4(row, e) : vec4(0);
#else
    vec4 v = vec4(0);
    [[unroll]] for (uint i = 0; i < 4; i++) if (e + i < p.k) v[i] = B_LOAD(row, e + i);
    return v;
#endif
}

void main() {
    A_INIT();
    if (!find_tile()) return;
    uint t = gl_LocalInvocationID.x;
    // Loading: this thread's line of both tiles, and two quarters of its elements of k.
    uint line = t % 64, quarter = t / 64;
    uvec2 row = row_of_a(first_m + line), column = column_of_b(first_n + line);
    // Computing: rows 4 * tm .. and 32 + 4 * tm .., columns 4 * tn ..
    uint tm = t % 8, tn = t / 8;
    vec4 sum[4][2];
    [[unroll]] for (uint n = 0; n < 4; n++) sum[n][0] = sum[n][1] = vec4(0);

    for (uint k = 0; k < p.k; k += DEPTH) {
        [[unroll]] for (uint half_tile = 0; half_tile < 2; half_tile++) {
            uint e = 4 * (quarter + 2 * half_tile);
            vec4 a = four_of_a(row, k + e), b = four_of_b(column, k + e);
            [[unroll]] for (uint i = 0; i < 4; i++) {
                tile_of_a[(e + i) * LINE + line / 4][line % 4] = a[i];
                tile_of_b[(e + i) * LINE + line / 4][line % 4] = b[i];
            }
        }
        barrier();
        [[unroll]] for (uint e = 0; e < DEPTH; e++) {
            vec4 a0 = tile_of_a[e * LINE + tm], a1 = tile_of_a[e * LINE + 8 + tm], b = tile_of_b[e * LINE + tn];
            [[unroll]] for (uint n = 0; n < 4; n++) {
                sum[n][0] = fma(a0, vec4(b[n]), sum[n][0]);
                sum[n][1] = fma(a1, vec4(b[n]), sum[n][1]);
            }
        }
        barrier();
    }
    [[unroll]] for (uint n = 0; n < 4; n++) {
        uint at = first_n + 4 * tn + n;
        if (at >= end_n) continue;
        uvec2 d = column_of_d(at);
        [[unroll]] for (uint i = 0; i < 8; i++) {
            uint m = first_m + 32 * (i / 4) + 4 * tm + i % 4;
            if (m < p.m) STORE_D(d, m, finish(sum[n][i / 4][i % 4], m, at));
        }
    }
}
