// flash_attention, cooperative matrices 2: as coopmat.comp, but matrices belong to the whole workgroup, K and V come by
// tensor addressing (block formats through a decode callback), and rows are reduced inside the matrices.
// A tile is ROWS query rows (token, head of the kv head) and rounds are of BC keys; S, P, O and the sums are f32, the
// factors of products f16; logits are to the base 2. One number for each row is a matrix of NARROW equal columns. With
// EARLY, V is loaded before the weights are made, so that it may arrive meanwhile. Rows of the cache past the last key any row sees are clamped to zero, never read.
// Grid: (tile * splits + split, kv head, batch).
#version 450
#include "kiln.glsl"
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_NV_cooperative_matrix2 : require

layout(local_size_x = WG) in;
#include "formats.glsl"
#include "flash_attention/view.glsl"
#include "flash_attention/combine.glsl"
#if SPLIT == 2
#define MEMORY_MODEL 1
#include "last_one.glsl"
#endif

// Aligned, so that the driver may use wide loads; `pick` has checked it.
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Halves { float16_t v[]; };
layout(buffer_reference, std430, buffer_reference_align = 2) readonly buffer KBlock { uint8_t bytes[K_BYTES]; };
layout(buffer_reference, std430, buffer_reference_align = 2) readonly buffer VBlock { uint8_t bytes[V_BYTES]; };
layout(buffer_reference, std430, buffer_reference_align = 2) readonly buffer Bytes { uint8_t v[]; };

float16_t decode_k(const in KBlock block, const in uint at[2], const in uint inside[2]) {
    return float16_t(K_LOAD(uvec2(block), inside[1]));
}
float16_t decode_v(const in VBlock block, const in uint at[2], const in uint inside[2]) {
    return float16_t(V_LOAD(uvec2(block), inside[1]));
}

shared uvec2 row_seen[ROWS];

const float LOG2_E = 1.44269504;
// Where maxima start: far below any logit and far above HIDDEN, so that hidden keys weigh nothing without being asked for.
const float FLOOR = -1e30;

#define ACCUMULATOR(R, C) coopmat<float, gl_ScopeWorkgroup, R, C, gl_MatrixUseAccumulator>

// What callbacks need to know of the tile.
#define TILE const in uint kv_head, const in uint batch, const in uint first_row, const in uint rows
#define THIS_TILE kv_head, batch, first_row, rows
uint token_of(uint first_row, uint row) { return (first_row + row) / RATIO; }
uint head_of(uint kv_head, uint first_row, uint row) { return kv_head * RATIO + (first_row + row) % RATIO; }

float16_t query(const in uint row, const in uint column, const in float16_t old, TILE) {
    if (row >= rows || column >= HSK) return float16_t(0.0);
    uvec2 at = row_address(p.q, token_of(first_row, row), p.q_stride[0]);
    at = row_address(row_address(at, head_of(kv_head, first_row, row), p.q_stride[1]), batch, p.q_stride[2]);
#if SOFTCAP
    return float16_t(clamp(F32(at).v[column] * SCALE, -65504.0, 65504.0));
#else
    return float16_t(clamp(F32(at).v[column] * (SCALE * LOG2_E), -65504.0, 65504.0));
#endif
}

// The logit of a score in a round from key `start` on.
float logit(const in uint row, const in uint column, const in float score, const in uint start, TILE) {
    uint key = start + column;
    uvec2 seen = row_seen[row];
    if (key < seen.x || key >= seen.y) return HIDDEN;
    float x = score;
#if MASK
    uint head = head_of(kv_head, first_row, row);
    float term = load_f16(mask_row(token_of(first_row, row), head, batch), key);
    x = floatBitsToUint(term) == 0xff800000u ? HIDDEN : x + slope_of(head) * LOG2_E * term;
#elif ALIBI
    float distance = abs(float(position_of(token_of(first_row, row), batch) - int(key)));
    x -= slope_of(head_of(kv_head, first_row, row)) * LOG2_E * distance;
#endif
    return x;
}

float cap_of(const in uint row, const in uint column, const in float score) { return capped(score) * LOG2_E; }
float exp2_of(const in uint row, const in uint column, const in float x) { return exp2(x); }
float larger(const in uint row, const in uint column, const in float a, const in float b) { return max(a, b); }
float max_of(const in float a, const in float b) { return max(a, b); }
float sum_of(const in float a, const in float b) { return a + b; }
float first_of(const in float a, const in float b) { return a; }

// Stores an element of O, or of the partial result of a split.
float store(const in uint row, const in uint column, const in float x, const in float row_max, const in float row_sum,
    const in bool whole, const in uint split, TILE) {
    if (row >= rows || column >= HSV) return x;
    uint head = head_of(kv_head, first_row, row);
    uint at = result_row(token_of(first_row, row), head, batch);
    float natural = row_max * (1.0 / LOG2_E);
#if SPLIT
    if (!whole) {
        if (column == 0) partial_pair(at, split).v[0] = vec2(natural, row_sum);
        PartialSum(partial_sums(at, split)).v[column / 4][column % 4] = x;
        return x;
    }
#endif
    F32(row_address(p.result, at, HSV * 4)).v[column] = x * result_factor(head, natural, row_sum);
    return x;
}

