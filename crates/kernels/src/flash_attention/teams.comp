// flash_attention where subgroups can shuffle: one workgroup serves ROWS query heads of one kv head for one token, and its
// teams of LANES threads go through keys of their own, PREFETCH at a time. A thread has eight columns of a row (more in wide
// heads): of Q and of the sums all the time, of PREFETCH rows of K and V for a round. Scores are added up across the team so
// that each ends in one thread, which turns it into a weight; weights come back to all through shared memory. Teams meet
// only at the end. With AHEAD, the next keys are loaded before the values of these are used.
// With INT, Q is rounded to 8 bits, 32 elements a scale, and multiplied with the codes of K as integers.
// Grid: (token, (kv head, group of heads), (split, batch)). All sums are f32. With SPLIT, a workgroup takes a run of the
// keys; the last one to finish (SPLIT 2, counters) or another dispatch (SPLIT 1) adds the partial results up.
// With KV_APPEND, the token's queries, key and value come as the products left them (kv_append.glsl). With ROUNDING, the result of the one
// token is left rounded as well (rounded.glsl).
#version 450
#define GRID_WAIT_LATE 1
#include "kiln.glsl"
#extension GL_KHR_shader_subgroup_shuffle : require
#if INT
#extension GL_EXT_integer_dot_product : require
#endif

layout(local_size_x = WG) in;
#include "formats.glsl"
#include "flash_attention/view.glsl"
#include "flash_attention/raw.glsl"
#include "flash_attention/combine.glsl"
#define SUBGROUPS (WG / SUBGROUP)
#include "flash_attention/merge.glsl"

#define TEAMS (WG / LANES)
#define STRIDE (TEAMS * PREFETCH)
#define K_CHUNKS ((HSK / 8 + LANES - 1) / LANES)
#define V_CHUNKS ((HSV / 8 + LANES - 1) / LANES)
// Scores of a round are row * PREFETCH + key. A thread ends up with OWN of them, all of one row; SPREAD threads with the same.
#define SCORES (ROWS_PAD * PREFETCH)
#define OWN (SCORES > LANES ? SCORES / LANES : 1)
#define SPREAD (SCORES > LANES ? 1 : LANES / SCORES)
// Thread of a team that is the first to own scores of a row, and the lanes that own others of it.
#define OWNER(R) ((R) * PREFETCH / OWN * SPREAD)
#define MATES (SPREAD * PREFETCH / OWN)

// Weights of a team's round are key * ROWS_PAD + row, then a factor for each row; several rows in one load.
#if ROWS_PAD % 4 == 0
#define PACK vec4
#define PACKED 4
#define AT(ARRAY, I) ARRAY[(I) / 4][(I) % 4]
#elif ROWS_PAD == 2
#define PACK vec2
#define PACKED 2
#define AT(ARRAY, I) ARRAY[(I) / 2][(I) % 2]
#else
#define PACK float
#define PACKED 1
#define AT(ARRAY, I) ARRAY[I]
#endif
#define PACKS (ROWS_PAD / PACKED)
#if PACKED == 1
#define ROW_OF(ARRAY, R) ARRAY[R]
#else
#define ROW_OF(ARRAY, R) ARRAY[(R) / PACKED][(R) % PACKED]
#endif
shared PACK weights_of[TEAMS * (PREFETCH + 1) * PACKS];

uint sequence;
uvec2 keys, values;

void load_keys(uint first, uint end, uint lane, out RawK k[PREFETCH * K_CHUNKS]) {
    [[unroll]] for (uint f = 0; f < PREFETCH; f++) {
        uvec2 row = row_address(keys, cache_row(sequence, min(first + f, end - 1)), p.k_stride[0]);
        [[unroll]] for (uint c = 0; c < K_CHUNKS; c++)
            fetch_k(row, min(lane + c * LANES, HSK / 8 - 1), k[f * K_CHUNKS + c]);
    }
}

void load_values(uint first, uint end, uint lane, out RawV v[PREFETCH * V_CHUNKS]) {
    [[unroll]] for (uint f = 0; f < PREFETCH; f++) {
        uvec2 row = row_address(values, cache_row(sequence, min(first + f, end - 1)), p.v_stride[0]);
        [[unroll]] for (uint c = 0; c < V_CHUNKS; c++)
            fetch_v(row, min(lane + c * LANES, HSV / 8 - 1), v[f * V_CHUNKS + c]);
    }
}

#if KV_APPEND
#include "flash_attention/kv_append.glsl"
#endif

