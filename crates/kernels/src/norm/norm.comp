// norm: y[i] = (x[i] - mean(x)) / sqrt(variance(x) + eps) * w[i] + b[i]
// Shapes and work split: row_norm.glsl.
#version 450
#include "kiln.glsl"
#include "row_norm.glsl"

void main() {
    if (!row_begin()) return;
    row_standardise();
}
