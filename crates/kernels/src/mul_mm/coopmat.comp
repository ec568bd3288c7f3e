// mul_mm on matrix units (KHR cooperative matrices): d[m, n] = scale * sum_k a[k, m] * b[k, n] (+ bias) (+ residual)
// a: F16, BF16 or blocks of any format; b: 16-bit activations from pack_activations.comp, padded with zeros; d: F32 or F16.
// A workgroup computes TILE_M x TILE_N, each subgroup of SG threads WARP_M x WARP_N of it in matrices of MM x MN x MK
// with f32 sums, or f16 ones (HALF_SUMS). While a tile of DEPTH elements of k in shared memory is multiplied, the next PREFETCH ones are on their way in
// registers; they are turned into 16-bit floats when they are stored: beside the other with two STAGES, in its place with one, which leaves
// room for a deep tile, and small N need that: only many loads at once keep memory busy. Sums run over k in order,
// whatever the tile.
// With SPLIT, workgroups that share a tile leave their sums in p.partials, and the last one to finish adds them up, in the
// order of k, whichever workgroup is last. p.counters are zero before.
// A driver can keep arrays in registers only where it knows every index. So each loop over matrices is short enough to be
// unrolled, rows of sums are written out one by one (FINISH), and what fetches and what stores stands in one place of main.
// Before that an H200 multiplied at 29 TFLOP/s whatever the tile.
#version 450
#include "kiln.glsl"
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#if !HALF
#extension GL_EXT_bfloat16 : require
#endif

#define WARPS_M (TILE_M / WARP_M)
#define WG (SG * WARPS_M * (TILE_N / WARP_N))
layout(local_size_x = WG) in;
#include "formats.glsl"
#include "mul_mm/place.glsl"
#define STORE_TENSOR 0
#include "mul_mm/finish.glsl"

// A thread fetches 8 elements of b or of plain rows at a time, and groups of 32 of blocks: one, or a piece where the format
// has pieces, whose words stay as they are until they are stored.
#if A_BLOCKS && A_PIECE && DEPTH >= 32 * A_PIECE
#define UNIT_A (32 * A_PIECE)
#elif A_BLOCKS
#define UNIT_A 32
#define ONE_GROUP 1
#else
#define UNIT_A 8
#endif
#define UNITS_A (TILE_M * DEPTH / UNIT_A)
#define UNITS_B (TILE_N * DEPTH / 8)
#define PER_A ((UNITS_A + WG - 1) / WG)
#define PER_B ((UNITS_B + WG - 1) / WG)
// Eight elements in each vector; one vector more than the tile is deep keeps rows in different banks.
#define LINE (DEPTH / 8 + 1)
#define BUFFER ((TILE_M + TILE_N) * LINE)
#define ROWS (WARP_M / MM)
#define COLUMNS (WARP_N / MN)
// Sums of a row of matrices of all subgroups; `fits_coopmat` counts the same.
#define FINISHED (WG / SG * COLUMNS * MN * MM / 4)
shared uvec4 space[STAGES * BUFFER > FINISHED ? STAGES * BUFFER : FINISHED];

#if HALF_SUMS
#define SUM_TYPE float16_t
#else
#define SUM_TYPE float
#endif
#define MATRIX_A coopmat<ELEMENT, gl_ScopeSubgroup, MM, MK, gl_MatrixUseA>
#define MATRIX_B coopmat<ELEMENT, gl_ScopeSubgroup, MK, MN, gl_MatrixUseB>
#define MATRIX_C coopmat<SUM_TYPE, gl_ScopeSubgroup, MM, MN, gl_MatrixUseAccumulator>
#if HALF_SUMS
#define WIDE(SUM) coopmat<float, gl_ScopeSubgroup, MM, MN, gl_MatrixUseAccumulator>(SUM)
#else
#define WIDE(SUM) SUM
#endif

// Which row of the tile a unit belongs to. Eight neighbouring threads store at once, and their rows are such that all eight
// vectors lie in different banks: rows are 3 or 5 vectors apart. Deeper tiles have eight threads in a row.
uint spread(uint row) {
    uint j = row % 8;
#if DEPTH == 32
    return row - j + j / 2 + j % 2 * 4;
#else
    return row - j + j % 4 * 2 + j / 4;
#endif
}
#if A_BLOCKS || DEPTH >= 64
uint row_a_of(uint unit) { return unit / (DEPTH / UNIT_A); }
#else
uint row_a_of(uint unit) { return spread(unit / (DEPTH / UNIT_A)); }
#endif
#if DEPTH >= 64
uint row_b_of(uint unit) { return unit / (DEPTH / 8); }
#else
uint row_b_of(uint unit) { return spread(unit / (DEPTH / 8)); }
#endif
uint place_a(uint unit) { return unit % (DEPTH / UNIT_A); }
uint place_b(uint unit) { return unit % (DEPTH / 8); }