// One step of adding scores up across the team: threads S apart exchange halves of what they have, or the one they have.
#define GATHER(S)                                                              \
    if (S < LANES) {                                                           \
        if (SCORES * S >= LANES) {                                             \
            [[unroll]] for (uint i = 0; i < SCORES * S / LANES; i++) {         \
                float low = score[i], high = score[i + SCORES * S / LANES];    \
                bool upper = (lane & S) != 0;                                  \
                score[i] = (upper ? high : low) + subgroupShuffleXor(upper ? low : high, S); \
            }                                                                  \
        } else {                                                               \
            score[0] += subgroupShuffleXor(score[0], S);                       \
        }                                                                      \
    }

void main() {
    K_INIT();
    V_INIT();
    uint t = gl_SubgroupID * SUBGROUP + gl_SubgroupInvocationID;
    uint lane = t % LANES, team = t / LANES;
    uint token = gl_WorkGroupID.x, group = gl_WorkGroupID.y, batch = gl_WorkGroupID.z % BATCH;
#if SPLIT
    uint split = gl_WorkGroupID.z / BATCH;
#endif
    uint kv_head = group / GROUPS;
    uint first_row = group % GROUPS * ROWS;
    uint head = kv_head * RATIO + first_row;
    uint rows = min(uint(ROWS), RATIO - first_row);
    sequence = sequence_of(token, batch);
    uvec2 seen = keys_of(token, batch, length_of(sequence));
    keys = keys_at(kv_head, sequence);
    values = values_at(kv_head, sequence);

#if SPLIT
    uint used;
    uvec2 tiles = split_tiles(seen, split, used);
    uint begin = max(tiles.x * BC, seen.x), end = min(tiles.y * BC, seen.y);
#if SPLIT == 2
    if (split >= used) return;
#endif
#else
    uint begin = seen.x, end = seen.y;
#endif
    RawK k[PREFETCH * K_CHUNKS];
    RawV v[PREFETCH * V_CHUNKS];
    uint at = begin + team * PREFETCH;
#if KV_APPEND
    int position = position_of(token, batch);
#if SPLIT
    bool last = split + 1 == used;
#else
    const bool last = true;
#endif
    // The row of the token's own key is not written yet, so it is not read.
    bool owns = last && begin < end && int(end) == position + 1;
    own_key = owns ? end - 1 : 0xffffffffu;
    uint stop = owns ? max(end - 1, begin + 1) : end;
    uint id = U32(p.ids).v[batch];
    if (AHEAD == 1 && begin < end) {
        load_keys(at, stop, lane, k);
        load_values(at, stop, lane, v);
    }
    prepare_turns(position, lane);
#else
    uint stop = end;
#endif
#if AHEAD && !KV_APPEND
#if CAUSAL
    // Keys of earlier tokens are there already; that of this token, the only one of its sequence here, is waited for.
    bool early = SEQUENCES == 0 && p.tokens == 1 && int(min(at + PREFETCH, end)) <= position_of(token, batch);
#else
    const bool early = false;
#endif
    if (begin < end && early) load_keys(at, end, lane, k);
#endif
    grid_wait();

    // Rows past the last are copies of it, and columns past the head are zero.
    uvec2 q = row_address(row_address(p.q, token, p.q_stride[0]), batch, p.q_stride[2]);
    vec4 held[ROWS][2 * K_CHUNKS];
#if KV_APPEND
    q = row_address(q, head, p.q_stride[1]);
    arrive(Arrival(lane, team, q, rows, kv_head, batch, last, last && first_row == 0 && id < p.cache_rows, id));
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        [[unroll]] for (uint c = 0; c < K_CHUNKS; c++) {
            uint e = lane + c * LANES, from = min(r, rows - 1) * (HSK / 4) + 2 * e;
            bool inside = HSK / 8 % LANES == 0 || e < HSK / 8;
            held[r][2 * c] = inside ? appended[from] * SCALE : vec4(0.0);
            held[r][2 * c + 1] = inside ? appended[from + 1] * SCALE : vec4(0.0);
        }
    }
#else
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        F32x4 from = F32x4(row_address(q, head + min(r, rows - 1), p.q_stride[1]));
        [[unroll]] for (uint c = 0; c < K_CHUNKS; c++) {
            uint e = lane + c * LANES;
            bool inside = HSK / 8 % LANES == 0 || e < HSK / 8;
            held[r][2 * c] = inside ? from.v[k_quad0(e) / 4] * SCALE : vec4(0.0);
            held[r][2 * c + 1] = inside ? from.v[k_quad1(e) / 4] * SCALE : vec4(0.0);
        }
    }
