// Multiplies cooperative matrices in registers: each subgroup keeps ROWS x COLS products of shape M x N x K and adds to
// them p.rounds times. Nothing is loaded; the sum is stored only when asked, so that the products cannot be left out.
#version 450
#include "kiln.glsl"
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#if BF16
#extension GL_EXT_bfloat16 : require
#endif
#extension GL_EXT_shader_explicit_arithmetic_types_int32 : require

layout(local_size_x = WG) in;

#define MATRIX_A coopmat<A_TYPE, gl_ScopeSubgroup, M, K, gl_MatrixUseA>
#define MATRIX_B coopmat<A_TYPE, gl_ScopeSubgroup, K, N, gl_MatrixUseB>
#define MATRIX_C coopmat<C_TYPE, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator>

layout(buffer_reference, std430, buffer_reference_align = 16) buffer Sink { C_TYPE v[]; };

void main() {
    MATRIX_A a[ROWS];
    MATRIX_B b[COLS];
    MATRIX_C c[ROWS * COLS];
    [[unroll]] for (uint i = 0; i < ROWS; i++) a[i] = MATRIX_A(A_TYPE(p.factor + float(i)));
    [[unroll]] for (uint j = 0; j < COLS; j++) b[j] = MATRIX_B(A_TYPE(p.factor + float(j)));
    [[unroll]] for (uint i = 0; i < ROWS * COLS; i++) c[i] = MATRIX_C(C_TYPE(0));
    for (uint round = 0; round < p.rounds; round++) {
        [[unroll]] for (uint i = 0; i < ROWS; i++) {
            [[unroll]] for (uint j = 0; j < COLS; j++) c[i * COLS + j] = coopMatMulAdd(a[i], b[j], c[i * COLS + j]);
        }
    }
    if (p.store != 0u) {
        Sink sink = Sink(p.sink);
        [[unroll]] for (uint i = 0; i < ROWS * COLS; i++) {
            coopMatStore(c[i], sink.v, i * M * N, N, gl_CooperativeMatrixLayoutRowMajor);
        }
    }
}