// K and V of a round: `inside` where all its keys are seen and heads need no padding, so that nothing is clamped.
#if K_DIRECT
#define LOAD_K(LAYOUT, AT) coopMatLoadTensorNV(kt, Halves(AT).v, 0, sliceTensorLayoutNV(LAYOUT, 0, BC, 0, HSK_PAD), turned)
#else
#define LOAD_K(LAYOUT, AT) \
    coopMatLoadTensorNV(kt, Bytes(AT).v, 0, sliceTensorLayoutNV(LAYOUT, 0, BC, 0, HSK_PAD), turned, decode_k)
#endif
#if V_DIRECT
#define LOAD_V(LAYOUT, AT) coopMatLoadTensorNV(v, Halves(AT).v, 0, sliceTensorLayoutNV(LAYOUT, 0, BC, 0, HSV_PAD))
#else
#define LOAD_V(LAYOUT, AT) \
    coopMatLoadTensorNV(v, Bytes(AT).v, 0, sliceTensorLayoutNV(LAYOUT, 0, BC, 0, HSV_PAD), decode_v)
#endif
// Strides of halves are multiples of 8 elements; the compiler believes it only where it sees it.
#define K_ROW (K_DIRECT == 1 ? (p.k_stride[0] / K_BYTES) & ~7u : p.k_stride[0] / K_BYTES)
#define V_ROW (V_DIRECT == 1 ? (p.v_stride[0] / V_BYTES) & ~7u : p.v_stride[0] / V_BYTES)

#define LOAD_ROUND_V                                                           \
    if (inside && HSV == HSV_PAD) {                                            \
        LOAD_V(v_layout, v_at);                                                \
    } else {                                                                   \
        v_end = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(v_end, valid, HSV), V_ROW, 1); \
        LOAD_V(v_end, v_at);                                                   \
    }

