// rms_norm: y[i] = x[i] / sqrt(mean(x^2) + eps) * w[i]
// x, y: [cols, rows...] with any row strides; w: [cols] or absent (WEIGHT 0).
// One workgroup of WG threads per row; the row is read twice, the second time from cache.
#version 450
#include "kiln.glsl"
#include "reduce.glsl"

layout(local_size_x = WG) in;

void main() {
    uint row = group_index();
    if (row >= p.rows) return;
    uvec4 at = unravel(row, uint[4](p.shape[0], p.shape[1], p.shape[2], 1));
    uint x0 = at.x * p.x_stride[0] + at.y * p.x_stride[1] + at.z * p.x_stride[2];
    uint y0 = at.x * p.y_stride[0] + at.y * p.y_stride[1] + at.z * p.y_stride[2];
    uint tid = gl_LocalInvocationID.x;

    float sum = 0.0;
    for (uint i = tid; i < p.cols; i += WG) {
        float v = LOAD_X(p.x, x0 + i);
        sum = fma(v, v, sum);
    }
    float scale = inversesqrt(wg_sum(sum) / float(p.cols) + p.eps);

    for (uint i = tid; i < p.cols; i += WG) {
        float v = LOAD_X(p.x, x0 + i) * scale;
#if WEIGHT
        v *= F32(p.weight).v[i];
#endif
        STORE_Y(p.y, y0 + i, v);
    }
}
