// mul_mm on matrix units (KHR cooperative matrices): d[m, n] = scale * sum_k a[k, m] * b[k, n] (+ bias) (+ residual)
// a: F16, BF16 or blocks of any format; b: 16-bit columns from columns.comp, padded with zeros; d: F32 or F16.
// A workgroup computes TILE_M x TILE_N, each subgroup of SG threads WARP_M x WARP_N of it in matrices of MM x MN x MK
// with f32 sums. Tiles of DEPTH elements of k lie in shared memory twice: while one is multiplied, the next is on its way
// in registers; it is turned into 16-bit floats when it is stored. Sums run over k in order, whatever the tile.
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

// A thread fetches 16 elements of a at a time, which share a scale in every format, and 8 of b.
#define UNITS_A (TILE_M * DEPTH / 16)
#define UNITS_B (TILE_N * DEPTH / 8)
#define PER_A ((UNITS_A + WG - 1) / WG)
#define PER_B ((UNITS_B + WG - 1) / WG)
// Eight elements in each vector; one vector more than the tile is deep keeps rows in different banks.
#define LINE (DEPTH / 8 + 1)
#define BUFFER ((TILE_M + TILE_N) * LINE)
shared uvec4 space[2 * BUFFER];

#define MATRIX_A coopmat<ELEMENT, gl_ScopeSubgroup, MM, MK, gl_MatrixUseA>
#define MATRIX_B coopmat<ELEMENT, gl_ScopeSubgroup, MK, MN, gl_MatrixUseB>
#define MATRIX_C coopmat<float, gl_ScopeSubgroup, MM, MN, gl_MatrixUseAccumulator>
#define ROWS (WARP_M / MM)
#define COLUMNS (WARP_N / MN)

uvec2 row_a[PER_A], row_b[PER_B];
#if A_BLOCKS
uint codes[PER_A][4];
vec2 scales[PER_A];
#else
uvec4 lines_a[PER_A][2];
#endif
uvec4 lines_b[PER_B];

uint place_a(uint unit) { return unit % (DEPTH / 16); }
uint place_b(uint unit) { return unit % (DEPTH / 8); }

#if !A_BLOCKS
// Four 16-bit floats from element e on; past the end zeros, whatever lies there in memory.
uvec2 four_words(uvec2 row, uint e) {
#if VECTORS_A
    return e < p.k ? U32x2(row).v[e / 4] : uvec2(0);
#else
    uvec4 w = uvec4(0);
    [[unroll]] for (uint i = 0; i < 4; i++) if (e + i < p.k) w[i] = uint(U16(row).v[e + i]);
    return uvec2(w.x | w.y << 16, w.z | w.w << 16);
#endif
}
#endif

// Starts the loads of the tile from element k on.
void fetch(uint k) {
    uint t = gl_LocalInvocationID.x;
    [[unroll]] for (uint i = 0; i < PER_A; i++) {
        uint e = k + 16 * place_a(t + i * WG);
#if A_BLOCKS
        // Blocks are whole groups of 32, and so is DEPTH or a part of it: nothing here lies past the end.
        if (UNITS_A % WG == 0 || t + i * WG < UNITS_A) {
            [[unroll]] for (uint j = 0; j < 4; j++) codes[i][j] = A_CODES4(row_a[i], e + 4 * j);
            scales[i] = A_SCALE(row_a[i], e);
        }
#else
        lines_a[i][0] = uvec4(four_words(row_a[i], e), four_words(row_a[i], e + 4));
        lines_a[i][1] = uvec4(four_words(row_a[i], e + 8), four_words(row_a[i], e + 12));
#endif
    }
    [[unroll]] for (uint i = 0; i < PER_B; i++) lines_b[i] = U32x4(row_b[i]).v[k / 8 + place_b(t + i * WG)];
}

#if A_BLOCKS
// `precise`: the same bits as weights that were decoded beforehand.
uvec2 values(uint code, vec2 s) {
    precise vec4 v = signed_bytes(code) * s.x;
#if A_SHIFTED
    precise vec4 w = v + s.y;
    return uvec2(packHalf2x16(w.xy), packHalf2x16(w.zw));
#else
    return uvec2(packHalf2x16(v.xy), packHalf2x16(v.zw));
#endif
}
#endif

