// flash_attention of many rows on matrix units whose components lanes write themselves, where their order is known. Each of NW subgroups
// has RB blocks of MM rows of the tile, and everything of these stays in its registers: Q (some of it, with Q_SHARED, in shared memory where no
// other lane reads it), scores, weights and O. Components of sums are those of A fragments, so scores become weights where they were
// summed. A row is a token and one of the RATIO heads of the kv head.
// Rounds of BC keys. Lanes load keys and values as they lie in the cache, and several subgroups of a core find them in its cache; or the
// workgroup puts them into shared memory once, as lanes hold them (K_STAGED, V_STAGED; tiles in fragment_prefill.glsl): two rounds in turn,
// the next one on its way while this one is multiplied, one barrier for each.
// Logits are to the base 2. A row's maximum moves where a logit is RISE above it: until then weights may be above 1, which halves
// have room for. Rounds that all rows of a subgroup see in full run no mask. The longest tiles of a causal mask come first.
// With SEQUENCES, rows of several sequences are in a tile, and each of these is gone through for itself.
// Grid: (tile * splits + split, kv head, batch).
#version 450
#include "kiln.glsl"
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_KHR_shader_subgroup_vote : require

#ifndef MEMORY_MODEL
#define MEMORY_MODEL 1
#endif
#define HALVES
#include "fragment_layout.glsl"
layout(local_size_x = WG) in;
#include "formats.glsl"
#include "flash_attention/view.glsl"
#include "flash_attention/eight.glsl"
#include "flash_attention/combine.glsl"
#if SPLIT == 2
#include "last_one.glsl"
#endif
// A software GPU takes minutes to compile loops that are unrolled.
#if FRAGMENT_LAYOUT == 0
#define STEP_LOOP [[unroll]]
#else
#define STEP_LOOP [[dont_unroll]]
#endif
// Block formats become half floats on their way to shared memory.
#define CODES 0
#include "flash_attention/fragment.glsl"

#define MATRIX_A coopmat<float16_t, gl_ScopeSubgroup, MM, MK, gl_MatrixUseA>
#define MATRIX_B coopmat<float16_t, gl_ScopeSubgroup, MK, MN, gl_MatrixUseB>
#define MATRIX_C coopmat<float, gl_ScopeSubgroup, MM, MN, gl_MatrixUseAccumulator>

#define SUBGROUP_ROWS (RB * MM)
#define ROWS (NW * SUBGROUP_ROWS)
#define BLOCKS (BC / MN)
// Matrices of Q for a block of rows, of which those of the first Q_SHARED chunks are in shared memory.
#define Q_PUT (Q_SHARED * K_STEPS)
#define Q_KEPT ((K_CHUNKS - Q_SHARED) * K_STEPS)
#define O_MATRICES (V_CHUNKS * V_TILES)
// Rows of a lane, components of one of them, and lanes that share a row.
#define LANE_ROWS (RB * QUADS_OF_LANE)
#define OF_ROW (8 / QUADS_OF_LANE)
#define ROW_LANES (MN / OF_ROW)
// The key of a component within its block; the column of a sum is the same.
#define COLUMN(I) (FRAGMENT_LAYOUT == 0 ? key_of(quad_of(lane), I) : lane)
// Drivers keep matrices in registers only if every component is named by a number.
#if FRAGMENT_LAYOUT == 0
#define EACH_OF_ROW(DO, R) DO(R, 0) DO(R, 1) DO(R, 2) DO(R, 3)
#define EACH_ROW(DO) DO(0) DO(1)
#else
#define EACH_OF_ROW(DO, R) DO(R, 0)
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#endif
#define SET_ALL(M, X)                                                          \
    {                                                                          \
        uvec4 words = X;                                                       \
        f16vec2 a = unpackFloat2x16(words.x), b = unpackFloat2x16(words.y);    \
        f16vec2 c = unpackFloat2x16(words.z), d = unpackFloat2x16(words.w);    \
        M[0] = a.x;                                                            \
        M[1] = a.y;                                                            \
        M[2] = b.x;                                                            \
        M[3] = b.y;                                                            \
        M[4] = c.x;                                                            \
        M[5] = c.y;                                                            \
        M[6] = d.x;                                                            \
        M[7] = d.y;                                                            \
    }

const float LOG2_E = 1.44269504;
// Where maxima start: far below any logit and far above HIDDEN, so that hidden keys weigh nothing without being asked for.
const float FLOOR = -1e30;
const float RISE = 8.0;

uint lane, t, kv_head, batch, first_row, rows, mine;
uvec2 keys, values;
uint sequence;
// First and end of the keys visible to any of the subgroups that load together.
uint lowest, highest;

