// sum_rows: dst[0, i1, i2, i3] = sum of row (i1, i2, i3) of x; with WEIGHTS (and EACH) each element times that of weights [cols, 1, i2, i3]
// x: [cols, rows...], any strides. One workgroup of WG threads per row; with EACH, one thread per row.
#version 450
#include "kiln.glsl"
#if EACH == 0
#include "reduce.glsl"
#endif
#include "row_start.glsl"

layout(local_size_x = WG) in;

void main() {
    uint row = EACH == 1 ? group_index() * WG + gl_LocalInvocationID.x : group_index();
    if (row >= p.rows) return;
    uvec2 x = row_start(p.x, row, p.outer, p.x_stride);
    float sum = 0.0;
#if EACH == 1
#if WEIGHTS
    uvec2 weights = offset(p.weights, (row / p.outer[0] % p.outer[1] * p.weights_stride[0] + row / p.outer[0] / p.outer[1] * p.weights_stride[1]) * 4);
    for (uint i = 0; i < p.cols; i++) sum = fma(F32(x).v[i * p.x_stride[0]], F32(weights).v[i], sum);
#else
    for (uint i = 0; i < p.cols; i++) sum += F32(x).v[i * p.x_stride[0]];
#endif
    F32(row_start(p.dst, row, p.outer, p.dst_stride)).v[0] = sum;
#else
    for (uint i = gl_LocalInvocationID.x; i < p.cols; i += WG) sum += F32(x).v[i * p.x_stride[0]];
    sum = wg_sum(sum);
    if (gl_LocalInvocationID.x == 0) F32(row_start(p.dst, row, p.outer, p.dst_stride)).v[0] = sum;
#endif
}