void main() {
    K_INIT();
    V_INIT();
    uint batch = gl_WorkGroupID.z;
    // Tiles of all kv heads from the last one on: under a causal mask these are the longest.
    uint number = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint kv_head = number % gl_NumWorkGroups.y;
    uint tile = gl_NumWorkGroups.x - 1 - number / gl_NumWorkGroups.y;
    uint t = gl_LocalInvocationIndex;
    uint split = 0;
#if SPLIT
    split = tile % p.splits;
    tile /= p.splits;
#endif
    uint first_row = tile * ROWS;
    uint rows = min(uint(ROWS), p.tokens * RATIO - first_row);

    // Rows past the last see what the others do: their results are dropped.
    for (uint r = t; r < ROWS; r += WG) {
        uint token = token_of(first_row, min(r, rows - 1));
        uvec2 seen = keys_of(token, batch, length_of(batch));
        row_seen[r] = seen.x < seen.y ? seen : uvec2(0xffffffffu, 0);
    }
    barrier();
    uvec2 any = row_seen[0], all = any;
    for (uint r = 1; r < ROWS; r++) {
        uvec2 seen = row_seen[r];
        any = uvec2(min(any.x, seen.x), max(any.y, seen.y));
        all = uvec2(max(all.x, seen.x), min(all.y, seen.y));
    }
    uvec2 tiles = uvec2(any.x / BC, (any.y + BC - 1) / BC);
#if SPLIT
    uint used;
    tiles = split_tiles(any, split, used);
#endif

    coopmat<float16_t, gl_ScopeWorkgroup, ROWS, HSK_PAD, gl_MatrixUseA> q;
    q = coopmat<float16_t, gl_ScopeWorkgroup, ROWS, HSK_PAD, gl_MatrixUseA>(0.0);
    coopMatPerElementNV(q, q, query, THIS_TILE);
    ACCUMULATOR(ROWS, HSV_PAD) o = ACCUMULATOR(ROWS, HSV_PAD)(0.0);
    ACCUMULATOR(ROWS, NARROW) row_max = ACCUMULATOR(ROWS, NARROW)(FLOOR), row_sum = ACCUMULATOR(ROWS, NARROW)(0.0);
    // Sums of weights are a product, too: a reduction takes longer.
    coopmat<float16_t, gl_ScopeWorkgroup, BC, NARROW, gl_MatrixUseB> ones;
    ones = coopmat<float16_t, gl_ScopeWorkgroup, BC, NARROW, gl_MatrixUseB>(1.0);

    uvec2 keys = keys_at(kv_head, batch), values = values_at(kv_head, batch);
    tensorLayoutNV<2, gl_CooperativeMatrixClampModeConstantNV> k_end = createTensorLayoutNV(2, gl_CooperativeMatrixClampModeConstantNV);
    tensorLayoutNV<2, gl_CooperativeMatrixClampModeConstantNV> v_end = createTensorLayoutNV(2, gl_CooperativeMatrixClampModeConstantNV);
    tensorLayoutNV<2> k_layout = createTensorLayoutNV(2), v_layout = createTensorLayoutNV(2);
    tensorViewNV<2, false, 1, 0> turned = createTensorViewNV(2, false, 1, 0);
#if K_DIRECT == 0
    k_end = setTensorLayoutBlockSizeNV(k_end, 1, K_ELEMENTS);
    k_layout = setTensorLayoutBlockSizeNV(k_layout, 1, K_ELEMENTS);
#endif
#if V_DIRECT == 0
    v_end = setTensorLayoutBlockSizeNV(v_end, 1, V_ELEMENTS);
    v_layout = setTensorLayoutBlockSizeNV(v_layout, 1, V_ELEMENTS);
#endif
    k_layout = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(k_layout, BC, HSK), K_ROW, 1);
    v_layout = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(v_layout, BC, HSV), V_ROW, 1);

    for (uint round = tiles.x; round < tiles.y; round++) {
        uint start = round * BC;
        uint row = cache_row(batch, start);
        uvec2 k_at = row_address(keys, row, p.k_stride[0]), v_at = row_address(values, row, p.v_stride[0]);
        bool inside = start + BC <= any.y;
        uint valid = min(any.y - start, uint(BC));

        coopmat<float16_t, gl_ScopeWorkgroup, HSK_PAD, BC, gl_MatrixUseB> kt;
        if (inside && HSK == HSK_PAD) {
            LOAD_K(k_layout, k_at);
        } else {
            k_end = setTensorLayoutStrideNV(setTensorLayoutDimensionNV(k_end, valid, HSK), K_ROW, 1);
            LOAD_K(k_end, k_at);
        }
        ACCUMULATOR(ROWS, BC) s = coopMatMulAdd(q, kt, ACCUMULATOR(ROWS, BC)(0.0));
#if SOFTCAP
        coopMatPerElementNV(s, s, cap_of);
#endif
        if (MASK == 1 || ALIBI == 1 || start < all.x || start + BC > all.y)
            coopMatPerElementNV(s, s, logit, start, THIS_TILE);

        coopmat<float16_t, gl_ScopeWorkgroup, BC, HSV_PAD, gl_MatrixUseB> v;
#if EARLY
        LOAD_ROUND_V
#endif
        ACCUMULATOR(ROWS, NARROW) most, alpha;
        ACCUMULATOR(ROWS, BC) row_maxes;
        coopMatReduceNV(most, s, gl_CooperativeMatrixReduceRowNV, max_of);
        coopMatPerElementNV(most, most, larger, row_max);
        alpha = row_max - most;
        coopMatPerElementNV(alpha, alpha, exp2_of);
        row_max = most;
        coopMatReduceNV(row_maxes, most, gl_CooperativeMatrixReduceRowNV, first_of);
        s = s - row_maxes;
        coopMatPerElementNV(s, s, exp2_of);
        coopmat<float16_t, gl_ScopeWorkgroup, ROWS, BC, gl_MatrixUseA> w;
        w = coopmat<float16_t, gl_ScopeWorkgroup, ROWS, BC, gl_MatrixUseA>(s);
        row_sum = coopMatMulAdd(w, ones, alpha * row_sum);
        ACCUMULATOR(ROWS, HSV_PAD) factor;
        coopMatReduceNV(factor, alpha, gl_CooperativeMatrixReduceRowNV, first_of);
        o = o * factor;
#if EARLY == 0
        LOAD_ROUND_V
#endif
        o = coopMatMulAdd(w, v, o);
    }

#if SPLIT == 2
    if (split >= used) return;
    bool whole = used == 1;
#else
    bool whole = SPLIT == 0;
#endif
    ACCUMULATOR(ROWS, HSV_PAD) row_maxes, sums;
    coopMatReduceNV(row_maxes, row_max, gl_CooperativeMatrixReduceRowNV, first_of);
    coopMatReduceNV(sums, row_sum, gl_CooperativeMatrixReduceRowNV, first_of);
    coopMatPerElementNV(o, o, store, row_maxes, sums, whole, split, THIS_TILE);

#if SPLIT == 2
    if (whole) return;
    if (!is_last_of(row_address(p.counters, (batch * gl_NumWorkGroups.y + kv_head) * p.tokens * RATIO + tile, 4), used)) return;
    for (uint i = t; i < rows * (HSV / 4); i += WG) {
        uint r = i / (HSV / 4), head = head_of(kv_head, first_row, i / (HSV / 4));
        combine(result_row(token_of(first_row, r), head, batch), head, i % (HSV / 4), used);
    }
#endif
}