// Puts what was fetched into a buffer.
void put(uint buffer_start) {
    uint t = gl_LocalInvocationID.x;
    [[unroll]] for (uint i = 0; i < PER_A; i++) {
        uint unit = t + i * WG;
        if (UNITS_A % WG != 0 && unit >= UNITS_A) break;
        uint at = buffer_start + unit / (DEPTH / 16) * LINE + 2 * place_a(unit);
#if A_BLOCKS
        space[at] = uvec4(values(codes[i][0], scales[i]), values(codes[i][1], scales[i]));
        space[at + 1] = uvec4(values(codes[i][2], scales[i]), values(codes[i][3], scales[i]));
#else
        space[at] = lines_a[i][0];
        space[at + 1] = lines_a[i][1];
#endif
    }
    [[unroll]] for (uint i = 0; i < PER_B; i++) {
        uint unit = t + i * WG;
        if (UNITS_B % WG != 0 && unit >= UNITS_B) break;
        space[buffer_start + (TILE_M + unit / (DEPTH / 8)) * LINE + place_b(unit)] = lines_b[i];
    }
}

void main() {
    A_INIT();
    if (!find_tile()) return;
    uint t = gl_LocalInvocationID.x;
    [[unroll]] for (uint i = 0; i < PER_A; i++) row_a[i] = row_of_a(first_m + (t + i * WG) / (DEPTH / 16));
    [[unroll]] for (uint i = 0; i < PER_B; i++) row_b[i] = column_of_b(first_n + (t + i * WG) / (DEPTH / 8));
    uint warp_m = gl_SubgroupID % WARPS_M * WARP_M, warp_n = gl_SubgroupID / WARPS_M * WARP_N;

    MATRIX_C sum[ROWS][COLUMNS];
    [[unroll]] for (uint i = 0; i < ROWS; i++)
        [[unroll]] for (uint j = 0; j < COLUMNS; j++) sum[i][j] = MATRIX_C(0.0);

    fetch(0);
    put(0);
    uint buffer_start = 0;
    for (uint k = 0; k < p.k; k += DEPTH) {
        barrier();
        bool more = k + DEPTH < p.k;
        if (more) fetch(k + DEPTH);
        [[unroll]] for (uint e = 0; e < DEPTH; e += MK) {
            MATRIX_A a[ROWS];
            [[unroll]] for (uint i = 0; i < ROWS; i++) {
                uint at = buffer_start + (warp_m + i * MM) * LINE + e / 8;
                coopMatLoad(a[i], space, at, LINE, gl_CooperativeMatrixLayoutRowMajor);
            }
            [[unroll]] for (uint j = 0; j < COLUMNS; j++) {
                MATRIX_B b;
                uint at = buffer_start + (TILE_M + warp_n + j * MN) * LINE + e / 8;
                coopMatLoad(b, space, at, LINE, gl_CooperativeMatrixLayoutColumnMajor);
                [[unroll]] for (uint i = 0; i < ROWS; i++) sum[i][j] = coopMatMulAdd(a[i], b, sum[i][j]);
            }
        }
        buffer_start = BUFFER - buffer_start;
        if (more) put(buffer_start);
    }
    barrier();

    // Which element a thread holds is the driver's secret, so each matrix goes through shared memory, columns apart.
    uint stage = gl_SubgroupID * (MM * MN / 4);
    [[unroll]] for (uint i = 0; i < ROWS; i++) {
        [[unroll]] for (uint j = 0; j < COLUMNS; j++) {
            coopMatStore(sum[i][j], space, stage, MM / 4, gl_CooperativeMatrixLayoutColumnMajor);
            subgroupBarrier();
            for (uint at = gl_SubgroupInvocationID; at < MM * MN; at += SG) {
                uint m = first_m + warp_m + i * MM + at % MM, n = first_n + warp_n + j * MN + at / MM;
                float value = uintBitsToFloat(space[stage + at / 4][at % 4]);
                if (m < p.m && n < end_n) STORE_D(column_of_d(n), m, finish(value, m, n));
            }
            subgroupBarrier();
        }
    }
}
