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

#include "row_sums.glsl"

// Writes the row.
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

// Mean 0 and variance 1.
void row_standardise() {
    Standard to = row_standard(float(p.cols), p.eps);
    row_finish(to.shift, to.rest, to.scale);
}
