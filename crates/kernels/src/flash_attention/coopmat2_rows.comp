// flash_attention, cooperative matrices 2 of subgroups: each of NW subgroups has RB blocks of MM query rows of the tile, and
// everything of these rows stays in its registers: Q, S, P and O. More blocks share each load of K and V from shared memory. A row's maximum is a reduction inside a matrix, whose
// result has the layout of S and O, and P becomes a factor of the next product by conversion. K and V pass through shared
// memory, loaded a round ahead, and so does an explicit mask (MASK_STAGED), a row of it for each row. What was loaded is put into shared memory
// behind the products that run meanwhile: a thread that stores it waits for it, and what stands behind the store waits with it. S, O and sums are
// f32, logits to the base 2. Of wide heads PARTS subgroups have the same rows: each makes the weights of a part of the keys, hands
// them over in shared memory, and has a part of the columns of O.
// A row is a token and one of the RATIO heads of the kv head. Rounds of BC keys; rounds that all rows see in full run no
// mask. The longest tiles of a causal mask come first. Queries and results pass through shared memory (STAGED_ENDS), or a callback
// has each element.
// Grid: (tile * splits + split, kv head, batch).
#version 450
#include "kiln.glsl"
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_NV_cooperative_matrix2 : require
#define HALVES

layout(local_size_x = WG) in;
#include "formats.glsl"
#include "flash_attention/view.glsl"
#include "flash_attention/eight.glsl"
#include "flash_attention/combine.glsl"
#if SPLIT == 2
#define MEMORY_MODEL 1
#include "last_one.glsl"
#endif

#define ROWS (NW / PARTS * RB * MM)
#define K_STEPS (HSK_PAD / MM)
// Blocks of O that a subgroup has for each of its blocks of rows.
#define O_BLOCKS (HSV_PAD / MM / PARTS)
// Blocks of scores in all, and those that a subgroup makes.
#define P_BLOCKS (BC / MM)
#define S_BLOCKS (P_BLOCKS / PARTS)
// Rows of the tiles in vectors of eight halves; the odd one spreads rows over the banks.
#define K_COLS (HSK_PAD / 8)
#define V_COLS (HSV_PAD / 8)
#define K_STRIDE (K_COLS + 1)
#define V_STRIDE (V_COLS + 1)
#define K_CHUNKS ((BC * K_COLS + WG - 1) / WG)
#define V_CHUNKS ((BC * V_COLS + WG - 1) / WG)

shared uvec4 k_tile[BC * K_STRIDE];
#if STAGED_ENDS
// Blocks of O pass through it at the end, one of each subgroup.
#define O_VECTORS (MM * MM / 4)
#else
#define O_VECTORS 0
#endif
shared uvec4 v_tile[BC * V_STRIDE > NW * O_VECTORS ? BC * V_STRIDE : NW * O_VECTORS];
shared uvec2 row_seen[ROWS];
#if MASK_STAGED
// Eight keys in each vector, and again an odd one. Keys past the last are hidden.
#define MASK_STRIDE (BC / 8 + 1)
#define MASK_CHUNKS ((ROWS * (BC / 8) + WG - 1) / WG)
shared uvec4 mask_tile[ROWS * MASK_STRIDE];
#define MATRIX_M coopmat<float16_t, gl_ScopeSubgroup, MM, MM, gl_MatrixUseAccumulator>
#endif

#if PARTS > 1
// What subgroups with the same rows tell each other: maxima or sums of rows, and weights.
shared float row_numbers[NW][MM];
#define P_STRIDE (BC / 8 + 1)
shared uvec4 p_tile[ROWS * P_STRIDE];
#endif

#define MATRIX_A coopmat<float16_t, gl_ScopeSubgroup, MM, MM, gl_MatrixUseA>
#define MATRIX_B coopmat<float16_t, gl_ScopeSubgroup, MM, MM, gl_MatrixUseB>
#define MATRIX_C coopmat<float, gl_ScopeSubgroup, MM, MM, gl_MatrixUseAccumulator>

const float LOG2_E = 1.44269504;
// Where maxima start: far below any logit and far above HIDDEN, so that hidden keys weigh nothing without being asked for.
const float FLOOR = -1e30;

