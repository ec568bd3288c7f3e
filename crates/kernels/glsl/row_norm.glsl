// What the normalisations of rows share: y[i] = (x[i] - shift - rest) * scale * w[c] + b[c], one workgroup per row.
// x, y: [cols, rows...] with any row strides; w, b: F32 or absent (WEIGHT 0, BIAS 0); c is CHANNEL(i), given by the kernel.
// The kernel computes shift, rest and scale from the sums below. Rows short enough stay in registers.
#include "reduce.glsl"
#include "row_share.glsl"

layout(local_size_x = WG) in;

#ifndef CHANNEL
#define CHANNEL(i) (i)
#endif

uint row_in_batch, x0, y0;
#if HELD && WEIGHT
float held_weight[ROUNDS];
#endif
#if HELD && BIAS
float held_bias[ROUNDS];
#endif

// Finds this workgroup's row; false where there is none.
bool row_begin() {
    uint row = group_index();
    if (row >= p.rows) return false;
    uvec4 at = unravel(row, uint[4](p.shape[0], p.shape[1], p.shape[2], 1));
    row_in_batch = at.x;
    x0 = at.x * p.x_stride[0] + at.y * p.x_stride[1] + at.z * p.x_stride[2];
    y0 = at.x * p.y_stride[0] + at.y * p.y_stride[1] + at.z * p.y_stride[2];
#if HELD
    SHARE(i) held[k] = LOAD_X(p.x, x0 + i);
    // Loaded together, so that only one latency is waited for.
#if WEIGHT
    SHARE(i) held_weight[k] = F32(p.weight).v[CHANNEL(i)];
#endif
#if BIAS
    SHARE(i) held_bias[k] = F32(p.bias).v[CHANNEL(i)];
#endif
#endif
    return true;
}

#if HELD
#define ROW(i) held[k]
#else
#define ROW(i) LOAD_X(p.x, x0 + i)
#endif

// Sum of x[i] - shift.
float row_sum(float shift) {
    float sum = 0.0;
    SHARE(i) sum += ROW(i) - shift;
    return wg_sum(sum);
}

// Sum of (x[i] - shift)^2.
float row_sum_squares(float shift) {
    float sum = 0.0;
    SHARE(i) {
        float v = ROW(i) - shift;
        sum = fma(v, v, sum);
    }
    return wg_sum(sum);
}

// Writes the row. `rest` is what `shift` misses: subtracted on its own it keeps the digits that x - shift has won.
void row_finish(float shift, float rest, float scale) {
    SHARE(i) {
        float v = ((ROW(i) - shift) - rest) * scale;
#if HELD && WEIGHT
        v *= held_weight[k];
#elif WEIGHT
        v *= F32(p.weight).v[CHANNEL(i)];
#endif
#if HELD && BIAS
        v += held_bias[k];
#elif BIAS
        v += F32(p.bias).v[CHANNEL(i)];
#endif
        STORE_Y(p.y, y0 + i, v);
    }
}

// Mean 0 and variance 1. The mean in f32 is off by some ulps of itself, which is large beside a small deviation; so the
// deviations from it are summed too, and both mean and variance are corrected by that sum.
void row_standardise() {
    float n = float(p.cols);
    float mean = row_sum(0.0) / n;
    float rest = row_sum(mean) / n;
    float variance = max(row_sum_squares(mean) / n - rest * rest, 0.0);
    row_finish(mean, rest, inversesqrt(variance + p.eps));
}
