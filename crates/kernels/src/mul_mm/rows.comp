// mul_mm, one row of a for each thread: d[m, n] = scale * sum_k a[k, m] * b[k, n] (+ bias[m]) (+ residual[m, n])
// a: rows of any format, at their alignment; b: F32, F16 or BF16 rows that take vectors; d: F32 or F16.
// WG threads take WG neighbouring rows of a and TILE_N columns; every column is the same for all threads, and nothing is
// shared and nothing waits. Made for software GPUs: there a load that is the same for all threads is one plain load, a
// value for all threads is a register, and caches do what shared memory does elsewhere. Each sum runs over k in order.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "formats.glsl"
#define TILE_M WG
#include "mul_mm/place.glsl"

void main() {
    A_INIT();
    if (!find_tile()) return;
    uint m = first_m + gl_LocalInvocationID.x;
    uvec2 row = row_of_a(m);
    uvec2 column[TILE_N];
    float sum[TILE_N];
    [[unroll]] for (uint n = 0; n < TILE_N; n++) {
        column[n] = column_of_b(first_n + n);
        sum[n] = 0;
    }
#if A_BLOCKS
    for (uint e = 0; e < p.k; e += 32) {
        uint codes[8];
        vec2 lo, hi;
        A_GROUP32(row, e, codes, lo, hi);
        [[unroll]] for (uint i = 0; i < 8; i++) {
            vec2 s = i < 4 ? lo : hi;
            vec4 a = signed_bytes(codes[i]) * s.x;
#if A_SHIFTED
            a += s.y;
#endif
#else
    uint whole = p.k & ~3u;
    for (uint e = 0; e < whole; e += 4) {
        {
            const uint i = 0;
            vec4 a = A_LOAD4(row, e);
#endif
            [[unroll]] for (uint n = 0; n < TILE_N; n++) {
                vec4 b = B_LOAD4(column[n], e + 4 * i);
                sum[n] = fma(a.x, b.x, sum[n]);
                sum[n] = fma(a.y, b.y, sum[n]);
                sum[n] = fma(a.z, b.z, sum[n]);
                sum[n] = fma(a.w, b.w, sum[n]);
            }
        }
    }
#if !A_BLOCKS
    for (uint e = whole; e < p.k; e++) {
        float a = A_LOAD(row, e);
        [[unroll]] for (uint n = 0; n < TILE_N; n++) sum[n] = fma(a, B_LOAD(column[n], e), sum[n]);
    }
#endif
    if (m >= p.m) return;
    [[unroll]] for (uint n = 0; n < TILE_N; n++) {
        uint at = first_n + n;
        if (at < end_n) STORE_D(column_of_d(at), m, finish(sum[n], m, at));
    }
}