uint token_of(uint row) { return (first_row + row) / RATIO; }
uint head_of(uint row) { return kv_head * RATIO + (first_row + row) % RATIO; }
uint near(uint row) { return min(row, rows - 1); }
#include "flash_attention/fragment_prefill.glsl"

// What a row sees: past the last row what that does, in a run of rows of one sequence nothing outside of it.
uvec2 seen_by(uint row, uvec2 run) {
    if (row < run.x || row >= run.y) return uvec2(0);
    uvec2 seen = keys_of(token_of(near(row)), batch, length_of(sequence));
    return seen.x < seen.y ? seen : uvec2(0);
}

// Of `count` rows from `first` on: the first key any of them sees, the one after the last, and the same of what all of them see.
uvec4 sight_of(uint first, uint count, uvec2 run) {
    uvec4 sight = uvec4(0xffffffffu, 0, 0, 0xffffffffu);
    for (uint r = lane; r < count; r += SG) {
        uvec2 seen = seen_by(first + r, run);
        if (seen.x < seen.y) sight.xy = uvec2(min(sight.x, seen.x), max(sight.y, seen.y));
        sight.zw = uvec2(max(sight.z, seen.x), min(sight.w, seen.y));
    }
    [[unroll]] for (uint d = 1; d < SG; d <<= 1) {
        uvec4 other = subgroupShuffleXor(sight, d);
        sight = uvec4(min(sight.x, other.x), max(sight.y, other.y), max(sight.z, other.z), min(sight.w, other.w));
    }
    return sight.x < sight.y ? sight : uvec4(0, 0, sight.zw);
}

#if SEQUENCES
// The row after the last one of the sequence that row `first` belongs to, at most `last`.
uint end_of_run(uint first, uint last) {
    uint end = last;
    for (uint r = first + lane; r < last; r += SG)
        if (sequence_of(token_of(near(r)), batch) != sequence) end = min(end, r);
    [[unroll]] for (uint d = 1; d < SG; d <<= 1) end = min(end, subgroupShuffleXor(end, d));
    return end;
}
#endif

// Elements of a query as halves, scaled: what the lane has of matrix m of a block of rows.
uint query_pair(uint row, vec2 x) {
#if SOFTCAP
    x *= SCALE;
#else
    x *= SCALE * LOG2_E;
#endif
    x = clamp(x, vec2(-65504.0), vec2(65504.0));
    return row < rows ? packFloat2x16(f16vec2(x)) : 0u;
}
uvec2 query_row(uint row) {
    uvec2 at = row_address(p.q, token_of(near(row)), p.q_stride[0]);
    return row_address(row_address(at, head_of(near(row)), p.q_stride[1]), batch, p.q_stride[2]);
}
uvec4 query(uint first, uint m) {
    uint e = key_element(lane, m / K_STEPS, m % K_STEPS);
    uvec4 words;
#if FRAGMENT_LAYOUT == 0
    [[unroll]] for (uint h = 0; h < 2; h++) {
        uint row = first + row_of(lane, h);
        vec4 x = K_IN_ORDER(F32x4(query_row(row)).v[e / 4]);
        words[2 * h] = query_pair(row, x.xy);
        words[2 * h + 1] = query_pair(row, x.zw);
    }
#else
    e += K_IN_ORDER(uvec4(0, 1, 2, 3))[lane % 4];
    for (uint h = 0; h < 4; h++) {
        uint low = query_pair(first + 2 * h, vec2(F32(query_row(first + 2 * h)).v[e]));
        uint high = query_pair(first + 2 * h + 1, vec2(F32(query_row(first + 2 * h + 1)).v[e]));
        words[h] = low & 0xffffu | high << 16;
    }
#endif
    return words;
}

// Stores the sums of a row, or the partial result of a split.
void put_four(uvec2 to, uint e, vec4 x) { F32x4(to).v[e / 4] = x; }

