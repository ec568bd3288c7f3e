// l2_norm: y[i] = x[i] / max(sqrt(sum(x^2)), eps)
// Shapes and work split: row_norm.glsl.
#version 450
#include "kiln.glsl"
#include "row_norm.glsl"

void main() {
    if (!row_begin()) return;
    row_finish(0.0, 0.0, 1.0 / max(sqrt(row_sum_squares(0.0)), p.eps));
}
