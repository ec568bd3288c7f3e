// flash_attention, scalar: one workgroup serves ROWS query heads of one kv head for one token; K and V are read once.
// Rounds of BC keys: KEY_LANES threads share a key and leave its logits in shared memory; ROW_LANES threads share a row
// of logits and turn it into weights with the running maximum; VALUE_LANES threads share a value row and add it up.
// Grid: (token, (kv head, group of heads), (split, batch)). All sums are f32. With SPLIT, a workgroup takes a run of the
// keys; the last one to finish (SPLIT 2, counters) or another dispatch (SPLIT 1) adds the partial results up.
#version 450
#include "kiln.glsl"
#if KEY_LANES > 1 || ROW_LANES > 1
#define SHUFFLE 1
#extension GL_KHR_shader_subgroup_shuffle : require
#else
#define SHUFFLE 0
#endif

layout(local_size_x = WG) in;
#include "formats.glsl"
#include "flash_attention/view.glsl"
#include "flash_attention/eight.glsl"
#include "flash_attention/combine.glsl"
#if SPLIT == 2
#include "last_one.glsl"
#endif

#define KEY_SLOTS (WG / KEY_LANES)
#define K_CHUNKS ((HSK / 8 + KEY_LANES - 1) / KEY_LANES)
#define VALUE_SLOTS (WG / VALUE_LANES)
#define V_CHUNKS ((HSV / 8 + VALUE_LANES - 1) / VALUE_LANES)
#define GROUPS ((RATIO + ROWS - 1) / ROWS)
// Queries stay in registers where they are few.
#define HELD (ROWS * K_CHUNKS <= 8)
#define SPACE (ROWS * HSK / 4 > 2 * WG ? ROWS * HSK / 4 : 2 * WG)

shared vec4 space[SPACE];
shared float logits[ROWS * BC];
shared float factor[ROWS];

#if SHUFFLE
#define BUTTERFLY(LANES, X, COMBINE)                                           \
    [[unroll]] for (uint s = LANES / 2; s > 0; s >>= 1) X = COMBINE(X, subgroupShuffleXor(X, s));
#else
#define BUTTERFLY(LANES, X, COMBINE)
#endif
float plus(float a, float b) { return a + b; }

uint thread() {
#if SHUFFLE
    return gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID;
#else
    return gl_LocalInvocationID.x;
#endif
}

void main() {
    K_INIT();
    V_INIT();
    uint t = thread();
    uint token = gl_WorkGroupID.x, group = gl_WorkGroupID.y, batch = gl_WorkGroupID.z % BATCH;
#if SPLIT
    uint split = gl_WorkGroupID.z / BATCH;
#endif
    uint kv_head = group / GROUPS;
    uint first_row = group % GROUPS * ROWS;
    uint head = kv_head * RATIO + first_row;
    uint rows = min(uint(ROWS), RATIO - first_row);
    uint sequence = sequence_of(token, batch);
    uvec2 seen = keys_of(token, batch, length_of(sequence));
    uvec2 tiles = uvec2(seen.x / BC, (seen.y + BC - 1) / BC);
#if SPLIT
    uint used;
    tiles = split_tiles(seen, split, used);
#if SPLIT == 2
    if (split >= used) return;
#endif
#endif
    uvec2 keys = keys_at(kv_head, sequence);
    uvec2 values = values_at(kv_head, sequence);

    uvec2 q = row_address(row_address(p.q, token, p.q_stride[0]), batch, p.q_stride[2]);
    for (uint i = t; i < ROWS * HSK / 4; i += WG) {
        uint r = i / (HSK / 4);
        vec4 x = vec4(0.0);
        if (r < rows) x = F32x4(row_address(q, head + r, p.q_stride[1])).v[i % (HSK / 4)] * SCALE;
        space[i] = x;
    }
    barrier();

    uint key_lane = t % KEY_LANES, key_slot = t / KEY_LANES;
    uint value_lane = t % VALUE_LANES, value_slot = t / VALUE_LANES;
    uint row_lane = t % ROW_LANES, my_row = t / ROW_LANES;
#if HELD
    vec4 held[ROWS][2 * K_CHUNKS];
    [[unroll]] for (uint c = 0; c < K_CHUNKS; c++) {
        uint e = 2 * (key_lane + c * KEY_LANES);
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            bool inside = e < HSK / 4;
            held[r][2 * c] = inside ? space[r * (HSK / 4) + e] : vec4(0.0);
            held[r][2 * c + 1] = inside ? space[r * (HSK / 4) + e + 1] : vec4(0.0);
        }
    }
#define QUERY(r, c, h) held[r][2 * c + h]
#else
#define QUERY(r, c, h) space[r * (HSK / 4) + 2 * (key_lane + c * KEY_LANES) + h]
#endif

    vec4 sum[ROWS][2 * V_CHUNKS];
    [[unroll]] for (uint r = 0; r < ROWS; r++)
        [[unroll]] for (uint c = 0; c < 2 * V_CHUNKS; c++) sum[r][c] = vec4(0.0);
    float row_max = HIDDEN, row_sum = 0.0;
#if MASK || ALIBI
    float slope = slope_of(head + my_row);
