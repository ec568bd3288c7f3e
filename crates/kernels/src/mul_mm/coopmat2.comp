// mul_mm on matrix units, the workgroup as one (NV cooperative matrices 2): d[m, n] = scale * sum_k a[k, m] * b[k, n] ...
// a: F16, BF16 or blocks of any format; b: 16-bit columns from columns.comp, padded with zeros; d: F32 or F16.
// WG threads compute TILE_M x TILE_N with f32 sums, DEPTH elements of k at a time, straight from memory: the driver stages
// the tiles. Blocks are decoded by a callback for each element. Tiles inside of the operands use layouts without bounds,
// others layouts that read zeros past the end. A tile whose columns end early takes matrices of half or a quarter of
// TILE_N. Strides are masked so that the compiler can prove their alignment: that is worth a factor of four.
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

// What the prepared columns are padded to.
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
// What follows the product; rows and columns past the end are not stored, and must not be read.
float finish_element(const in uint row, const in uint column, const in float sum) {
    uint m = first_m + row, n = first_n + column;
    return m < p.m && n < end_n ? finish(sum, m, n) : 0.0;
}
#else
float finish_element(const in uint row, const in uint column, const in float sum) {
    uint m = first_m + row, n = first_n + column;
    if (m < p.m && n < end_n) STORE_D(column_of_d(n), m, finish(sum, m, n));
    return sum;
}
#endif

#define MATRIX_A coopmat<ELEMENT, gl_ScopeWorkgroup, TILE_M, DEPTH, gl_MatrixUseA>
#define MATRIX_B(N) coopmat<ELEMENT, gl_ScopeWorkgroup, DEPTH, N, gl_MatrixUseB>
#define MATRIX_C(N) coopmat<float, gl_ScopeWorkgroup, TILE_M, N, gl_MatrixUseAccumulator>

const uint HALF_N = TILE_N / 2, QUARTER_N = TILE_N / 4;

// One step: tiles of a and b by these layouts from element k on.
#define STEP(N, A_LAYOUT, B_LAYOUT)                                                                          \
    {                                                                                                        \
        MATRIX_A a;                                                                                          \
        MATRIX_B(N) b;                                                                                       \
        coopMatLoadTensorNV(a, weights.v, 0, sliceTensorLayoutNV(A_LAYOUT, first_m, TILE_M, k, DEPTH) DECODE); \
        coopMatLoadTensorNV(b, columns.v, 0, sliceTensorLayoutNV(B_LAYOUT, first_n, N, k, DEPTH), transpose);  \
        sum = coopMatMulAdd(a, b, sum);                                                                      \
    }

#if STORE_TENSOR
// The barrier: d may be the residual, which all threads must have read.
#define STORE(N)                                                                                             \
    barrier();                                                                                               \
    coopmat<D_ELEMENT, gl_ScopeWorkgroup, TILE_M, N, gl_MatrixUseAccumulator> result =                       \
        coopmat<D_ELEMENT, gl_ScopeWorkgroup, TILE_M, N, gl_MatrixUseAccumulator>(finished);                 \
    coopMatStoreTensorNV(result, Result(tile_d).v, 0, sliceTensorLayoutNV(d_layout, first_n, N, first_m, TILE_M), transpose);
#else
#define STORE(N)
#endif

#define MULTIPLY(N)                                                                                          \
    {                                                                                                        \
        MATRIX_C(N) sum = MATRIX_C(N)(0.0);                                                                  \
        uint k = 0;                                                                                          \
        if (inside_m && first_n + N <= columns_in_all) {                                                     \
            for (; k + UNROLL * DEPTH <= p.k; ) {                                                            \
                [[unroll]] for (uint u = 0; u < UNROLL; u++) {                                               \
                    STEP(N, a_layout, b_layout)                                                              \
                    k += DEPTH;                                                                              \
                }                                                                                            \
            }                                                                                                \
            for (; k + DEPTH <= p.k; k += DEPTH) STEP(N, a_layout, b_layout)                                 \
        }                                                                                                    \
        for (; k < p.k; k += DEPTH) STEP(N, a_clamped, b_clamped)                                            \
        MATRIX_C(N) finished;                                                                                \
        coopMatPerElementNV(finished, sum, finish_element);                                                  \
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
    // With experts, columns of the next one follow: they are computed and not stored.
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
    Weights weights = Weights(tile_a);
    bool inside_m = first_m + TILE_M <= p.m;

    uint left = end_n - first_n;
#if LEAST_N <= TILE_N / 4
    if (left <= QUARTER_N) {
        MULTIPLY(QUARTER_N)
        return;
    }
#endif
#if LEAST_N <= TILE_N / 2
    if (left <= HALF_N) {
        MULTIPLY(HALF_N)
        return;
    }
#endif
    MULTIPLY(TILE_N)
}
