// mul_mm on matrix units, the workgroup as one (NV cooperative matrices 2): d[m, n] = scale * sum_k a[k, m] * b[k, n] ...
// a: F16, BF16 or blocks of any format; b: 16-bit activations from pack_activations.comp, padded with zeros; d: F32 or F16.
// WG threads compute TILE_M x TILE_N with f32 sums, DEPTH elements of k at a time, straight from memory: the driver stages
// the tiles. Tiles inside of the operands use layouts without bounds, others layouts that read zeros past the end. A tile whose
// activations end early takes matrices of half or a quarter of TILE_N. Strides are masked so that the compiler can prove their alignment: that is worth a factor of four.
// Blocks are decoded by a callback for each element, which a driver compiles as often as a thread has elements in all products:
// so they have one product, that of whole tiles with bounds.
#version 450
#include "kiln.glsl"
#extension GL_KHR_cooperative_matrix : require
#extension GL_NV_cooperative_matrix2 : require
#extension GL_KHR_memory_scope_semantics : require
#if !HALF
#extension GL_EXT_bfloat16 : require
#endif

layout(local_size_x = WG) in;
#include "formats.glsl"
#include "mul_mm/place.glsl"
#include "mul_mm/finish.glsl"

// What the prepared activations are padded to.
#define PADDED_K ((p.k + 63) & ~63u)

layout(buffer_reference, std430, buffer_reference_align = 16) buffer Columns { ELEMENT v[]; };
#if A_BLOCKS
struct Block { uint8_t bytes[A_BLOCK_BYTES]; };
layout(buffer_reference, std430, buffer_reference_align = 1) buffer Weights { Block v[]; };
layout(buffer_reference, std430, buffer_reference_align = 1) buffer OneBlock { Block v; };
float16_t decode(const in OneBlock block, const in uint at[2], const in uint in_block[2]) {
    return float16_t(A_LOAD(uvec2(block), in_block[1]));
}
#define DECODE , decode
#else
#if ALIGNED_A
layout(buffer_reference, std430, buffer_reference_align = 16) buffer Weights { ELEMENT v[]; };
#else
layout(buffer_reference, std430, buffer_reference_align = 2) buffer Weights { ELEMENT v[]; };
#endif
#define DECODE
#endif

#define CLAMPED gl_CooperativeMatrixClampModeConstantNV
#if STORE_TENSOR
#if ALIGNED_D
layout(buffer_reference, std430, buffer_reference_align = 16) buffer Result { D_ELEMENT v[]; };
#else
layout(buffer_reference, std430, buffer_reference_align = 2) buffer Result { D_ELEMENT v[]; };
#endif
float finish_element(const in uint row, const in uint column, const in float sum) {
#if RESIDUAL
    // Rows past the end are not stored, and must not be read.
    if (first_m + row >= p.m) return 0.0;
#endif
    return finish_at(sum, row, column);
}
#else
float finish_element(const in uint row, const in uint column, const in float sum) {
    if (first_m + row < p.m && first_n + column < end_n)
        STORE_D(column_d[column], first_m + row, finish_at(sum, row, column));
    return sum;
}
#endif

#define MATRIX_A coopmat<ELEMENT, gl_ScopeWorkgroup, TILE_M, DEPTH, gl_MatrixUseA>
#define MATRIX_B(N) coopmat<ELEMENT, gl_ScopeWorkgroup, DEPTH, N, gl_MatrixUseB>
#define MATRIX_C(N) coopmat<float, gl_ScopeWorkgroup, TILE_M, N, gl_MatrixUseAccumulator>

const uint HALF_N = TILE_N / 2, QUARTER_N = TILE_N / 4;

// One step: the tiles from element k on, a multiple of DEPTH, which is a power of two.
#define STEP(N, A_LAYOUT, B_LAYOUT)                                                                           \
    {                                                                                                         \
        MATRIX_A a;                                                                                           \
        MATRIX_B(N) b;                                                                                        \
        coopMatLoadTensorNV(a, weights.v, 0, sliceTensorLayoutNV(A_LAYOUT, first_m, TILE_M, k & ~(DEPTH - 1u), DEPTH) DECODE); \
        coopMatLoadTensorNV(b, columns.v, 0, sliceTensorLayoutNV(B_LAYOUT, first_n, N, k & ~(DEPTH - 1u), DEPTH), transpose); \
        sum = coopMatMulAdd(a, b, sum);                                                                       \
        k += DEPTH;                                                                                           \
    }

