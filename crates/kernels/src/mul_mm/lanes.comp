// mul_mm on matrix units for few columns: d[m, n] = scale * sum_k a[k, m] * b[k, n] (+ bias) (+ residual)
// a: F16, BF16 or blocks of any format; b: 16-bit columns from columns.comp in the order of matrices (order.glsl); d: F32 or F16.
// Lanes decode weights in registers and write them to the components of matrices themselves: nothing goes through shared
// memory, and no subgroup waits for another before its sums are complete. With EXPERTS, tiles of columns are those of a list.
// A workgroup computes ROW_TILES x COLUMN_TILES matrices. SHARE subgroups share the chunks of k of a row of them, each one takes every
// SHARE-th, with AHEAD more units of weights on their way than it works on. Their sums are added in order, through shared memory, at the
// end. Rows of matrices have subgroups of their own, which find columns in the core's cache that others have just loaded.
#version 450
#if !EXPERTS
// The first weights are fetched before the kernel waits for what makes the columns.
#define HANDOVER_LATE 1
#endif
#include "kiln.glsl"
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#if !HALF
#extension GL_EXT_bfloat16 : require
#endif

#include "mul_mm/order.glsl"
#define WG (SG * SHARE * ROW_TILES)
layout(local_size_x = WG) in;
#define TILE_M (MM * ROW_TILES)
#define TILE_N (MN * COLUMN_TILES)
#include "formats.glsl"
#include "mul_mm/place.glsl"
#define STORE_TENSOR 0
#include "mul_mm/finish.glsl"

shared vec4 subgroup_sums[ROW_TILES * SHARE * MM * MN / 4];

#define STRIDE SHARE
#include "mul_mm/weights.glsl"

// Steps whose columns are loaded at once.
#if COLUMN_TILES == 2 && SG == 32
#define COLUMNS_AT_ONCE 4
#else
#define COLUMNS_AT_ONCE 1
#endif
#define LOAD_COLUMNS(INTO, STEP)                                               \
    [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) loaded[INTO][j] = U32x4(columns[j]).v[(STEP) * SG];

void main() {
    A_INIT();
    if (!find_tile()) return;
    lane = gl_SubgroupInvocationID;
    number = gl_SubgroupID % SHARE;
    uint first_row = gl_SubgroupID / SHARE * MM;
    STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) rows[h] = row_of_a(first_m + first_row + row_of(lane, h));
    uint chunks = (p.k + CHUNK - 1) / CHUNK;
    units = number < chunks ? (chunks - number + SHARE - 1) / SHARE * UNITS : 0;
    MATRIX_C sum[COLUMN_TILES];
    [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) sum[j] = MATRIX_C(0.0);

    Words words[AHEAD + 1][QUADS_OF_LANE];
    [[unroll]] for (uint u = 0; u < AHEAD; u++) { FETCH(words[u], u) }
#if !EXPERTS
    await_inputs();
#endif
    prepare_finish();
    for (uint u = 0; u < units; u++) {
        FETCH(words[AHEAD], u + AHEAD)
        uvec2 columns[COLUMN_TILES];
        [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) {
#if EXPERTS
            uint tile = tile_number * COLUMN_TILES + j;
#else
            uint tile = min(first_n / MN + j, (end_n - 1) / MN);
#endif
            uint step = (tile * chunks_of(p.k) + chunk_of(u)) * STEPS + u % UNITS * (UNIT / 4);
            columns[j] = row_address(p.b, step * SG + lane, 16);
        }
        uvec4 loaded[COLUMNS_AT_ONCE][COLUMN_TILES];
        [[unroll]] for (uint g = 0; g < UNIT / (4 * GROUP_STEPS); g++) {
            Group groups[QUADS_OF_LANE];
            STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) groups[h] = unfold(words[0][h], element(u), g);
            STEP_LOOP for (uint s = 0; s < GROUP_STEPS; s++) {
#if COLUMNS_AT_ONCE > 1
                if (s % COLUMNS_AT_ONCE == 0)
                    [[unroll]] for (uint t = 0; t < COLUMNS_AT_ONCE; t++) { LOAD_COLUMNS(t, g * GROUP_STEPS + s + t) }
#endif
                MATRIX_A a;
                STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) {
                    Pair pairs[2] = quad(groups[h], g, s);
                    SET_QUAD(a, h, pairs)
                }
#if COLUMNS_AT_ONCE == 1
                LOAD_COLUMNS(0, g * GROUP_STEPS + s)
#endif
                [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) {
                    MATRIX_B b;
                    [[unroll]] for (uint e = 0; e < 4; e++) {
                        Pair pair = pair_of(loaded[s % COLUMNS_AT_ONCE][j][e]);
                        b[2 * e] = pair.x;
                        b[2 * e + 1] = pair.y;
                    }
                    sum[j] = coopMatMulAdd(a, b, sum[j]);
                }
            }
        }
        [[unroll]] for (uint w = 0; w < AHEAD; w++) words[w] = words[w + 1];
    }

    [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) {
        coopMatStore(sum[j], subgroup_sums, gl_SubgroupID * (MM * MN / 4), MM / 4, gl_CooperativeMatrixLayoutColumnMajor);
        barrier();
        for (uint at = gl_LocalInvocationID.x; at < ROW_TILES * MM * MN / 4; at += WG) {
            uint tile = at / (MM * MN / 4), in_tile = at % (MM * MN / 4), first = tile * SHARE * (MM * MN / 4) + in_tile;
            uint row = tile * MM + in_tile % (MM / 4) * 4, column = j * MN + in_tile / (MM / 4);
            vec4 all = subgroup_sums[first];
            [[unroll]] for (uint w = 1; w < SHARE; w++) all += subgroup_sums[w * (MM * MN / 4) + first];
            if (first_m + row < p.m && first_n + column < end_n) put_four(all, row, column);
        }
        barrier();
    }
}
