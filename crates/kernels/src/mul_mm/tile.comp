// mul_mm in plain arithmetic: d[m, n] = scale * sum_k a[k, m] * b[k, n] (+ bias[m]) (+ residual[m, n])
// a: rows of any format; b: F32, F16 or BF16; d: F32 or F16; rows of any alignment that the formats take.
// WG threads compute TILE_M x TILE_N, each THREAD_M x THREAD_N in fours, from tiles of DEPTH elements of k in shared
// memory: k outermost, so that a thread reads four rows or four activations at once. While a tile is multiplied, the next one is
// on its way in registers; products no deeper than a tile wait once. Sums are f32, over k in order, whatever the tile.
// With SPLIT, workgroups that share a tile leave their sums in p.partials, and sums.comp makes the results of them.
#version 450
#include "kiln.glsl"

#define THREADS_M (TILE_M / THREAD_M)
#define WG (THREADS_M * (TILE_N / THREAD_N))
layout(local_size_x = WG) in;
#include "formats.glsl"
#include "mul_mm/place.glsl"
#if SPLIT
#include "mul_mm/partials.glsl"
#endif

// Neighbouring threads load neighbouring fours of k of a row, so that a row comes in whole lines of memory.
#define FOURS (DEPTH / 4)
#define PER_A (TILE_M * FOURS / WG)
#define PER_B (TILE_N * FOURS / WG)
#define LINE_A (TILE_M / 4)
#define LINE_B (TILE_N / 4)
shared vec4 tile_of_a[DEPTH * LINE_A];
shared vec4 tile_of_b[DEPTH * LINE_B];

uvec2 row_a[PER_A], row_b[PER_B];
vec4 next_a[PER_A], next_b[PER_B];

// Lines of shared memory are as long as its banks are many, and threads store down the lines: each four of k has its
// vectors in another order, so that all threads of a subgroup store to different banks.
uint turned(uint vector, uint four) { return vector ^ (DEPTH == 16 ? 2 * four : four % 8); }

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

// This thread's four of k, and the first of its rows and columns; the others are WG / FOURS apart.
uint my_four() { return gl_LocalInvocationID.x % FOURS; }
uint my_line(uint i) { return gl_LocalInvocationID.x / FOURS + i * (WG / FOURS); }

void fetch(uint k) {
    uint e = k + 4 * my_four();
    [[unroll]] for (uint i = 0; i < PER_A; i++) next_a[i] = four_of_a(row_a[i], e);
    [[unroll]] for (uint i = 0; i < PER_B; i++) next_b[i] = four_of_b(row_b[i], e);
}

void put() {
    uint four = my_four();
    [[unroll]] for (uint i = 0; i < PER_A; i++) {
        uint line = my_line(i), at = 4 * four * LINE_A + turned(line / 4, four);
        [[unroll]] for (uint j = 0; j < 4; j++) tile_of_a[at + j * LINE_A][line % 4] = next_a[i][j];
    }
    [[unroll]] for (uint i = 0; i < PER_B; i++) {
        uint line = my_line(i), at = 4 * four * LINE_B + turned(line / 4, four);
        [[unroll]] for (uint j = 0; j < 4; j++) tile_of_b[at + j * LINE_B][line % 4] = next_b[i][j];
    }
}

void main() {
    A_INIT();
    if (!find_tile()) return;
    [[unroll]] for (uint i = 0; i < PER_A; i++) row_a[i] = row_of_a(first_m + my_line(i));
    [[unroll]] for (uint i = 0; i < PER_B; i++) row_b[i] = column_of_b(first_n + my_line(i));
    // Computing: the fours of rows number tm, THREADS_M + tm .., and the fours of activations number tn ..
    uint tm = gl_LocalInvocationID.x % THREADS_M, tn = gl_LocalInvocationID.x / THREADS_M * (THREAD_N / 4);
    vec4 sum[THREAD_N][THREAD_M / 4];
    [[unroll]] for (uint n = 0; n < THREAD_N; n++)
        [[unroll]] for (uint m = 0; m < THREAD_M / 4; m++) sum[n][m] = vec4(0);

    uint k = BEGIN_K, end_k = END_K;
    fetch(k);
    while (true) {
        put();
        barrier();
        k += DEPTH;
        bool more = k < end_k;
        if (more) fetch(k);
        for (uint start = 0; start < DEPTH; start += 16) {
            [[unroll]] for (uint i = 0; i < 16; i++) {
                uint e = start + i, four = start / 4 + i / 4;
                vec4 a[THREAD_M / 4], b[THREAD_N / 4];
                [[unroll]] for (uint m = 0; m < THREAD_M / 4; m++)
                    a[m] = tile_of_a[e * LINE_A + turned(m * THREADS_M + tm, four)];
                [[unroll]] for (uint n = 0; n < THREAD_N / 4; n++)
                    b[n] = tile_of_b[e * LINE_B + turned(tn + n, four)];
                [[unroll]] for (uint n = 0; n < THREAD_N; n++)
                    [[unroll]] for (uint m = 0; m < THREAD_M / 4; m++)
                        sum[n][m] = fma(a[m], vec4(b[n / 4][n % 4]), sum[n][m]);
            }
        }
        if (!more) break;
        barrier();
    }
    [[unroll]] for (uint m = 0; m < THREAD_M / 4; m++) {
        uint row = first_m + 4 * (m * THREADS_M + tm);
        if (row >= p.m) continue;
#if !SPLIT
        vec4 bias = bias_from(row);
#endif
        [[unroll]] for (uint n = 0; n < THREAD_N; n++) {
            uint at = first_n + 4 * tn + n;
            if (at >= end_n) continue;
#if SPLIT
            Partials(partials_of(tile_split, at)).v[row / 4] = sum[n][m];
#else
            put_four(sum[n][m], bias, row, at);
#endif
        }
    }
}
