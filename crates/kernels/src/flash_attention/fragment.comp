// flash_attention of one token on matrix units, where the order of their components is known: ROWS heads that share a kv head are the
// rows of a matrix, MN keys its columns. Lanes load keys and values as they lie in the cache, decode them in registers and write them to
// components themselves (fragment.glsl). Components of sums are those of A fragments, so scores become weights where they were summed:
// there is no shared memory and no barrier in the loop.
// Every subgroup goes through tiles of its own; the next keys are loaded before these scores become weights, the next values behind
// the products of these. Rows past the last are zeros. Grid, splits and all that follows the loop: see teams.comp.
// With TOGETHER, a workgroup serves this many neighbouring sequences, and its matrices have rows for the heads of all of them. A tile whose
// rows of the cache several of them share, as those of a common beginning, is loaded and multiplied once for these (passes.glsl).
#version 450
#define GRID_WAIT_LATE 1
#include "kiln.glsl"
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_KHR_shader_subgroup_vote : require
#extension GL_KHR_shader_subgroup_ballot : require

#ifndef MEMORY_MODEL
#define MEMORY_MODEL 1
#endif
#include "fragment_layout.glsl"
layout(local_size_x = WG) in;
#include "formats.glsl"
#include "flash_attention/view.glsl"
#include "flash_attention/combine.glsl"
#define SUBGROUPS (WG / SG)
#include "flash_attention/merge.glsl"
// A software GPU takes minutes to compile loops that are unrolled.
#if FRAGMENT_LAYOUT == 0
#define STEP_LOOP [[unroll]]
#else
#define STEP_LOOP [[dont_unroll]]
#endif
#include "flash_attention/fragment.glsl"

#define MATRIX_A coopmat<float16_t, gl_ScopeSubgroup, MM, MK, gl_MatrixUseA>
#define MATRIX_B coopmat<float16_t, gl_ScopeSubgroup, MK, MN, gl_MatrixUseB>
#define MATRIX_C coopmat<float, gl_ScopeSubgroup, MM, MN, gl_MatrixUseAccumulator>

// Components of a lane that belong to one row, and lanes that share a row.
#define OF_ROW (8 / QUADS_OF_LANE)
#define ROW_LANES (MN / OF_ROW)
// Rows of a lane that may hold heads: those of the other half of a matrix are left alone.
#define USED_ROWS (FRAGMENT_LAYOUT == 0 && ALL_ROWS <= 8 ? 1 : QUADS_OF_LANE)
// The key of a component within its tile; the column of a sum is the same.
#define COLUMN(I) (FRAGMENT_LAYOUT == 0 ? key_of(quad_of(lane), I) : lane)
// Drivers keep matrices in registers only if every component is named by a number.
#if FRAGMENT_LAYOUT == 0
#define EACH_OF_ROW(DO, R) DO(R, 0) DO(R, 1) DO(R, 2) DO(R, 3)
#define EACH_ROW(DO) DO(0) DO(1)
#else
#define EACH_OF_ROW(DO, R) DO(R, 0)
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#endif

uint lane;
uvec2 keys, values;
#include "flash_attention/passes.glsl"

// Row of the cache for a key of a tile. Keys that are not seen stand for the nearest one that is: their weight is zero, and what is
// zero times whatever else lies there may be no number.
uint row_in_tile(Pass at, uint key) {
    return at.base + clamp(at.tile * MN + key, at.begin, at.end - 1) - at.tile * MN;
}

void load_keys(Pass at, out Part k[K_HELD]) {
    STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) {
        uvec2 row = row_address(keys, row_in_tile(at, row_of(lane, h)), p.k_stride[0]);
        STEP_LOOP for (uint n = 0; n < K_CHUNKS; n++) LOAD_KEY(k, (h * K_CHUNKS + n) * KEY_PARTS, row, lane, n)
    }
}