#if !A_BLOCKS
// 16-bit floats from element e on; past the end zeros, whatever lies there in memory.
uvec2 four_words(uvec2 row, uint e, uint end) {
#if VECTORS_A
    return e < end ? U32x2(row).v[e / 4] : uvec2(0);
#else
    uvec4 w = uvec4(0);
    [[unroll]] for (uint i = 0; i < 4; i++) if (e + i < end) w[i] = uint(U16(row).v[e + i]);
    return uvec2(w.x | w.y << 16, w.z | w.w << 16);
#endif
}
uvec4 eight(uvec2 row, uint e, uint end) {
#if WIDE_A
    return e < end ? U32x4(row).v[e / 8] : uvec4(0);
#else
    return uvec4(four_words(row, e, end), four_words(row, e + 4, end));
#endif
}
#endif

#if A_BLOCKS
// Four codes as 16-bit floats, with the same bits as weights that were decoded beforehand. Converting integers is slow on many GPUs: a code goes
// into a mantissa instead, which is exact.
#if ONE_GROUP || A_BIAS == 0
#define CENTRE 128
#else
#define CENTRE A_BIAS
#endif
uvec2 values(uint code, vec2 s) {
#if ONE_GROUP || A_BIAS == 0
    code ^= 0x80808080u;
#endif
#if HALF_SCALE
    // A code times a half is rounded once, in halves as in floats: so two of them are multiplied at once.
    f16vec2 even = unpackFloat2x16((code & 0x00ff00ffu) | 0x64006400u) - f16vec2(float16_t(1024 + CENTRE));
    f16vec2 odd = unpackFloat2x16((code >> 8 & 0x00ff00ffu) | 0x64006400u) - f16vec2(float16_t(1024 + CENTRE));
    even *= float16_t(s.x);
    odd *= float16_t(s.x);
    return uvec2(packFloat2x16(f16vec2(even.x, odd.x)), packFloat2x16(f16vec2(even.y, odd.y)));
#else
    uvec4 bytes = uvec4(code & 255u, (code >> 8) & 255u, (code >> 16) & 255u, code >> 24);
    precise vec4 v = (uintBitsToFloat(bytes | 0x4b000000u) - (8388608.0 + float(CENTRE))) * s.x;
#if A_HAS_MIN
    precise vec4 w = v + s.y;
    return uvec2(packHalf2x16(w.xy), packHalf2x16(w.zw));
#else
    return uvec2(packHalf2x16(v.xy), packHalf2x16(v.zw));
#endif
#endif
}
#endif

#if SPLIT
// Vectors of sums that a thread adds up at once.
#define FOURS (TILE_M / 4 * TILE_N % (4 * WG) == 0 ? 4 : TILE_M / 4 * TILE_N % (2 * WG) == 0 ? 2 : 1)
#define MEMORY_MODEL 1
#include "last_one.glsl"
#define SAME_LAUNCH 1
#include "mul_mm/partials.glsl"
#endif

uint warp_m, warp_n;

// What a subgroup has staged: sums of a row of its matrices, activations apart.
void finish_row(uint i) {
    uint stage = gl_SubgroupID * (COLUMNS * MN * MM / 4);
    for (uint at = gl_SubgroupInvocationID; at < COLUMNS * MN * MM / 4; at += SG) {
        uint row = warp_m + i * MM + at % (MM / 4) * 4, column = warp_n + at / (MM / 4);
        if (first_m + row >= p.m || first_n + column >= end_n) continue;
#if SPLIT
        Partials(partials_of(tile_split, first_n + column)).v[(first_m + row) / 4] = uintBitsToFloat(space[stage + at]);
#else
        put_four(uintBitsToFloat(space[stage + at]), row, column);
#endif
    }
}
// Which element a thread holds is the driver's secret, so matrices go through shared memory.
#define FINISH(I)                                                                                 \
    [[unroll]] for (uint j = 0; j < COLUMNS; j++)                                                 \
        coopMatStore(WIDE(sum[I][j]), space, (gl_SubgroupID * COLUMNS + j) * (MN * MM / 4), MM / 4, gl_CooperativeMatrixLayoutColumnMajor); \
    subgroupBarrier();                                                                            \
    finish_row(I);                                                                                \
    subgroupBarrier();

