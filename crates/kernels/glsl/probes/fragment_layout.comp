// Which element of a matrix each component of each lane is: matrices that hold their own places are loaded, and every lane
// writes down what it got. One subgroup of SG lanes; matrices of M x N x K, operands F16 (HALF) or BF16: both hold whole numbers up to 256.
// p.places: [SG][M * K / SG] places row * K + k of the A fragment, [SG][K * N / SG] places k * N + column of the right one, then
// [SG][M * N / SG] places row * N + column of sums, which are F32.
// Entries stay as they are where a lane holds fewer components.
#version 450
#include "kiln.glsl"
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require

#if HALF
#define ELEMENT float16_t
#else
#extension GL_EXT_bfloat16 : require
#define ELEMENT bfloat16_t
#endif

layout(local_size_x = SG) in;
shared ELEMENT places[M * K > K * N ? M * K : K * N];
shared float sums[M * N];

void main() {
    uint lane = gl_SubgroupInvocationID;
    for (uint i = gl_LocalInvocationID.x; i < M * K || i < K * N; i += SG) places[i] = ELEMENT(float(i));
    for (uint i = gl_LocalInvocationID.x; i < M * N; i += SG) sums[i] = float(i);
    barrier();
    coopmat<ELEMENT, gl_ScopeSubgroup, M, K, gl_MatrixUseA> a;
    coopmat<ELEMENT, gl_ScopeSubgroup, K, N, gl_MatrixUseB> b;
    coopMatLoad(a, places, 0, K, gl_CooperativeMatrixLayoutRowMajor);
    coopMatLoad(b, places, 0, N, gl_CooperativeMatrixLayoutRowMajor);
    for (uint i = 0; i < a.length() && i < M * K / SG; i++) U32(p.places).v[lane * (M * K / SG) + i] = uint(float(a[i]));
    coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator> c;
    coopMatLoad(c, sums, 0, N, gl_CooperativeMatrixLayoutRowMajor);
    for (uint i = 0; i < c.length() && i < M * N / SG; i++) U32(p.places).v[M * K + K * N + lane * (M * N / SG) + i] = uint(c[i]);
    for (uint i = 0; i < b.length() && i < K * N / SG; i++) U32(p.places).v[M * K + lane * (K * N / SG) + i] = uint(float(b[i]));
}