void main() {
    K_INIT();
    V_INIT();
    lane = gl_SubgroupInvocationID;
    t = gl_SubgroupID * SG + lane;
    batch = gl_WorkGroupID.z;
    // Tiles of all kv heads from the last one on: under a causal mask these are the longest.
    uint number = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    kv_head = number % gl_NumWorkGroups.y;
    uint tile = gl_NumWorkGroups.x - 1 - number / gl_NumWorkGroups.y;
    uint split = 0, used = 1;
#if SPLIT
    split = tile % p.splits;
    tile /= p.splits;
#endif
    first_row = tile * ROWS;
    rows = min(uint(ROWS), p.tokens * RATIO - first_row);
    mine = gl_SubgroupID * SUBGROUP_ROWS;

#if Q_SHARED
    STEP_LOOP for (uint m = 0; m < RB * Q_PUT; m++) q_tile[Q_AT(m)] = query(mine + m / Q_PUT * MM, m % Q_PUT);
#endif
#if Q_SHARED < K_CHUNKS
    MATRIX_A q[RB * Q_KEPT];
    STEP_LOOP for (uint m = 0; m < RB * Q_KEPT; m++) SET_ALL(q[m], query(mine + m / Q_KEPT * MM, Q_PUT + m % Q_KEPT))
#endif
    MATRIX_C o[RB * O_MATRICES];
    STEP_LOOP for (uint i = 0; i < RB * O_MATRICES; i++) o[i] = MATRIX_C(0.0);
    float row_max[LANE_ROWS], row_sum[LANE_ROWS];
    [[unroll]] for (uint r = 0; r < LANE_ROWS; r++) {
        row_max[r] = FLOOR;
        row_sum[r] = 0.0;
    }
#if MASK
    uvec2 terms_at[LANE_ROWS];
    [[unroll]] for (uint r = 0; r < LANE_ROWS; r++) {
        uint row = near(mine + r / QUADS_OF_LANE * MM + row_of(lane, r % QUADS_OF_LANE));
        terms_at[r] = mask_row(token_of(row), head_of(row), batch);
    }
#endif

#if SEQUENCES
    // Subgroups that load together iterate over the sequences of all of their rows.
    uint from = STAGED == 1 ? 0 : mine, last = min(rows, STAGED == 1 ? uint(ROWS) : mine + SUBGROUP_ROWS);
    for (; from < last;) {
        sequence = sequence_of(token_of(from), batch);
        uvec2 run = uvec2(from, end_of_run(from, last));
        from = run.y;
        // Rows past the last belong to no sequence.
#else
    {
        sequence = batch;
        const uvec2 run = uvec2(0, ROWS);
#endif
        keys = keys_at(kv_head, sequence);
        values = values_at(kv_head, sequence);
        uvec4 own = sight_of(mine, SUBGROUP_ROWS, run);
#if STAGED || SPLIT
        uvec4 any = sight_of(0, ROWS, run);
#else
        uvec4 any = own;
#endif
        lowest = any.x;
        // At least one key; its row is not loaded if no query sees it.
        highest = max(any.y, 1u);
        uvec2 rounds = uvec2(any.x / BC, (any.y + BC - 1) / BC);
        if (any.x >= any.y) rounds = uvec2(0);
#if SPLIT
        rounds = split_tiles(any.xy, split, used);
        if (any.x >= any.y) rounds = uvec2(0);
#endif
        uint begin[LANE_ROWS], end[LANE_ROWS];
        [[unroll]] for (uint r = 0; r < LANE_ROWS; r++) {
            uvec2 seen = seen_by(mine + r / QUADS_OF_LANE * MM + row_of(lane, r % QUADS_OF_LANE), run);
            begin[r] = seen.x;
            end[r] = seen.y;
        }

        STAGED_PARTS
        if (rounds.x < rounds.y) {
            FETCH(rounds.x * BC)
            PUT(rounds.x)
        }
        MEET
        for (uint round = rounds.x; round < rounds.y; round++) {
            uint start = round * BC;
            if (round + 1 < rounds.y) { FETCH(start + BC) }
            if (start < own.y && start + BC > own.x) {
#if MASK && FRAGMENT_LAYOUT == 0
                uint terms[LANE_ROWS * BLOCKS * 2];
                [[unroll]] for (uint r = 0; r < LANE_ROWS; r++)
                    [[unroll]] for (uint i = 0; i < BLOCKS * 2; i++)
                        terms[r * BLOCKS * 2 + i] = U32(terms_at[r]).v[min(start / 2 + 4 * i + quad_of(lane), p.keys / 2 - 1)];
#endif
                MATRIX_C s[RB * BLOCKS];
                STEP_LOOP for (uint i = 0; i < RB * BLOCKS; i++) s[i] = MATRIX_C(0.0);
                KEY_ROWS(start)
                STEP_LOOP for (uint n = 0; n < K_CHUNKS; n++) {
                    MATRIX_A of_q[RB * K_STEPS];
                    STEP_LOOP for (uint i = 0; i < RB * K_STEPS; i++) {
#if Q_SHARED
                        if (n < Q_SHARED) SET_ALL(of_q[i], q_tile[Q_AT(i / K_STEPS * Q_PUT + n * K_STEPS + i % K_STEPS)])
#endif
#if Q_SHARED < K_CHUNKS
                        if (n >= Q_SHARED) of_q[i] = q[i / K_STEPS * Q_KEPT + (n - Q_SHARED) * K_STEPS + i % K_STEPS];
#endif
                    }
                    STEP_LOOP for (uint c = 0; c < BLOCKS; c++) {
                        uvec4 k[QUADS_OF_LANE];
                        STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) k[h] = KEY_PART(round, c, h, n);
                        STEP_LOOP for (uint i = 0; i < K_STEPS; i++) {
                            MATRIX_B m;
                            STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) {
                                f16vec2 pairs[2] = quad_of_halves(k[h][2 * i], k[h][2 * i + 1]);
                                SET_QUAD(m, h, pairs)
                            }
                            STEP_LOOP for (uint b = 0; b < RB; b++)
                                s[b * BLOCKS + c] = coopMatMulAdd(of_q[b * K_STEPS + i], m, s[b * BLOCKS + c]);
                        }
                    }
                }

#if SOFTCAP
#define SOFTEN(R, I) s[i][(R) * OF_ROW + I] = capped(s[i][(R) * OF_ROW + I]) * LOG2_E;
#define SOFTEN_ROW(R) EACH_OF_ROW(SOFTEN, R)
                STEP_LOOP for (uint i = 0; i < RB * BLOCKS; i++) { EACH_ROW(SOFTEN_ROW) }
#endif
#if MASK && FRAGMENT_LAYOUT == 0
// What is hidden becomes minus infinity, and weighs nothing beside FLOOR.
#define ADD(R, I)                                                                                        \
    s[b * BLOCKS + c][(R) * 4 + I] += LOG2_E * float(unpackFloat2x16(terms[((b * 2 + R) * BLOCKS + c) * 2 + I / 2])[I % 2]);
#define ADD_ROW(R) EACH_OF_ROW(ADD, R)
#elif MASK
#define ADD(R, I)                                                                                        \
    s[b * BLOCKS + c][(R) * OF_ROW + I] += LOG2_E * load_f16(terms_at[b * QUADS_OF_LANE + R], min(start + c * MN + COLUMN(I), p.keys - 1));
#define ADD_ROW(R) EACH_OF_ROW(ADD, R)
#endif
#if MASK
                STEP_LOOP for (uint b = 0; b < RB; b++)
                    STEP_LOOP for (uint c = 0; c < BLOCKS; c++) { EACH_ROW(ADD_ROW) }
#endif
                if (start < own.z || start + BC > own.w) {
#define HIDE(R, I)                                                                                       \
    {                                                                                                    \
        uint key = start + c * MN + COLUMN(I);                                                           \
        if (key < begin[b * QUADS_OF_LANE + R] || key >= end[b * QUADS_OF_LANE + R]) s[b * BLOCKS + c][(R) * OF_ROW + I] = HIDDEN; \
    }
#define HIDE_ROW(R) EACH_OF_ROW(HIDE, R)
                    STEP_LOOP for (uint b = 0; b < RB; b++)
                        STEP_LOOP for (uint c = 0; c < BLOCKS; c++) { EACH_ROW(HIDE_ROW) }
                }

                MATRIX_A w[RB * BLOCKS];
                float alpha[LANE_ROWS];
                bool moved = false;
#define MOST(R, I) most = max(most, s[b * BLOCKS + c][(R) * OF_ROW + I]);
#define WEIGH(R, I)                                                                                      \
    {                                                                                                    \
        float x = exp2(s[b * BLOCKS + c][(R) * OF_ROW + I] - row_max[b * QUADS_OF_LANE + R]);                \
        all += x;                                                                                        \
        w[b * BLOCKS + c][(R) * OF_ROW + I] = float16_t(x);                                              \
    }
#define WEIGH_ROW(R)                                                                                     \
    {                                                                                                    \
        float most = HIDDEN, all = 0.0, before = row_max[b * QUADS_OF_LANE + R];                             \
        STEP_LOOP for (uint c = 0; c < BLOCKS; c++) { EACH_OF_ROW(MOST, R) }                             \
        [[unroll]] for (uint d = 1; d < ROW_LANES; d <<= 1) most = max(most, subgroupShuffleXor(most, d)); \
        bool up = most > before + RISE;                                                                  \
        moved = moved || up;                                                                             \
        row_max[b * QUADS_OF_LANE + R] = up ? most : before;                                                 \
        alpha[b * QUADS_OF_LANE + R] = up ? exp2(before - most) : 1.0;                                    \
        STEP_LOOP for (uint c = 0; c < BLOCKS; c++) { EACH_OF_ROW(WEIGH, R) }                            \
        row_sum[b * QUADS_OF_LANE + R] = row_sum[b * QUADS_OF_LANE + R] * alpha[b * QUADS_OF_LANE + R] + all; \
    }
                STEP_LOOP for (uint b = 0; b < RB; b++) { EACH_ROW(WEIGH_ROW) }
                if (subgroupAny(moved)) {
#define SHRINK(R, I) o[b * O_MATRICES + i][(R) * OF_ROW + I] *= alpha[b * QUADS_OF_LANE + R];
#define SHRINK_ROW(R) EACH_OF_ROW(SHRINK, R)
                    STEP_LOOP for (uint b = 0; b < RB; b++)
                        STEP_LOOP for (uint i = 0; i < O_MATRICES; i++) { EACH_ROW(SHRINK_ROW) }
                }

                STEP_LOOP for (uint c = 0; c < BLOCKS; c++) {
                    VALUE_ROWS(start, c)
                    STEP_LOOP for (uint n = 0; n < V_CHUNKS; n++) {
                        VALUE_PARTS_OF(c, n)
                        STEP_LOOP for (uint j = 0; j < V_TILES; j++) {
                            MATRIX_B m;
                            SET_ALL(m, VALUE_PART(round, c, n, j))
                            STEP_LOOP for (uint b = 0; b < RB; b++)
                                o[b * O_MATRICES + n * V_TILES + j] = coopMatMulAdd(w[b * BLOCKS + c], m, o[b * O_MATRICES + n * V_TILES + j]);
                        }
                    }
                }
            }
            if (round + 1 < rounds.y) { PUT(round + 1) }
            MEET
        }
    }

