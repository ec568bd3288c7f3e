// group_norm: y[i,g] = (x[i,g] - mean(x[.,g])) / sqrt(variance(x[.,g]) + eps) * w[c] + b[c]
// with channel c = (g * cols + i) / channel_len: a channel is channel_len elements in a row, and may end inside a group.
// Shapes and work split: row_norm.glsl; a row is a group.
#version 450
#include "kiln.glsl"
#define CHANNEL(i) ((row_in_batch * p.cols + (i)) / p.channel_len)
#include "row_norm.glsl"

void main() {
    if (!row_begin()) return;
    row_standardise();
}
