// mul_mm on matrix units for a few tiles of columns: d[m, n] = scale * sum_k a[k, m] * b[k, n] (+ bias) (+ residual)
// a: F16, BF16 or blocks of any format; b: 16-bit columns from columns.comp in the order of matrices (order.glsl); d: F32 or F16.
// As in lanes.comp lanes decode weights in registers and write them to the components of matrices themselves. Columns go through shared
// memory: from two tiles of them on they are more bytes than the weights, and every row of matrices wants them all. So ROW_TILES subgroups
// with a row of matrices each share STAGED steps of columns, while the next ones are on their way in registers; one barrier a stage.
// SHARE such groups of a workgroup have every SHARE-th chunk of k, and with SPLIT workgroups share a tile in the same way: they leave
// their sums in p.partials, and the last one to finish adds them up. With EXPERTS, tiles of columns are those of a list.
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
#if SPLIT
#define STRIDE (SHARE * SPLITS)
#define MEMORY_MODEL 1
#include "last_one.glsl"
#include "mul_mm/last_sums.glsl"
#else
#define STRIDE SHARE
#endif
#include "mul_mm/weights.glsl"

// A stage of a group: for each tile of columns and each step the components of all lanes. Subgroups load lines of them in turn.
#define LINES (COLUMN_TILES * STAGED)
#define LINES_EACH ((LINES + ROW_TILES - 1) / ROW_TILES)
#define STAGE (SHARE * LINES * SG)
// Sums of all subgroups; `lanes.rs` counts the same.
#define SUMS (SHARE * ROW_TILES * MM * MN / 4)
shared uvec4 space[2 * STAGE > SUMS ? 2 * STAGE : SUMS];

#define HAS_LINE(I) (LINES % ROW_TILES == 0 || row_tile + (I) * ROW_TILES < LINES)
// The stage that begins with a step of unit U. Past the last chunk of k it is zeros.
#define LOAD_STAGE(U, STEP)                                                                        \
    {                                                                                              \
        uint chunk = chunk_of(U), at = (chunk * STEPS + (U) % UNITS * (UNIT / 4) + (STEP)) * SG;   \
        [[unroll]] for (uint i = 0; i < LINES_EACH; i++)                                           \
            on_way[i] = chunk < chunks && HAS_LINE(i) ? U32x4(p.b).v[lines[i] + at] : uvec4(0);    \
    }
#define STORE_STAGE(AT)                                                                            \
    [[unroll]] for (uint i = 0; i < LINES_EACH; i++)                                               \
        if (HAS_LINE(i)) space[(AT) + (row_tile + i * ROW_TILES) * SG] = on_way[i];

void main() {
    A_INIT();
    if (!find_tile()) return;
    lane = gl_SubgroupInvocationID;
    uint share = gl_SubgroupID % SHARE, row_tile = gl_SubgroupID / SHARE;
    number = share;
#if SPLIT
    number += tile_split * SHARE;
#endif
    STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) rows[h] = row_of_a(first_m + row_tile * MM + row_of(lane, h));
    // All groups and workgroups go as many rounds, so that they meet at every barrier.
    uint chunks = (p.k + CHUNK - 1) / CHUNK;
    units = (chunks + STRIDE - 1) / STRIDE * UNITS;
    MATRIX_C sum[COLUMN_TILES];
    [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) sum[j] = MATRIX_C(0.0);

    Words words[AHEAD + 1][QUADS_OF_LANE];
    [[unroll]] for (uint u = 0; u < AHEAD; u++) { FETCH(words[u], u) }
#if !EXPERTS
    await_inputs();
#endif
    prepare_finish();
    uint lines[LINES_EACH];
    [[unroll]] for (uint i = 0; i < LINES_EACH; i++) {
        uint line = row_tile + i * ROW_TILES;
#if EXPERTS
        uint tile = tile_number * COLUMN_TILES + line / STAGED;
#else
        uint tile = min(first_n / MN + line / STAGED, (end_n - 1) / MN);
#endif
        lines[i] = (tile * chunks_of(p.k) * STEPS + line % STAGED) * SG + lane;
    }
    uvec4 on_way[LINES_EACH];
    uint from = share * (LINES * SG) + lane, other = from + STAGE;
    LOAD_STAGE(0, 0)
    STORE_STAGE(from)
    barrier();
    for (uint u = 0; u < units; u++) {
        FETCH(words[AHEAD], u + AHEAD)
        [[unroll]] for (uint g = 0; g < UNIT / (4 * GROUP_STEPS); g++) {
            Group groups[QUADS_OF_LANE];
            STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) groups[h] = unfold(words[0][h], element(u), g);
            STEP_LOOP for (uint s = 0; s < GROUP_STEPS; s++) {
                uint step = g * GROUP_STEPS + s;
                if (step % STAGED == 0) {
                    if (step + STAGED < UNIT / 4) LOAD_STAGE(u, step + STAGED)
                    else LOAD_STAGE(u + 1, 0)
                }
                MATRIX_A a;
                STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) {
                    Pair pairs[2] = quad(groups[h], g, s);
                    SET_QUAD(a, h, pairs)
                }
                [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) {
                    uvec4 loaded = space[from + (j * STAGED + step % STAGED) * SG];
                    MATRIX_B b;
                    [[unroll]] for (uint e = 0; e < 4; e++) {
                        Pair pair = pair_of(loaded[e]);
                        b[2 * e] = pair.x;
                        b[2 * e + 1] = pair.y;
                    }
                    sum[j] = coopMatMulAdd(a, b, sum[j]);
                }
                if (step % STAGED == STAGED - 1) {
                    STORE_STAGE(other)
                    barrier();
                    uint swapped = from;
                    from = other;
                    other = swapped;
                }
            }
        }
        [[unroll]] for (uint w = 0; w < AHEAD; w++) words[w] = words[w + 1];
    }

    [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) {
        coopMatStore(sum[j], space, gl_SubgroupID * (MM * MN / 4), MM / 4, gl_CooperativeMatrixLayoutColumnMajor);
        barrier();
        for (uint at = gl_LocalInvocationIndex; at < ROW_TILES * MM * MN / 4; at += WG) {
            uint tile = at / (MM * MN / 4), in_tile = at % (MM * MN / 4), first = tile * SHARE * (MM * MN / 4) + in_tile;
            uint row = tile * MM + in_tile % (MM / 4) * 4, column = j * MN + in_tile / (MM / 4);
            vec4 all = uintBitsToFloat(space[first]);
            [[unroll]] for (uint w = 1; w < SHARE; w++) all += uintBitsToFloat(space[w * (MM * MN / 4) + first]);
            if (first_m + row < p.m && first_n + column < end_n) {
#if SPLIT
                Partials(partials_of(tile_split, first_n + column)).v[partial_four(first_m + row)] = all;
#else
                put_four(all, row, column);
#endif
            }
        }
        barrier();
    }
#if SPLIT
    if (!is_last_of(row_address(p.counters, tile_number, 4), SPLITS)) return;
    add_partials();
#endif
}