#if SPLIT == 2
    if (split >= used) return;
    bool whole = used == 1;
#else
    bool whole = SPLIT == 0;
#endif
#if FRAGMENT_LAYOUT == 0
// A lane has 16 neighbouring elements of each 64.
#define LEAVE(R)                                                                                         \
    STEP_LOOP for (uint n = 0; n < V_CHUNKS; n++) {                                                      \
        LEAVE_EIGHT(R, 0)                                                                                \
        LEAVE_EIGHT(R, 1)                                                                                \
    }
#define LEAVE_EIGHT(R, U)                                                                                \
    LEAVE_FOUR(R, U, 0)                                                                                  \
    LEAVE_FOUR(R, U, 2)
#define O_AT(J, I) o[b * O_MATRICES + n * V_TILES + J][I]
#define LEAVE_FOUR(R, U, J)                                                                              \
    put_four(to, n * 64 + quad_of(lane) * 16 + U * 8 + J * 2,                                            \
             factor * V_IN_ORDER(vec4(O_AT(J, 4 * R + U), O_AT(J, 4 * R + U + 2), O_AT(J + 1, 4 * R + U), O_AT(J + 1, 4 * R + U + 2))));
#else
#define LEAVE(R) STEP_LOOP for (uint n = 0; n < V_CHUNKS; n++) F32(to).v[value_element(n, 0, lane / 4 * 4) + V_IN_ORDER(uvec4(0, 1, 2, 3))[lane % 4]] = factor * o[b * O_MATRICES + n][R];
#endif
#define LEAVE_ROW(R)                                                                                     \
    {                                                                                                    \
        float all = row_sum[b * QUADS_OF_LANE + R], natural = row_max[b * QUADS_OF_LANE + R] * (1.0 / LOG2_E); \
        [[unroll]] for (uint d = 1; d < ROW_LANES; d <<= 1) all += subgroupShuffleXor(all, d);           \
        uint row = mine + b * MM + row_of(lane, R);                                                      \
        if (row < rows) {                                                                                \
            uint head = head_of(row), at = result_row(token_of(row), head, batch);                       \
            uvec2 to = whole ? row_address(p.result, at, HSV * 4) : partial_sums(at, split);             \
            float factor = whole ? result_factor(head, natural, all) : 1.0;                              \
            if (!whole && lane % ROW_LANES == 0) partial_pair(at, split).v[0] = vec2(natural, all);      \
            LEAVE(R)                                                                                     \
        }                                                                                                \
    }
    STEP_LOOP for (uint b = 0; b < RB; b++) { EACH_ROW(LEAVE_ROW) }

#if SPLIT == 2
    if (whole) return;
    if (!is_last_of(row_address(p.counters, (batch * gl_NumWorkGroups.y + kv_head) * p.tokens * RATIO + tile, 4), used)) return;
    for (uint i = t; i < rows * (HSV / 4); i += WG) {
        uint r = i / (HSV / 4), head = head_of(r);
        combine(result_row(token_of(r), head, batch), head, i % (HSV / 4), used);
    }
#endif
}
