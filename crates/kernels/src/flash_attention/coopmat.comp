// flash_attention, cooperative matrices: one workgroup serves a tile of ROWS query rows of one kv head; a row is a token
// and one of the RATIO heads that share the kv head, so tiles are full whatever the ratio. Rounds of BC keys:
//   K is staged in shared memory as f16; S = Q K^T (f32) goes to shared memory;
//   LANES threads share a row, turn S into weights P (f16) and keep the running maximum; V takes K's place;
//   O = factor O + P V, f32 in registers.
// NR x NC subgroups: NR groups of MM rows; the NC subgroups of a group share out the keys of S and the columns of O.
// Wide heads are staged in slices of K_SLICE and V_SLICE columns. Padding of heads and keys is zero, never memory.
// Grid: (tile * splits + split, kv head, batch). MM is the size of the matrices, all three ways.
#version 450
#include "kiln.glsl"
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#if LANES > 1
#extension GL_KHR_shader_subgroup_shuffle : require
#endif
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

#define ROWS (NR * MM)
#define K_SLICES ((HSK + K_SLICE - 1) / K_SLICE)
#define V_SLICES ((HSV + V_SLICE - 1) / V_SLICE)
#define K_STEPS (K_SLICE / MM)
#define S_BLOCKS (BC / MM / NC)
#define O_BLOCKS (V_SLICE / MM / NC)
// Strides in vectors of four; the padding spreads rows over the banks.
#define KV_STRIDE ((K_SLICE > V_SLICE ? K_SLICE : V_SLICE) / 4 + 2)
#define KV_ROWS (Q_SHARED == 0 && ROWS > BC ? ROWS : BC)
#define Q_STRIDE (K_SLICES * K_SLICE / 4 + 2)
#define S_STRIDE (BC / 4 + 1)
#define P_STRIDE (BC / 4 + 2)

shared f16vec4 kv[KV_ROWS * KV_STRIDE];
shared vec4 s_tile[ROWS * S_STRIDE];
shared f16vec4 p_tile[ROWS * P_STRIDE];
#if Q_SHARED
shared f16vec4 q_tile[ROWS * Q_STRIDE];
#endif
shared uvec2 row_seen[ROWS];
shared float row_factor[ROWS];
#if SEQUENCES
shared uint row_sequence[ROWS];
#endif

#define MATRIX_A coopmat<float16_t, gl_ScopeSubgroup, MM, MM, gl_MatrixUseA>
#define MATRIX_B coopmat<float16_t, gl_ScopeSubgroup, MM, MM, gl_MatrixUseB>
#define MATRIX_C coopmat<float, gl_ScopeSubgroup, MM, MM, gl_MatrixUseAccumulator>

// No keys, and no change to a union of ranges.
const uvec2 NOTHING = uvec2(0xffffffffu, 0);

uint t, kv_head, batch, first_row, rows;

uint token_of(uint row) { return (first_row + row) / RATIO; }
uint head_of(uint row) { return kv_head * RATIO + (first_row + row) % RATIO; }

// A slice of the tile's queries, scaled, from column `column` on.
f16vec4 query4(uint row, uint column) {
    if (row >= rows || column >= HSK) return f16vec4(0.0);
    uvec2 at = row_address(row_address(p.q, token_of(row), p.q_stride[0]), head_of(row), p.q_stride[1]);
    return to_halves(F32x4(row_address(at, batch, p.q_stride[2])).v[column / 4] * SCALE);
}

#include "flash_attention/stage.glsl"

// One row's share of a round: logits to weights. `row_max` and `row_sum` are the row's, kept by its threads.
void weigh(uint row, uint lane, uint start, bool mine, float slope, inout float row_max, inout float row_sum) {
    uvec2 seen = mine ? row_seen[row] : NOTHING;
#if MASK
    uvec2 mask = mask_row(min(token_of(row), p.tokens - 1), head_of(row), batch);
#endif
    vec4 logit[BC / 4 / LANES];
    float most = row_max;
    [[unroll]] for (uint i = 0; i < BC / 4 / LANES; i++) {
        uint at = i * LANES + lane;
        vec4 x = s_tile[row * S_STRIDE + at];
        [[unroll]] for (uint c = 0; c < 4; c++) {
            uint key = start + 4 * at + c;
            float y = capped(x[c]);
            if (key >= seen.x && key < seen.y) {
#if MASK
                float term = load_f16(mask, key);
                y = floatBitsToUint(term) == 0xff800000u ? HIDDEN : y + slope * term;
#elif ALIBI
                y -= slope * abs(float(position_of(token_of(row), batch) - int(key)));
#endif
            } else {
                y = HIDDEN;
            }
            x[c] = y;
            most = max(most, y);
        }
        logit[i] = x;
    }
#if LANES > 1
    [[unroll]] for (uint l = LANES / 2; l > 0; l >>= 1) most = max(most, subgroupShuffleXor(most, l));
#endif
    float added = 0.0;
    [[unroll]] for (uint i = 0; i < BC / 4 / LANES; i++) {
        vec4 x = logit[i];
        f16vec4 w = f16vec4(weight(x.x, most), weight(x.y, most), weight(x.z, most), weight(x.w, most));
        p_tile[row * P_STRIDE + i * LANES + lane] = w;
        // The sum is of what the matrices will see.
        vec4 y = vec4(w);
        added += (y.x + y.y) + (y.z + y.w);
    }
#if LANES > 1
    [[unroll]] for (uint l = LANES / 2; l > 0; l >>= 1) added += subgroupShuffleXor(added, l);
#endif
    float alpha = exp(row_max - most);
    row_sum = row_sum * alpha + added;
    row_max = most;
    // The row's logits are in registers now; its factor takes their place, once for each column of a matrix.
    [[unroll]] for (uint i = lane; i < MM / 4; i += LANES) s_tile[row * S_STRIDE + i] = vec4(alpha);
}