void load_values(Pass at, out Part v[V_HELD]) {
    STEP_LOOP for (uint i = 0; i < 4; i++) {
        uvec2 row = row_address(values, row_in_tile(at, key_of(quad_of(lane), i)), p.v_stride[0]);
        STEP_LOOP for (uint n = 0; n < V_CHUNKS; n++) LOAD_VALUE(v, (i * V_CHUNKS + n) * VALUE_PARTS, row, lane, n)
    }
}

void main() {
    lane = gl_SubgroupInvocationID;
    uint token = gl_WorkGroupID.x, group = gl_WorkGroupID.y, batch = gl_WorkGroupID.z % BATCHES * TOGETHER, split = gl_WorkGroupID.z / BATCHES;
    uint kv_head = group / GROUPS, first_row = group % GROUPS * ROWS, head = kv_head * RATIO + first_row;
    uint rows = min(uint(ROWS), RATIO - first_row) * min(uint(TOGETHER), BATCH - batch);
    keys = keys_at(kv_head, sequence_of(token, batch));
    values = values_at(kv_head, sequence_of(token, batch));
    uvec2 seen = see(token, batch);
    uint used = 1;
#if SPLIT
    uvec2 run = split_tiles(seen, split, used);
    seen = uvec2(max(run.x * BC, seen.x), min(run.y * BC, seen.y));
    see_only(seen);
#if SPLIT == 2
    if (split >= used) return;
#endif
#endif
    uint tiles = seen.x < seen.y ? (seen.y + MN - 1) / MN : 0;
    Pass at = first_pass(seen.x / MN + gl_SubgroupID, tiles);
    Part k[K_HELD];
    Part v[V_HELD];
#if CAUSAL
    // Keys of earlier tokens are there already; that of this token, the only one of its sequence here, is waited for.
    bool early = SEQUENCES == 0 && p.tokens == 1 && at.tile < tiles && int(min((at.tile + 1) * MN, at.end)) <= position_of(token, batch_of(at));
#else
    const bool early = false;
#endif
    if (early) {
        load_keys(at, k);
        load_values(at, v);
    }
    grid_wait();
    if (!early && at.tile < tiles) {
        load_keys(at, k);
        load_values(at, v);
    }

    MATRIX_A q[K_CHUNKS * K_STEPS];
    uvec2 queries = row_address(p.q, token, p.q_stride[0]);
    STEP_LOOP for (uint n = 0; n < K_CHUNKS; n++) {
        STEP_LOOP for (uint s = 0; s < K_STEPS; s++) {
            STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) {
                uint row = row_of(lane, h), near = min(row, rows - 1);
                uvec2 of_batch = row_address(queries, batch + near / ROWS, p.q_stride[2]);
                vec4 x = F32x4(row_address(of_batch, head + near % ROWS, p.q_stride[1])).v[key_element(lane, n, s) / 4];
                x = row < rows ? clamp(IN_ORDER(x) * SCALE, -65504.0, 65504.0) : vec4(0.0);
                f16vec2 pairs[2] = f16vec2[2](f16vec2(x.xy), f16vec2(x.zw));
                SET_QUAD(q[n * K_STEPS + s], h, pairs)
            }
        }
    }

    MATRIX_C o[V_CHUNKS * V_TILES];
    STEP_LOOP for (uint j = 0; j < V_CHUNKS * V_TILES; j++) o[j] = MATRIX_C(0.0);
    float row_max[QUADS_OF_LANE], row_sum[QUADS_OF_LANE];
    [[unroll]] for (uint r = 0; r < QUADS_OF_LANE; r++) {
        row_max[r] = HIDDEN;
        row_sum[r] = 0.0;
    }
    while (at.tile < tiles) {
        MATRIX_C score = MATRIX_C(0.0);
        STEP_LOOP for (uint n = 0; n < K_CHUNKS; n++) {
            STEP_LOOP for (uint s = 0; s < K_STEPS; s++) {
                MATRIX_B b;
                STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) {
                    f16vec2 pairs[2] = KEY_QUAD(k, (h * K_CHUNKS + n) * KEY_PARTS, lane, n, s);
                    SET_QUAD(b, h, pairs)
                }
                score = coopMatMulAdd(q[n * K_STEPS + s], b, score);
            }
        }
        // Past the last pass that one again, which is not used.
        Pass next = next_pass(at, tiles);
        Pass ahead = at;
        if (next.tile < tiles) ahead = next;
        load_keys(ahead, k);

        float alpha[QUADS_OF_LANE];
        bool moved = false;
        MATRIX_A w = MATRIX_A(0.0);