#endif

    for (uint tile = tiles.x; tile < tiles.y; tile++) {
        uint start = tile * BC;
        // Scores.
        KEY_LOOP for (uint i = 0; i < BC; i += KEY_SLOTS) {
            uint slot = i + key_slot;
            uint key = start + slot;
            float score[ROWS];
            [[unroll]] for (uint r = 0; r < ROWS; r++) score[r] = 0.0;
            bool inside = slot < BC && key >= seen.x && key < seen.y;
            if (inside) {
                uvec2 row = row_address(keys, cache_row(sequence, key), p.k_stride[0]);
                [[unroll]] for (uint c = 0; c < K_CHUNKS; c++) {
                    uint e = key_lane + c * KEY_LANES;
                    if (HSK / 8 % KEY_LANES == 0 || e < HSK / 8) {
                        vec4 a, b;
                        load_k8(row, 8 * e, a, b);
                        [[unroll]] for (uint r = 0; r < ROWS; r++)
                            score[r] += dot(a, QUERY(r, c, 0)) + dot(b, QUERY(r, c, 1));
                    }
                }
            }
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                BUTTERFLY(KEY_LANES, score[r], plus)
                if (key_lane == r % KEY_LANES && slot < BC) logits[r * BC + slot] = inside ? capped(score[r]) : HIDDEN;
            }
        }
        barrier();
        // Weights.
        if (my_row < ROWS) {
            float most = row_max;
            [[unroll]] for (uint i = 0; i < BC; i += ROW_LANES) {
                uint at = my_row * BC + i + row_lane;
                uint key = start + i + row_lane;
                float logit = logits[at];
                if (key >= seen.x && key < seen.y) {
#if MASK
                    uvec2 mask = mask_row(token, min(head + my_row, HEADS - 1), batch);
                    float term = load_f16(mask, key);
                    logit = floatBitsToUint(term) == 0xff800000u ? HIDDEN : logit + slope * term;
#elif ALIBI
                    logit -= slope * abs(float(position_of(token, batch) - int(key)));
#elif DISTANCES
                    logit += by_distance(head + my_row, position_of(token, batch), key);
#endif
                }
                logits[at] = logit;
                most = max(most, logit);
            }
            BUTTERFLY(ROW_LANES, most, max)
            float added = 0.0;
            [[unroll]] for (uint i = 0; i < BC; i += ROW_LANES) {
                uint at = my_row * BC + i + row_lane;
                float w = weight(logits[at], most);
                logits[at] = w;
                added += w;
            }
            BUTTERFLY(ROW_LANES, added, plus)
            float alpha = exp(row_max - most);
            row_sum = row_sum * alpha + added;
            row_max = most;
            if (row_lane == 0) factor[my_row] = alpha;
        }
        barrier();
        // Values.
        [[unroll]] for (uint r = 0; r < ROWS; r++)
            [[unroll]] for (uint c = 0; c < 2 * V_CHUNKS; c++) sum[r][c] *= factor[r];
        KEY_LOOP for (uint i = 0; i < BC; i += VALUE_SLOTS) {
            uint slot = i + value_slot;
            uint key = start + slot;
            if (slot < BC && key >= seen.x && key < seen.y) {
                uvec2 row = row_address(values, cache_row(sequence, key), p.v_stride[0]);
                [[unroll]] for (uint c = 0; c < V_CHUNKS; c++) {
                    uint e = value_lane + c * VALUE_LANES;
                    if (HSV / 8 % VALUE_LANES == 0 || e < HSV / 8) {
                        vec4 a, b;
                        load_v8(row, 8 * e, a, b);
                        [[unroll]] for (uint r = 0; r < ROWS; r++) {
                            float w = logits[r * BC + slot];
                            sum[r][2 * c] += w * a;
                            sum[r][2 * c + 1] += w * b;
                        }
                    }
                }
            }
        }
        barrier();
    }

#if SPLIT == 2
    bool whole = used == 1;
#else
    bool whole = SPLIT == 0;
#endif
    if (my_row < rows && row_lane == 0) {
#if SPLIT
        if (!whole) partial_pair(result_row(token, head + my_row, batch), split).v[0] = vec2(row_max, row_sum);
#endif
        factor[my_row] = whole ? result_factor(head + my_row, row_max, row_sum) : 1.0;
    }
    // Sums of all slots, row by row.
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        [[unroll]] for (uint c = 0; c < V_CHUNKS; c++) {
            barrier();
            space[t] = sum[r][2 * c];
            space[WG + t] = sum[r][2 * c + 1];
            barrier();
            uint e = value_lane + c * VALUE_LANES;
            if (t < VALUE_LANES && e < HSV / 8 && r < rows) {
                vec4 a = vec4(0.0), b = vec4(0.0);
                for (uint s = 0; s < VALUE_SLOTS; s++) {
                    a += space[s * VALUE_LANES + t];
                    b += space[WG + s * VALUE_LANES + t];
                }
                uint row = result_row(token, head + r, batch);
#if SPLIT
                if (!whole) {
                    PartialSum part = PartialSum(partial_sums(row, split));
                    part.v[2 * e] = a;
                    part.v[2 * e + 1] = b;
                    continue;
                }
#endif
                F32x4 result = F32x4(row_address(p.result, row, HSV * 4));
                result.v[2 * e] = a * factor[r];
                result.v[2 * e + 1] = b * factor[r];
            }
        }
    }

#if SPLIT == 2
    if (whole) return;
    if (!is_last_of(row_address(p.counters, result_row(token, group, batch), 4), used)) return;
    for (uint i = t; i < rows * (HSV / 4); i += WG) {
        uint r = i / (HSV / 4);
        combine(result_row(token, head + r, batch), head + r, i % (HSV / 4), used);
    }
#endif
}