void main() {
    A_INIT();
    if (!find_tile()) return;
    prepare_finish();
    uint t = gl_LocalInvocationID.x;
    uvec2 row_a[PER_A], row_b[PER_B];
    [[unroll]] for (uint i = 0; i < PER_A; i++) row_a[i] = row_of_a(first_m + row_a_of(t + i * WG));
    [[unroll]] for (uint i = 0; i < PER_B; i++) row_b[i] = column_of_b(first_n + row_b_of(t + i * WG));
    warp_m = gl_SubgroupID % WARPS_M * WARP_M;
    warp_n = gl_SubgroupID / WARPS_M * WARP_N;
    // Tiles of experts often end early: subgroups without an activation vector only fetch.
#if EXPERTS
    bool works = first_n + warp_n < end_n;
#define WORKS works
#else
#define WORKS true
#endif
    MATRIX_C sum[ROWS][COLUMNS];
    [[unroll]] for (uint i = 0; i < ROWS; i++)
        [[unroll]] for (uint j = 0; j < COLUMNS; j++) sum[i][j] = MATRIX_C(0.0);

    // What is on its way.
#if ONE_GROUP
    uint group_codes[PREFETCH][PER_A][8];
    vec2 group_scales[PREFETCH][PER_A][2];
#elif A_BLOCKS
    A_PIECE_TYPE pieces[PREFETCH][PER_A];
#else
    uvec4 lines_a[PREFETCH][PER_A];
#endif
    uvec4 lines_b[PREFETCH][PER_B];
    uint begin_k = BEGIN_K, end_k = END_K;
    // Round by round, and PREFETCH more.
    for (uint k = begin_k; k < end_k + PREFETCH * DEPTH;) {
#define ON 0
#define OLDEST (PREFETCH - 1)
#define STORED 0
#include_again "mul_mm/round.glsl"
#if PREFETCH == 2 || STAGES == 2
#undef ON
#undef OLDEST
#undef STORED
#define ON (PREFETCH - 1)
#define OLDEST 0
#define STORED ((STAGES - 1) * BUFFER)
#include_again "mul_mm/round.glsl"
#endif
    }

    if (WORKS) {
        FINISH(0)
#if ROWS > 1
        FINISH(1)
#endif
#if ROWS > 2
        FINISH(2)
#endif
#if ROWS > 3
        FINISH(3)
#endif
#if ROWS > 4
        FINISH(4)
#endif
#if ROWS > 5
        FINISH(5)
#endif
#if ROWS > 6
        FINISH(6)
#endif
#if ROWS > 7
        FINISH(7)
#endif
    }
#if SPLIT
    if (!is_last_of(row_address(p.counters, tile_number, 4), p.splits)) return;
    for (uint first = t; first < TILE_M / 4 * TILE_N; first += FOURS * WG) {
        vec4 sums[FOURS];
        [[unroll]] for (uint i = 0; i < FOURS; i++) sums[i] = vec4(0);
        // All loads of a round at once; sums past the end are those of the last row and column, and not stored.
        for (uint from = 0; from < p.splits; from += 4) {
            vec4 got[FOURS][4];
            [[unroll]] for (uint i = 0; i < FOURS; i++) {
                uint at = first + i * WG, column = min(first_n + at / (TILE_M / 4), end_n - 1);
                uint four = min(first_m / 4 + at % (TILE_M / 4), (p.m - 1) / 4);
                [[unroll]] for (uint j = 0; j < 4; j++) got[i][j] = Partials(partials_of(min(from + j, p.splits - 1), column)).v[four];
            }
            [[unroll]] for (uint i = 0; i < FOURS; i++)
                [[unroll]] for (uint j = 0; j < 4; j++) if (from + j < p.splits) sums[i] += got[i][j];
        }
        [[unroll]] for (uint i = 0; i < FOURS; i++) {
            uint at = first + i * WG, row = at % (TILE_M / 4) * 4, column = at / (TILE_M / 4);
            if (first_m + row < p.m && first_n + column < end_n) put_four(sums[i], row, column);
        }
    }
#endif
}