// What callbacks need to know: the tile, and the first row of a block in it.
#define TILE const in uint kv_head, const in uint batch, const in uint first_row, const in uint rows, const in uint mine
#define THIS_BLOCK(B) kv_head, batch, first_row, rows, mine + (B) * MM
uint token_of(uint first_row, uint row) { return (first_row + row) / RATIO; }
uint head_of(uint kv_head, uint first_row, uint row) { return kv_head * RATIO + (first_row + row) % RATIO; }

#if STAGED_ENDS
// Eight columns of a query as halves, scaled.
uvec4 query(uint row, uint e, uint kv_head, uint batch, uint first_row) {
    uvec2 at = row_address(p.q, token_of(first_row, row), p.q_stride[0]);
    at = row_address(row_address(at, head_of(kv_head, first_row, row), p.q_stride[1]), batch, p.q_stride[2]);
#if SOFTCAP
    const float scale = SCALE;
#else
    const float scale = SCALE * LOG2_E;
#endif
    vec4 a = clamp(F32x4(at).v[e / 4] * scale, vec4(-65504.0), vec4(65504.0));
    vec4 b = clamp(F32x4(at).v[e / 4 + 1] * scale, vec4(-65504.0), vec4(65504.0));
    return uvec4(packHalf2x16(a.xy), packHalf2x16(a.zw), packHalf2x16(b.xy), packHalf2x16(b.zw));
}
#else
// An element of the queries, scaled.
float16_t query(const in uint r, const in uint c, const in float16_t old, const in uint column, TILE) {
    uint row = mine + r;
    if (row >= rows || column + c >= HSK) return float16_t(0.0);
    uvec2 at = row_address(p.q, token_of(first_row, row), p.q_stride[0]);
    at = row_address(row_address(at, head_of(kv_head, first_row, row), p.q_stride[1]), batch, p.q_stride[2]);
    float x = F32(at).v[column + c];
#if SOFTCAP
    return float16_t(clamp(x * SCALE, -65504.0, 65504.0));
#else
    return float16_t(clamp(x * (SCALE * LOG2_E), -65504.0, 65504.0));
#endif
}
#endif