#define LOGIT(R, I)                                                                                      \
    {                                                                                                    \
        bool counts = is_seen(at, R, at.tile * MN + COLUMN(I));                                          \
        score[(R) * OF_ROW + I] = counts ? capped(score[(R) * OF_ROW + I]) : HIDDEN;                     \
        most = max(most, score[(R) * OF_ROW + I]);                                                       \
    }
#define WEIGHT(R, I)                                                                                     \
    {                                                                                                    \
        float16_t x = float16_t(weight(score[(R) * OF_ROW + I], most));                                  \
        all += float(x);                                                                                 \
        w[(R) * OF_ROW + I] = x;                                                                         \
    }
#define SOFTEN(R)                                                                                        \
    if (R < USED_ROWS) {                                                                                 \
        float most = row_max[R], all = 0.0;                                                                  \
        EACH_OF_ROW(LOGIT, R)                                                                            \
        [[unroll]] for (uint d = 1; d < ROW_LANES; d <<= 1) most = max(most, subgroupShuffleXor(most, d)); \
        EACH_OF_ROW(WEIGHT, R)                                                                           \
        alpha[R] = exp(row_max[R] - most);                                                                    \
        moved = moved || row_max[R] != most;                                                                 \
        row_max[R] = most;                                                                                   \
        row_sum[R] = row_sum[R] * alpha[R] + all;                                                         \
    }
        EACH_ROW(SOFTEN)
        if (subgroupAny(moved)) {
            STEP_LOOP for (uint j = 0; j < V_CHUNKS * V_TILES; j++) {
#define SHRINK(R, I) o[j][(R) * OF_ROW + I] *= alpha[R];
#define SHRINK_ROW(R) if (R < USED_ROWS) { EACH_OF_ROW(SHRINK, R) }
                EACH_ROW(SHRINK_ROW)
            }
        }
        STEP_LOOP for (uint n = 0; n < V_CHUNKS; n++) {
            STEP_LOOP for (uint j = 0; j < V_TILES; j++) {
                MATRIX_B b;
                STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) {
                    float16_t x[4];
                    STEP_LOOP for (uint i = 0; i < 4; i++) x[i] = VALUE(v, (i * V_CHUNKS + n) * VALUE_PARTS, n, j, h);
                    f16vec2 pairs[2] = f16vec2[2](f16vec2(x[0], x[1]), f16vec2(x[2], x[3]));
                    SET_QUAD(b, h, pairs)
                }
                o[n * V_TILES + j] = coopMatMulAdd(w, b, o[n * V_TILES + j]);
            }
        }
        load_values(ahead, v);
        at = next;
    }

#define LEAVE(R, I) put_merged(row, value_element(n, j, COLUMN(I)), o[n * V_TILES + j][(R) * OF_ROW + I]);
#define LEAVE_ROW(R)                                                                                     \
    if (R < USED_ROWS) {                                                                                 \
        float all = row_sum[R];                                                                          \
        [[unroll]] for (uint d = 1; d < ROW_LANES; d <<= 1) all += subgroupShuffleXor(all, d);             \
        uint row = row_of(lane, R);                                                                      \
        if (row < rows) {                                                                                \
            pairs_of[gl_SubgroupID * ALL_ROWS + row] = vec2(row_max[R], all);                                    \
            STEP_LOOP for (uint n = 0; n < V_CHUNKS; n++)                                               \
                STEP_LOOP for (uint j = 0; j < V_TILES; j++) { EACH_OF_ROW(LEAVE, R) }                    \
        }                                                                                                \
    }
    EACH_ROW(LEAVE_ROW)
    merge(Merging(token, batch, group, head, rows, split, used));
}
