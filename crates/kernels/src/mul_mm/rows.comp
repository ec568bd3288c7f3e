// mul_mm, ROWS rows of a for each thread: d[m, n] = scale * sum_k a[k, m] * b[k, n] (+ bias[m]) (+ residual[m, n])
// a: rows of any format, at their alignment; b: F32, F16 or BF16 rows that take vectors; d: F32 or F16.
// WG threads take ROWS * WG neighbouring rows of a and TILE_N activations; every activation vector is the same for all threads, and
// nothing is shared and nothing waits. Made for software GPUs: there a load that is the same for all threads is one plain
// load, a value for all threads is a register, and caches do what shared memory does elsewhere. Sums run over k in order.
// Such a GPU runs the body of a loop once more with every thread switched off, and does not skip loads that are the same for all
// threads: places in rows are held below k.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "formats.glsl"
#define TILE_M (ROWS * WG)
#include "mul_mm/place.glsl"

float sum[ROWS][TILE_N];

void multiply(vec4 a[ROWS], uvec2 column[TILE_N], uint e) {
    [[unroll]] for (uint n = 0; n < TILE_N; n++) {
        vec4 b = B_LOAD4(column[n], e);
        [[unroll]] for (uint i = 0; i < 4; i++)
            [[unroll]] for (uint r = 0; r < ROWS; r++) sum[r][n] = fma(a[r][i], b[i], sum[r][n]);
    }
}

void main() {
    A_INIT();
    if (!find_tile()) return;
    uint m = first_m + gl_LocalInvocationID.x;
    uvec2 row[ROWS], column[TILE_N];
    [[unroll]] for (uint r = 0; r < ROWS; r++) row[r] = row_of_a(m + r * WG);
    [[unroll]] for (uint n = 0; n < TILE_N; n++) {
        column[n] = column_of_b(first_n + n);
        [[unroll]] for (uint r = 0; r < ROWS; r++) sum[r][n] = 0;
    }
#if A_BLOCKS
    for (uint next = 0; next < p.k; next += 32) {
        uint e = min(next, p.k - 32);
        uint codes[ROWS][8];
        vec2 lo[ROWS], hi[ROWS];
        [[unroll]] for (uint r = 0; r < ROWS; r++) A_GROUP32(row[r], e, codes[r], lo[r], hi[r]);
        [[unroll]] for (uint i = 0; i < 8; i++) {
            vec4 a[ROWS];
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                vec2 s = i < 4 ? lo[r] : hi[r];
                a[r] = signed_bytes(codes[r][i]) * s.x;
#if A_HAS_MIN
                a[r] += s.y;
#endif
            }
            multiply(a, column, e + 4 * i);
        }
    }
#else
    uint whole = p.k & ~3u;
    for (uint next = 0; next < whole; next += 4) {
        uint e = min(next, max(whole, 4) - 4);
        vec4 a[ROWS];
        [[unroll]] for (uint r = 0; r < ROWS; r++) a[r] = A_LOAD4(row[r], e);
        multiply(a, column, e);
    }
    for (uint next = whole; next < p.k; next++) {
        uint e = min(next, p.k - 1);
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            float a = A_LOAD(row[r], e);
            [[unroll]] for (uint n = 0; n < TILE_N; n++) sum[r][n] = fma(a, B_LOAD(column[n], e), sum[r][n]);
        }
    }
#endif
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        uint to = m + r * WG;
        [[unroll]] for (uint n = 0; n < TILE_N; n++) {
            uint at = first_n + n;
            if (to < p.m && at < end_n) STORE_D(column_of_d(at), to, finish(sum[r][n], to, at));
        }
    }
}