#endif
#if INT
    ivec2 codes[ROWS][K_CHUNKS];
    float scale[ROWS][K_CHUNKS];
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        [[unroll]] for (uint c = 0; c < K_CHUNKS; c++) {
            vec4 a = held[r][2 * c], b = held[r][2 * c + 1], most = max(abs(a), abs(b));
            float largest = max(max(most.x, most.y), max(most.z, most.w));
            // Four neighbours have a block of 32.
            largest = max(largest, subgroupShuffleXor(largest, 1));
            largest = max(largest, subgroupShuffleXor(largest, 2));
            float inverse = largest > 0.0 ? 127.0 / largest : 0.0;
            ivec4 x = ivec4(round(a * inverse)) & 255, y = ivec4(round(b * inverse)) & 255;
            codes[r][c] = ivec2(x.x | x.y << 8 | x.z << 16 | x.w << 24, y.x | y.y << 8 | y.z << 16 | y.w << 24);
            scale[r][c] = largest / 127.0;
        }
    }
#endif

    vec4 sum[ROWS][2 * V_CHUNKS];
    [[unroll]] for (uint r = 0; r < ROWS; r++)
        [[unroll]] for (uint c = 0; c < 2 * V_CHUNKS; c++) sum[r][c] = vec4(0.0);
    // The row whose scores this thread owns, the first key of them, and the row's maximum and sum of weights (of those
    // that the thread owns).
    uint my_row = lane / SPREAD * OWN / PREFETCH, my_key = lane / SPREAD * OWN % PREFETCH;
    float row_max = HIDDEN, row_sum = 0.0;
#if MASK
    uvec2 mask = mask_row(token, min(head + my_row, HEADS - 1), batch);
#endif
#if MASK || ALIBI
    float slope = slope_of(head + my_row);
#endif

#if AHEAD && !KV_APPEND
    if (begin < end && !early) load_keys(at, end, lane, k);