// All steps that lie inside, UNROLL in one round.
#if UNROLL == 1
#define STEPS(N) while (k + DEPTH <= p.k) STEP(N, a_layout, b_layout)
#else
#define STEPS(N)                                                                                              \
    while (k + UNROLL * DEPTH <= p.k) [[unroll]] for (uint u = 0; u < UNROLL; u++) STEP(N, a_layout, b_layout) \
    while (k + DEPTH <= p.k) STEP(N, a_layout, b_layout)
#endif

#if STORE_TENSOR
// The barrier: d may be the residual, which all threads must have read.
#define STORE(N)                                                                                             \
    barrier();                                                                                               \
    coopmat<D_ELEMENT, gl_ScopeWorkgroup, TILE_M, N, gl_MatrixUseAccumulator> result =                       \
        coopmat<D_ELEMENT, gl_ScopeWorkgroup, TILE_M, N, gl_MatrixUseAccumulator>(sum);                      \
    coopMatStoreTensorNV(result, Result(tile_d).v, 0, sliceTensorLayoutNV(d_layout, first_n, N, first_m, TILE_M), transpose);
#else
#define STORE(N)
#endif

#if A_BLOCKS
#define INSIDE(N)
#else
#define INSIDE(N) if (inside_m && first_n + N <= columns_in_all) { STEPS(N) }
#endif

#define MULTIPLY(N)                                                                                          \
    {                                                                                                        \
        MATRIX_C(N) sum = MATRIX_C(N)(0.0);                                                                  \
        uint k = 0;                                                                                          \
        INSIDE(N)                                                                                            \
        while (k < p.k) STEP(N, a_clamped, b_clamped)                                                        \
        coopMatPerElementNV(sum, sum, finish_element);                                                       \
        STORE(N)                                                                                             \
    }

void main() {
    A_INIT();
    if (!find_tile()) return;
    tensorLayoutNV<2> a_layout = createTensorLayoutNV(2);
    tensorLayoutNV<2> b_layout = createTensorLayoutNV(2);
    tensorLayoutNV<2, CLAMPED> a_clamped = createTensorLayoutNV(2, CLAMPED);
    tensorLayoutNV<2, CLAMPED> b_clamped = createTensorLayoutNV(2, CLAMPED);
    tensorViewNV<2, false, 1, 0> transpose = createTensorViewNV(2, false, 1, 0);
#if A_BLOCKS
    uint a_stride = p.a_stride[0] / A_BLOCK_BYTES;
    a_layout = setTensorLayoutBlockSizeNV(a_layout, 1, A_BLOCK);
    a_clamped = setTensorLayoutBlockSizeNV(a_clamped, 1, A_BLOCK);
#elif ALIGNED_A
    uint a_stride = (p.a_stride[0] / 2) & ~7u;
#else
    uint a_stride = p.a_stride[0] / 2;
#endif
    a_layout = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(a_layout, p.m, p.k), a_stride, 1);
    a_clamped = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(a_clamped, p.m, p.k), a_stride, 1);
    // With experts, activations of the next one follow: they are computed and not stored.
#if EXPERTS
    uint columns_in_all = p.pairs_in_all;
    Columns columns = Columns(p.b);
#else
    uint columns_in_all = p.n;
    Columns columns = Columns(tile_b);
#endif
    b_layout = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(b_layout, columns_in_all, PADDED_K), PADDED_K, 1);
    b_clamped = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(b_clamped, columns_in_all, PADDED_K), PADDED_K, 1);
#if STORE_TENSOR
    tensorLayoutNV<2, CLAMPED> d_layout = createTensorLayoutNV(2, CLAMPED);
#if ALIGNED_D
    uint d_stride = (p.d_stride[0] / D_BYTES) & ~7u;
#else
    uint d_stride = p.d_stride[0] / D_BYTES;
#endif
    d_layout = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(d_layout, end_n, p.m), d_stride, 1);
#endif
    prepare_finish();
    barrier();
    Weights weights = Weights(tile_a);
    bool inside_m = first_m + TILE_M <= p.m;

    uint left = end_n - first_n;
#if !A_BLOCKS && LEAST_N <= TILE_N / 4
    if (left <= QUARTER_N) {
        MULTIPLY(QUARTER_N)
        return;
    }
#endif
#if !A_BLOCKS && LEAST_N <= TILE_N / 2
    if (left <= HALF_N) {
        MULTIPLY(HALF_N)
        return;
    }
#endif
    MULTIPLY(TILE_N)
}