void main() {
    K_INIT();
    V_INIT();
    t = gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID;
    kv_head = gl_WorkGroupID.y;
    batch = gl_WorkGroupID.z;
    uint tile = gl_WorkGroupID.x;
#if SPLIT
    uint split = tile % p.splits;
    tile /= p.splits;
#endif
    first_row = tile * ROWS;
    rows = min(uint(ROWS), p.tokens * RATIO - first_row);
    uint row_group = gl_SubgroupID / NC, column_group = gl_SubgroupID % NC;

    for (uint r = t; r < ROWS; r += WG) {
        uvec2 seen = NOTHING;
        if (r < rows) {
            uint sequence = sequence_of(token_of(r), batch);
            seen = keys_of(token_of(r), batch, length_of(sequence));
            if (seen.x >= seen.y) seen = NOTHING;
#if SEQUENCES
            row_sequence[r] = sequence;
#endif
        }
        row_seen[r] = seen;
    }
#if Q_SHARED
    for (uint i = t; i < ROWS * K_SLICES * K_SLICE / 4; i += WG) {
        uint row = i / (K_SLICES * K_SLICE / 4), column = i % (K_SLICES * K_SLICE / 4);
        q_tile[row * Q_STRIDE + column] = query4(row, 4 * column);
    }
    barrier();
#else
    MATRIX_A q_held[K_SLICES * K_STEPS];
    [[unroll]] for (uint slice = 0; slice < K_SLICES; slice++) {
        barrier();
        for (uint i = t; i < ROWS * K_SLICE / 4; i += WG) {
            uint row = i / (K_SLICE / 4), column = i % (K_SLICE / 4);
            kv[row * KV_STRIDE + column] = query4(row, slice * K_SLICE + 4 * column);
        }
        barrier();
        [[unroll]] for (uint k = 0; k < K_STEPS; k++)
            coopMatLoad(q_held[slice * K_STEPS + k], kv, row_group * MM * KV_STRIDE + k * (MM / 4), KV_STRIDE,
                gl_CooperativeMatrixLayoutRowMajor);
    }
    barrier();
#endif

    MATRIX_C o[V_SLICES * O_BLOCKS];
    [[unroll]] for (uint i = 0; i < V_SLICES * O_BLOCKS; i++) o[i] = MATRIX_C(0.0);
    uint row = t / LANES, lane = t % LANES;
    float row_max = HIDDEN, row_sum = 0.0;
    float slope = slope_of(head_of(row));

#if SPLIT == 2
    uint used;
#endif
    uint next_row = 0;
    // One pass for each run of rows of the same sequence; one in all without ragged tokens.
    do {
        uvec2 seen = row_seen[next_row];
#if SEQUENCES
        uint sequence = row_sequence[next_row];
        for (next_row++; next_row < rows && row_sequence[next_row] == sequence; next_row++)
            seen = uvec2(min(seen.x, row_seen[next_row].x), max(seen.y, row_seen[next_row].y));
        bool mine = row < rows && row_sequence[min(row, ROWS - 1)] == sequence;
#else
        uint sequence = batch;
        for (next_row++; next_row < rows; next_row++)
            seen = uvec2(min(seen.x, row_seen[next_row].x), max(seen.y, row_seen[next_row].y));
        bool mine = row < rows;
#endif
        uvec2 tiles = uvec2(seen.x / BC, (seen.y + BC - 1) / BC);
#if SPLIT == 1
        uint used;
#endif
#if SPLIT
        tiles = split_tiles(seen, split, used);
#endif
        uvec2 keys = keys_at(kv_head, sequence), values = values_at(kv_head, sequence);
        STAGED_CHUNKS
        FETCH_K(tiles.x * BC, seen.y, 0);
        for (uint round = tiles.x; round < tiles.y; round++) {
            uint start = round * BC;
            MATRIX_C s[S_BLOCKS];
            [[unroll]] for (uint i = 0; i < S_BLOCKS; i++) s[i] = MATRIX_C(0.0);
            [[unroll]] for (uint slice = 0; slice < K_SLICES; slice++) {
                PUT_K(start, seen.y, slice);
                barrier();
                // The next loads are on their way while the matrices work.
                if (slice + 1 < K_SLICES) FETCH_K(start, seen.y, slice + 1);
                else FETCH_V(start, seen.y, 0);
                STEP_LOOP for (uint k = 0; k < K_STEPS; k++) {
#if Q_SHARED
                    MATRIX_A query;
                    coopMatLoad(query, q_tile, row_group * MM * Q_STRIDE + (slice * K_STEPS + k) * (MM / 4), Q_STRIDE,
                        gl_CooperativeMatrixLayoutRowMajor);
#else
#define query q_held[slice * K_STEPS + k]
#endif
                    [[unroll]] for (uint i = 0; i < S_BLOCKS; i++) {
                        MATRIX_B kt;
                        coopMatLoad(kt, kv, (column_group * S_BLOCKS + i) * MM * KV_STRIDE + k * (MM / 4), KV_STRIDE,
                            gl_CooperativeMatrixLayoutColumnMajor);
                        s[i] = coopMatMulAdd(query, kt, s[i]);
                    }
                }
                if (slice + 1 < K_SLICES) barrier();
            }
            [[unroll]] for (uint i = 0; i < S_BLOCKS; i++)
                coopMatStore(s[i], s_tile, row_group * MM * S_STRIDE + (column_group * S_BLOCKS + i) * (MM / 4), S_STRIDE,
                    gl_CooperativeMatrixLayoutRowMajor);
            barrier();
            PUT_V(start, seen.y, 0);
            if (row < ROWS) weigh(row, lane, start, mine, slope, row_max, row_sum);
            barrier();
            MATRIX_C factor;
            coopMatLoad(factor, s_tile, row_group * MM * S_STRIDE, S_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
            [[unroll]] for (uint i = 0; i < V_SLICES * O_BLOCKS; i++) o[i] = o[i] * factor;
            [[unroll]] for (uint slice = 0; slice < V_SLICES; slice++) {
                if (slice > 0) {
                    PUT_V(start, seen.y, slice);
                    barrier();
                }
                if (slice + 1 < V_SLICES) FETCH_V(start, seen.y, slice + 1);
                else FETCH_K(start + BC, min(seen.y, tiles.y * BC), 0);
                STEP_LOOP for (uint k = 0; k < BC / MM; k++) {
                    MATRIX_A w;
                    coopMatLoad(w, p_tile, row_group * MM * P_STRIDE + k * (MM / 4), P_STRIDE,
                        gl_CooperativeMatrixLayoutRowMajor);
                    [[unroll]] for (uint i = 0; i < O_BLOCKS; i++) {
                        MATRIX_B v;
                        coopMatLoad(v, kv, k * MM * KV_STRIDE + (column_group * O_BLOCKS + i) * (MM / 4), KV_STRIDE,
                            gl_CooperativeMatrixLayoutRowMajor);
                        o[slice * O_BLOCKS + i] = coopMatMulAdd(w, v, o[slice * O_BLOCKS + i]);
                    }
                }
                barrier();
            }
        }
    } while (next_row < rows);

#if SPLIT == 2
    if (split >= used) return;
    bool whole = used == 1;
#else
    bool whole = SPLIT == 0;
#endif
    if (row < rows && lane == 0) {
#if SPLIT
        if (!whole) partial_pair(result_row(token_of(row), head_of(row), batch), split).v[0] = vec2(row_max, row_sum);
#endif
        row_factor[row] = whole ? result_factor(head_of(row), row_max, row_sum) : 1.0;
    }
    // Through shared memory to rows: the matrices' own order is the driver's.
    [[unroll]] for (uint i = 0; i < V_SLICES * O_BLOCKS; i++) {
        barrier();
        coopMatStore(o[i], s_tile, row_group * MM * S_STRIDE + column_group * (MM / 4), S_STRIDE,
            gl_CooperativeMatrixLayoutRowMajor);
        barrier();
        for (uint j = t; j < ROWS * NC * MM / 4; j += WG) {
            uint r = j / (NC * MM / 4), column4 = j % (NC * MM / 4);
            uint block = column4 / (MM / 4) * O_BLOCKS + i % O_BLOCKS;
            uint e = i / O_BLOCKS * (V_SLICE / 4) + block * (MM / 4) + column4 % (MM / 4);
            if (r >= rows || e >= HSV / 4) continue;
            uint at = result_row(token_of(r), head_of(r), batch);
            vec4 x = s_tile[r * S_STRIDE + column4];
#if SPLIT
            if (!whole) {
                PartialSum(partial_sums(at, split)).v[e] = x;
                continue;
            }
#endif
            F32x4(row_address(p.result, at, HSV * 4)).v[e] = x * row_factor[r];
        }
    }

#if SPLIT == 2
    if (whole) return;
    // Tiles of a kv head have at least a row each, so this counter is theirs alone.
    if (!is_last_of(row_address(p.counters, (batch * gl_NumWorkGroups.y + kv_head) * p.tokens * RATIO + tile, 4), used)) return;
    for (uint i = t; i < rows * (HSV / 4); i += WG) {
        uint r = i / (HSV / 4);
        combine(result_row(token_of(r), head_of(r), batch), head_of(r), i % (HSV / 4), used);
    }
#endif
}