#endif
    for (uint round = begin; round < end; round += STRIDE, at += STRIDE) {
#if AHEAD == 0
        load_keys(at, stop, lane, k);
#endif
#if !(AHEAD && KV_APPEND)
        load_values(at, stop, lane, v);
#endif
#if KV_APPEND
        if (at + PREFETCH > own_key) take_own_key(at, lane, k);
#endif
#if MASK
        float term[OWN];
        [[unroll]] for (uint i = 0; i < OWN; i++) term[i] = load_f16(mask, min(at + my_key + i, end - 1));
#endif
        float score[SCORES];
        [[unroll]] for (uint i = 0; i < SCORES; i++) score[i] = 0.0;
        [[unroll]] for (uint f = 0; f < PREFETCH; f++) {
            [[unroll]] for (uint c = 0; c < K_CHUNKS; c++) {
#if INT
                Blocks x = k[f * K_CHUNKS + c];
                ivec2 b = ivec2(x.codes);
                [[unroll]] for (uint r = 0; r < ROWS; r++) {
                    int product = dotPacked4x8EXT(b.x, codes[r][c].x) + dotPacked4x8EXT(b.y, codes[r][c].y);
                    score[r * PREFETCH + f] += x.scale.x * scale[r][c] * float(product);
#if K_HAS_MIN
                    int ones = dotPacked4x8EXT(0x01010101, codes[r][c].x) + dotPacked4x8EXT(0x01010101, codes[r][c].y);
                    score[r * PREFETCH + f] += x.scale.y * (scale[r][c] * float(ones));
#endif
                }
#else
                vec4 a, b;
                k_values(k[f * K_CHUNKS + c], a, b);
                [[unroll]] for (uint r = 0; r < ROWS; r++)
                    score[r * PREFETCH + f] += dot(a, held[r][2 * c]) + dot(b, held[r][2 * c + 1]);
#endif
            }
        }
#if AHEAD
        load_keys(at + STRIDE, stop, lane, k);
#endif
        GATHER(32)
        GATHER(16)
        GATHER(8)
        GATHER(4)
        GATHER(2)
        GATHER(1)

        float most = row_max;
        [[unroll]] for (uint i = 0; i < OWN; i++) {
            uint key = at + my_key + i;
            float logit = capped(score[i]);
#if MASK
            logit = floatBitsToUint(term[i]) == 0xff800000u ? HIDDEN : logit + slope * term[i];
#elif ALIBI
            logit -= slope * abs(float(position_of(token, batch) - int(key)));
#elif DISTANCES
            logit += by_distance(head + my_row, position_of(token, batch), key);
#endif
            score[i] = key < end ? logit : HIDDEN;
            most = max(most, score[i]);
        }
        [[unroll]] for (uint s = SPREAD; s < MATES; s <<= 1) most = max(most, subgroupShuffleXor(most, s));
        float alpha = exp(row_max - most);
        row_sum *= alpha;
        row_max = most;
        // All have read the weights of the round before.
        subgroupBarrier();
        uint to = team * (PREFETCH + 1) * ROWS_PAD;
        [[unroll]] for (uint i = 0; i < OWN; i++) {
            float w = weight(score[i], most);
            row_sum += w;
            AT(weights_of, to + (my_key + i) * ROWS_PAD + my_row) = w;
        }
        if (my_key == 0) AT(weights_of, to + PREFETCH * ROWS_PAD + my_row) = alpha;
        subgroupMemoryBarrierShared();
        subgroupBarrier();

#if KV_APPEND
        if (at + PREFETCH > own_key) take_own_value(at, lane, v);
#endif
        PACK w[PACKS];
        [[unroll]] for (uint i = 0; i < PACKS; i++) w[i] = weights_of[(team * (PREFETCH + 1) + PREFETCH) * PACKS + i];
        [[unroll]] for (uint r = 0; r < ROWS; r++)
            [[unroll]] for (uint c = 0; c < 2 * V_CHUNKS; c++) sum[r][c] *= ROW_OF(w, r);
        [[unroll]] for (uint f = 0; f < PREFETCH; f++) {
            [[unroll]] for (uint i = 0; i < PACKS; i++) w[i] = weights_of[(team * (PREFETCH + 1) + f) * PACKS + i];
            [[unroll]] for (uint c = 0; c < V_CHUNKS; c++) {
#if V_BLOCKS == 1 && V_HAS_MIN == 0
                // The scale goes to the weights, of which there are fewer.
                Blocks x = v[f * V_CHUNKS + c];
                vec4 a = code_values(x.codes.x), b = code_values(x.codes.y);
                float by = x.scale.x;
#else
                vec4 a, b;
                v_values(v[f * V_CHUNKS + c], a, b);
                const float by = 1.0;
#endif
                [[unroll]] for (uint r = 0; r < ROWS; r++) {
                    float share = ROW_OF(w, r) * by;
                    sum[r][2 * c] += share * a;
                    sum[r][2 * c + 1] += share * b;
                }
            }
        }
#if AHEAD && KV_APPEND
        load_values(at + STRIDE, stop, lane, v);
#endif
    }

    // The weights of a row, then the teams of a subgroup, then all subgroups.
    [[unroll]] for (uint s = SPREAD; s < MATES; s <<= 1) row_sum += subgroupShuffleXor(row_sum, s);
    [[unroll]] for (uint s = LANES; s < SUBGROUP; s <<= 1) {
        float most = max(row_max, subgroupShuffleXor(row_max, s)), alpha = exp(row_max - most);
        row_max = most;
        row_sum *= alpha;
        row_sum += subgroupShuffleXor(row_sum, s);
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            float factor = subgroupShuffle(alpha, gl_SubgroupInvocationID / LANES * LANES + OWNER(r));
            [[unroll]] for (uint c = 0; c < 2 * V_CHUNKS; c++) {
                vec4 x = sum[r][c] * factor;
                sum[r][c] = x + subgroupShuffleXor(x, s);
            }
        }
    }
    uint subgroup = t / SUBGROUP;
    if (t % SUBGROUP < LANES) {
        if (lane == OWNER(my_row) && my_row < ROWS) pairs_of[subgroup * ROWS + my_row] = vec2(row_max, row_sum);
        [[unroll]] for (uint c = 0; c < V_CHUNKS; c++) {
            uint e = lane + c * LANES;
            if (HSV / 8 % LANES != 0 && e >= HSV / 8) break;
            [[unroll]] for (uint r = 0; r < ROWS; r++) {
                merged[subgroup * MERGED + r * (HSV / 4) + v_quad0(e) / 4] = sum[r][2 * c];
                merged[subgroup * MERGED + r * (HSV / 4) + v_quad1(e) / 4] = sum[r][2 * c + 1];
            }
        }
    }
#if SPLIT
    merge(Merging(token, batch, group, head, rows, split, used));
#else
    merge(Merging(token, batch, group, head, rows, 0, 1));
#endif
}