// The logit of a score, `key` the first one of the block.
float logit(const in uint r, const in uint c, const in float score, const in uint start, TILE) {
    uint row = mine + r, key = start + c;
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

float max_of(const in float a, const in float b) { return max(a, b); }
float sum_of(const in float a, const in float b) { return a + b; }

#if PARTS > 1
// A number for each row, the same in all of its columns: put down, and what all parts put down.
float put_number(const in uint r, const in uint c, const in float x, const in uint subgroup) {
    if (c == 0) row_numbers[subgroup][r] = x;
    return x;
}
float most_of_parts(const in uint r, const in uint c, const in float x, const in uint subgroup) {
    float most = row_numbers[subgroup - subgroup % PARTS][r];
    [[unroll]] for (uint i = 1; i < PARTS; i++) most = max(most, row_numbers[subgroup - subgroup % PARTS + i][r]);
    return most;
}
float sum_of_parts(const in uint r, const in uint c, const in float x, const in uint subgroup) {
    float sum = row_numbers[subgroup - subgroup % PARTS][r];
    [[unroll]] for (uint i = 1; i < PARTS; i++) sum += row_numbers[subgroup - subgroup % PARTS + i][r];
    return sum;
}
#endif

#if STAGED_ENDS
// Row max and row sum, for the threads that store the row.
shared vec2 row_end[ROWS];
float put_end(const in uint r, const in uint c, const in float row_max, const in float row_sum, const in uint row) {
    if (c == 0) row_end[row + r] = vec2(row_max, row_sum);
    return row_max;
}

// Stores four elements of O from column e on, or of the partial result of a split.
void store_four(vec4 x, uint row, uint e, bool whole, uint split, uint kv_head, uint batch, uint first_row, uint rows) {
    if (row >= rows || e >= HSV) return;
    uint head = head_of(kv_head, first_row, row);
    uint at = result_row(token_of(first_row, row), head, batch);
    float natural = row_end[row].x * (1.0 / LOG2_E), row_sum = row_end[row].y;
#if SPLIT
    if (!whole) {
        if (e == 0) partial_pair(at, split).v[0] = vec2(natural, row_sum);
        PartialSum(partial_sums(at, split)).v[e / 4] = x;
        return;
    }
#endif
    F32x4(row_address(p.result, at, HSV * 4)).v[e / 4] = x * result_factor(head, natural, row_sum);
}
#else
// Stores an element of O, or of the partial result of a split.
float store(const in uint r, const in uint c, const in float x, const in float row_max, const in float row_sum,
    const in uint column, const in bool whole, const in uint split, TILE) {
    uint row = mine + r, e = column + c;
    if (row >= rows || e >= HSV) return x;
    uint head = head_of(kv_head, first_row, row);
    uint at = result_row(token_of(first_row, row), head, batch);
    float natural = row_max * (1.0 / LOG2_E);
#if SPLIT
    if (!whole) {
        if (e == 0) partial_pair(at, split).v[0] = vec2(natural, row_sum);
        PartialSum(partial_sums(at, split)).v[e / 4][e % 4] = x;
        return x;
    }
#endif
    F32(row_address(p.result, at, HSV * 4)).v[e] = x * result_factor(head, natural, row_sum);
    return x;
}
#endif

uint t;

// Chunks of a tile of K or V on their way to shared memory. Keys past the last are copies of it: they weigh nothing.
#if K_HALVES
uvec4 chunk_k(uvec2 row, uint e) { return U32x4(row).v[e]; }
#else
uvec4 chunk_k(uvec2 row, uint e) {
    f16vec4 a, b;
    half_k8(row, 8 * e, a, b);
    return uvec4(packFloat2x16(a.xy), packFloat2x16(a.zw), packFloat2x16(b.xy), packFloat2x16(b.zw));
}
#endif
#if V_HALVES
uvec4 chunk_v(uvec2 row, uint e) { return U32x4(row).v[e]; }
#else
uvec4 chunk_v(uvec2 row, uint e) {
    f16vec4 a, b;
    half_v8(row, 8 * e, a, b);
    return uvec4(packFloat2x16(a.xy), packFloat2x16(a.zw), packFloat2x16(b.xy), packFloat2x16(b.zw));
}
#endif

#define FETCH(NAME, CHUNK, CHUNKS, COLS, SIZE, STRIDE)                         \
    void NAME(out uvec4 chunk[CHUNKS], uvec2 base, uint sequence, uint start, uint end) { \
        [[unroll]] for (uint c = 0; c < CHUNKS; c++) {                         \
            uint i = t + c * WG;                                               \
            uint key = min(start + i / COLS, end - 1), e = i % COLS;           \
            uvec2 row = row_address(base, cache_row(sequence, key), STRIDE);   \
            chunk[c] = CHUNK(row, min(e, SIZE / 8 - 1));                       \
            if (SIZE % MM != 0 && e >= SIZE / 8) chunk[c] = uvec4(0);          \
        }                                                                      \
    }
FETCH(fetch_k, chunk_k, K_CHUNKS, K_COLS, HSK, p.k_stride[0])
FETCH(fetch_v, chunk_v, V_CHUNKS, V_COLS, HSV, p.v_stride[0])

void put_k(uvec4 chunk[K_CHUNKS]) {
    [[unroll]] for (uint c = 0; c < K_CHUNKS; c++) {
        uint i = t + c * WG;
        if (BC * K_COLS % WG == 0 || i < BC * K_COLS) k_tile[i / K_COLS * K_STRIDE + i % K_COLS] = chunk[c];
    }
}
void put_v(uvec4 chunk[V_CHUNKS]) {
    [[unroll]] for (uint c = 0; c < V_CHUNKS; c++) {
        uint i = t + c * WG;
        if (BC * V_COLS % WG == 0 || i < BC * V_COLS) v_tile[i / V_COLS * V_STRIDE + i % V_COLS] = chunk[c];
    }
}

#if MASK_STAGED
// The mask of the tile's rows for the keys from `start` on.
void fetch_mask(out uvec4 chunk[MASK_CHUNKS], uint kv_head, uint batch, uint first_row, uint rows, uint start) {
    [[unroll]] for (uint c = 0; c < MASK_CHUNKS; c++) {
        uint i = t + c * WG, r = min(i / (BC / 8), rows - 1), key = start + i % (BC / 8) * 8;
        uvec2 row = mask_row(token_of(first_row, r), head_of(kv_head, first_row, r), batch);
#if MASK_WIDE
        chunk[c] = key < p.keys ? U32x4(row).v[key / 8] : uvec4(0xfc00fc00u);
#else
        [[unroll]] for (uint j = 0; j < 8; j++) {
            uint term = key + j < p.keys ? uint(U16(row).v[key + j]) : 0xfc00u;
            chunk[c][j / 2] = j % 2 == 0 ? term : chunk[c][j / 2] | term << 16;
        }
#endif
    }
}
void put_mask(uvec4 chunk[MASK_CHUNKS]) {
    [[unroll]] for (uint c = 0; c < MASK_CHUNKS; c++) {
        uint i = t + c * WG;
        if (ROWS * (BC / 8) % WG == 0 || i < ROWS * (BC / 8)) mask_tile[i / (BC / 8) * MASK_STRIDE + i % (BC / 8)] = chunk[c];
    }
}
#endif

void main() {
    K_INIT();
    V_INIT();
    t = gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID;
    uint batch = gl_WorkGroupID.z;
    // Tiles of all kv heads from the last one on: under a causal mask these are the longest.
    uint number = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint kv_head = number % gl_NumWorkGroups.y;
    uint tile = gl_NumWorkGroups.x - 1 - number / gl_NumWorkGroups.y;
    uint split = 0;
#if SPLIT
    split = tile % p.splits;
    tile /= p.splits;
#endif
    uint first_row = tile * ROWS;
    uint rows = min(uint(ROWS), p.tokens * RATIO - first_row);
    uint mine = gl_SubgroupID / PARTS * RB * MM;
    uint first_block = gl_SubgroupID % PARTS * O_BLOCKS, first_keys = gl_SubgroupID % PARTS * S_BLOCKS;

    // Rows past the last see what it does: their results are dropped.
    for (uint r = t; r < ROWS; r += WG) {
        uint token = token_of(first_row, min(r, rows - 1));
        uvec2 seen = keys_of(token, batch, length_of(batch));
        row_seen[r] = seen.x < seen.y ? seen : uvec2(0xffffffffu, 0);
    }
    barrier();
    uvec2 any = row_seen[0];
    for (uint r = 1; r < ROWS; r++) any = uvec2(min(any.x, row_seen[r].x), max(any.y, row_seen[r].y));
    // What all rows of this subgroup see.
    uvec2 all = row_seen[mine];
    for (uint r = mine + 1; r < mine + RB * MM; r++) all = uvec2(max(all.x, row_seen[r].x), min(all.y, row_seen[r].y));
    uvec2 tiles = uvec2(any.x / BC, (any.y + BC - 1) / BC);
    if (any.x >= any.y) tiles = uvec2(0);
#if SPLIT
    uint used;
    tiles = split_tiles(any.x < any.y ? any : uvec2(0), split, used);
#endif

    MATRIX_A q[RB * K_STEPS];
    MATRIX_C o[RB * O_BLOCKS];
    // Weights are summed up where they are, and across the row at the end.
    MATRIX_C row_max[RB], row_sum[RB];
    [[unroll]] for (uint b = 0; b < RB; b++) {
        [[unroll]] for (uint i = 0; i < O_BLOCKS; i++) o[b * O_BLOCKS + i] = MATRIX_C(0.0);
        row_max[b] = MATRIX_C(FLOOR);
        row_sum[b] = MATRIX_C(0.0);
    }

#if STAGED_ENDS
    // Queries pass through the tile of keys, BC rows at a time.
    for (uint pass = 0; pass < ROWS; pass += BC) {
        for (uint i = t; i < BC * K_COLS; i += WG) {
            uint row = pass + i / K_COLS, e = i % K_COLS * 8;
            k_tile[i / K_COLS * K_STRIDE + i % K_COLS] = row < rows && e < HSK ? query(row, e, kv_head, batch, first_row) : uvec4(0);
        }
        barrier();
        [[unroll]] for (uint b = 0; b < RB; b++) {
            uint row = mine + b * MM;
            if (row >= pass && row < pass + BC)
                [[unroll]] for (uint k = 0; k < K_STEPS; k++)
                    coopMatLoad(q[b * K_STEPS + k], k_tile, (row - pass) * K_STRIDE + k * (MM / 8), K_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
        }
        barrier();
    }
#else
    [[unroll]] for (uint b = 0; b < RB; b++)
        [[unroll]] for (uint k = 0; k < K_STEPS; k++) {
            q[b * K_STEPS + k] = MATRIX_A(0.0);
            coopMatPerElementNV(q[b * K_STEPS + k], q[b * K_STEPS + k], query, k * MM, THIS_BLOCK(b));
        }
#endif

    uvec2 keys = keys_at(kv_head, batch), values = values_at(kv_head, batch);
    uvec4 k_chunk[K_CHUNKS], v_chunk[V_CHUNKS];
#if MASK_STAGED
    uvec4 mask_chunk[MASK_CHUNKS];
#endif
    if (tiles.x < tiles.y) {
        fetch_k(k_chunk, keys, batch, tiles.x * BC, any.y);
#if MASK_STAGED
        fetch_mask(mask_chunk, kv_head, batch, first_row, rows, tiles.x * BC);
        put_mask(mask_chunk);
#endif
        put_k(k_chunk);
        fetch_v(v_chunk, values, batch, tiles.x * BC, any.y);
    }
    for (uint round = tiles.x; round < tiles.y; round++) {
        uint start = round * BC;
        // K is there, and V of the round before is used up.
        barrier();
        fetch_k(k_chunk, keys, batch, start + BC, any.y);
#if MASK_STAGED
        fetch_mask(mask_chunk, kv_head, batch, first_row, rows, start + BC);
#endif
        MATRIX_C s[RB * S_BLOCKS];
        // A single block of scores would be one product after the other: those of every second step are summed apart.
        MATRIX_C odd = MATRIX_C(0.0);
        [[unroll]] for (uint i = 0; i < RB * S_BLOCKS; i++) s[i] = MATRIX_C(0.0);
        [[unroll]] for (uint k = 0; k < K_STEPS; k++) {
            [[unroll]] for (uint i = 0; i < S_BLOCKS; i++) {
                MATRIX_B kt;
                coopMatLoad(kt, k_tile, (first_keys + i) * MM * K_STRIDE + k * (MM / 8), K_STRIDE, gl_CooperativeMatrixLayoutColumnMajor);
                [[unroll]] for (uint b = 0; b < RB; b++) {
                    if (RB * S_BLOCKS == 1 && k % 2 == 1)
                        odd = coopMatMulAdd(q[k], kt, odd);
                    else
                        s[b * S_BLOCKS + i] = coopMatMulAdd(q[b * K_STEPS + k], kt, s[b * S_BLOCKS + i]);
                }
            }
        }
        if (RB * S_BLOCKS == 1) s[0] = s[0] + odd;
        put_v(v_chunk);
#if SOFTCAP
        [[unroll]] for (uint i = 0; i < RB * S_BLOCKS; i++)
            [[unroll]] for (uint j = 0; j < s[i].length(); j++) s[i][j] = capped(s[i][j]) * LOG2_E;
#endif
#if MASK_STAGED
        // What is hidden becomes minus infinity, and weighs nothing beside FLOOR.
        [[unroll]] for (uint b = 0; b < RB; b++)
            [[unroll]] for (uint i = 0; i < S_BLOCKS; i++) {
                MATRIX_M term;
                coopMatLoad(term, mask_tile, (mine + b * MM) * MASK_STRIDE + (first_keys + i) * (MM / 8), MASK_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
                [[unroll]] for (uint j = 0; j < term.length(); j++) s[b * S_BLOCKS + i][j] += LOG2_E * float(term[j]);
            }
#else
        if (MASK == 1 || ALIBI == 1 || start < all.x || start + BC > all.y) {
            [[unroll]] for (uint b = 0; b < RB; b++)
                [[unroll]] for (uint i = b * S_BLOCKS; i < b * S_BLOCKS + S_BLOCKS; i++)
                    coopMatPerElementNV(s[i], s[i], logit, start + MM * (first_keys + i - b * S_BLOCKS), THIS_BLOCK(b));
        }
#endif
        MATRIX_A w[RB * P_BLOCKS];
        [[unroll]] for (uint b = 0; b < RB; b++) {
            MATRIX_C most = s[b * S_BLOCKS];
            [[unroll]] for (uint i = b * S_BLOCKS + 1; i < b * S_BLOCKS + S_BLOCKS; i++)
                [[unroll]] for (uint j = 0; j < most.length(); j++) most[j] = max(most[j], s[i][j]);
            MATRIX_C row_most, alpha;
            coopMatReduceNV(row_most, most, gl_CooperativeMatrixReduceRowNV, max_of);
#if PARTS > 1
            coopMatPerElementNV(row_most, row_most, put_number, gl_SubgroupID);
            barrier();
            coopMatPerElementNV(row_most, row_most, most_of_parts, gl_SubgroupID);
#endif
            [[unroll]] for (uint j = 0; j < alpha.length(); j++) {
                float now = max(row_max[b][j], row_most[j]);
                alpha[j] = exp2(row_max[b][j] - now);
                row_max[b][j] = now;
            }
            row_sum[b] = row_sum[b] * alpha;
            [[unroll]] for (uint i = b * S_BLOCKS; i < b * S_BLOCKS + S_BLOCKS; i++) {
                [[unroll]] for (uint j = 0; j < alpha.length(); j++) s[i][j] = exp2(s[i][j] - row_max[b][j]);
                row_sum[b] = row_sum[b] + s[i];
#if PARTS > 1
                coopMatStore(MATRIX_A(s[i]), p_tile, mine * P_STRIDE + (first_keys + i) * (MM / 8), P_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
#else
                w[i] = MATRIX_A(s[i]);
#endif
            }
            [[unroll]] for (uint i = b * O_BLOCKS; i < b * O_BLOCKS + O_BLOCKS; i++) o[i] = o[i] * alpha;
        }
        // V is there, and K is used up; weights of other parts are there.
        barrier();
#if PARTS > 1
        [[unroll]] for (uint i = 0; i < P_BLOCKS; i++)
            coopMatLoad(w[i], p_tile, mine * P_STRIDE + i * (MM / 8), P_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
#endif
        fetch_v(v_chunk, values, batch, start + BC, any.y);
        [[unroll]] for (uint k = 0; k < P_BLOCKS; k++) {
            [[unroll]] for (uint i = 0; i < O_BLOCKS; i++) {
                MATRIX_B v;
                coopMatLoad(v, v_tile, k * MM * V_STRIDE + (first_block + i) * (MM / 8), V_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
                [[unroll]] for (uint b = 0; b < RB; b++)
                    o[b * O_BLOCKS + i] = coopMatMulAdd(w[b * P_BLOCKS + k], v, o[b * O_BLOCKS + i]);
            }
        }
        put_k(k_chunk);
#if MASK_STAGED
        put_mask(mask_chunk);
#endif
    }

#if SPLIT == 2
    if (split >= used) return;
    bool whole = used == 1;
#else
    bool whole = SPLIT == 0;
#endif
    [[unroll]] for (uint b = 0; b < RB; b++) {
        MATRIX_C sums;
        coopMatReduceNV(sums, row_sum[b], gl_CooperativeMatrixReduceRowNV, sum_of);
#if PARTS > 1
        barrier();
        coopMatPerElementNV(sums, sums, put_number, gl_SubgroupID);
        barrier();
        coopMatPerElementNV(sums, sums, sum_of_parts, gl_SubgroupID);
#endif
#if STAGED_ENDS
        coopMatPerElementNV(row_max[b], row_max[b], put_end, sums, mine + b * MM);
#else
        [[unroll]] for (uint i = b * O_BLOCKS; i < b * O_BLOCKS + O_BLOCKS; i++)
            coopMatPerElementNV(o[i], o[i], store, row_max[b], sums, MM * (first_block + i - b * O_BLOCKS), whole, split, THIS_BLOCK(b));
#endif
    }
#if STAGED_ENDS
    // The numbers of rows are there, and V is used up.
    barrier();
    uint stage = gl_SubgroupID * O_VECTORS;
    [[unroll]] for (uint i = 0; i < RB * O_BLOCKS; i++) {
        coopMatStore(o[i], v_tile, stage, MM / 4, gl_CooperativeMatrixLayoutRowMajor);
        subgroupBarrier();
        for (uint at = gl_SubgroupInvocationID; at < O_VECTORS; at += gl_SubgroupSize) {
            uint row = mine + i / O_BLOCKS * MM + at / (MM / 4), e = MM * (first_block + i % O_BLOCKS) + at % (MM / 4) * 4;
            store_four(uintBitsToFloat(v_tile[stage + at]), row, e, whole, split, kv_head, batch, first_row, rows);
        }
        subgroupBarrier();
    }
#endif

#if SPLIT == 2
    if (whole) return;
    if (!is_last_of(row_address(p.counters, (batch * gl_NumWorkGroups.y + kv_head) * p.tokens * RATIO + tile, 4), used)) return;
    for (uint i = t; i < rows * (HSV / 4); i += WG) {
        uint r = i / (HSV / 4), head = head_of(kv_head, first_row, i / (HSV / 4));
        combine(result_row(token_of(first_row, r), head, batch), head, i % (HSV / 4), used);
    }
#endif
}
