// sinkhorn: matrices of N rows of N; rows become their softmax, plus eps; then columns are divided by (their sum + eps), `times` times, and
// rows likewise between two times. y holds the columns. A thread for each matrix.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;

void main() {
    uint at = group_index() * WG + gl_LocalInvocationID.x;
    if (at >= p.rows) return;
    F32 x = F32(row_address(p.x, at, p.x_stride));
    float m[N][N];
    [[unroll]] for (uint i = 0; i < N; i++) {
        float top = x.v[i * N], sum = 0.0;
        [[unroll]] for (uint j = 1; j < N; j++) top = max(top, x.v[i * N + j]);
        [[unroll]] for (uint j = 0; j < N; j++) sum += m[i][j] = exp(x.v[i * N + j] - top);
        [[unroll]] for (uint j = 0; j < N; j++) m[i][j] = m[i][j] / sum + p.eps;
    }
    for (uint time = 0; time < p.times; time++) {
        if (time > 0) {
            [[unroll]] for (uint i = 0; i < N; i++) {
                float sum = p.eps;
                [[unroll]] for (uint j = 0; j < N; j++) sum += m[i][j];
                [[unroll]] for (uint j = 0; j < N; j++) m[i][j] /= sum;
            }
        }
        [[unroll]] for (uint j = 0; j < N; j++) {
            float sum = p.eps;
            [[unroll]] for (uint i = 0; i < N; i++) sum += m[i][j];
            [[unroll]] for (uint i = 0; i < N; i++) m[i][j] /= sum;
        }
    }
    F32 y = F32(row_address(p.y, at, 4 * N * N));
    [[unroll]] for (uint j = 0; j < N; j++)
        [[unroll]] for (uint i = 0; i < N; i++) y.v[j * N + i] = m[i][j];
}
