// rms_norm: y[i] = x[i] / sqrt(mean(x^2) + eps) * w[i]
// Shapes and work split: row_norm.glsl.
#version 450
#include "kiln.glsl"
#include "row_norm.glsl"

void main() {
    if (!row_begin()) return;
    row_finish(0.0, 0.0, inversesqrt(row_sum_squares(0.0) / float(p.cols) + p.eps));
}
