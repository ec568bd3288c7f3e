// wkv6 and gla in chunks on matrix units (KHR cooperative matrices), all in one launch: every operand is read once.
// With P_t the product of the decays before token t of the chunk, y_t = (r_t P_t) S + sum over s < t of A[t][s] v_s +
// (bonus of t) v_t, and A[t][s] is the sum over keys of r_t k_s times the decays of the tokens between s and t (gla: r_t
// takes the decay of token t along, and the bonus is r_t k_t). Nothing is divided, so decays may be zero or negative:
// two tokens are parted by the highest bit L in which their places differ; r_t is decayed from the boundary between
// them, the start of its block of L tokens, and k_s up to it. So there is a tile for each L, its row t the decayed r_t
// where t has bit L and the decayed k_t where not, and A is tile * tile^T where the highest differing bit is L.
// Between L and 2 L a row takes one more factor: the decay of the neighbouring block of L tokens.
//
// One workgroup per (chunk, head). A thread holds TOKENS tokens of two keys. Chunks of a sequence follow each other through
// slots in scratch memory: each waits for the state after an earlier one and for what those between add to it, fewer than
// LINK, always the same ones in the same order. Workgroups take chunks in the order in which they start, so
// what one waits for is always in work; a wait that lasts too long ends in NaN, not in a device that hangs.
//
// Operands of matrices are f16, brought into its range by a power of two for each chunk; sums are f32.
#version 450
#include "kiln.glsl"
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#include "recurrence.glsl"

layout(local_size_x = WG) in;

#define PAIRS (S / 2)
#define GROUPS (CHUNK / TOKENS)
#define SUBGROUPS (WG / SG)
// Blocks of MM tokens, of MM keys; pairs of different blocks of tokens.
#define BLOCKS (CHUNK / MM)
#define KEY_BLOCKS (S / MM)
#define CROSSED (BLOCKS * (BLOCKS - 1) / 2)
// What a subgroup has of each product.
#define MY_DIAGONAL ((BLOCKS + SUBGROUPS - 1) / SUBGROUPS)
#define MY_CROSSED ((CROSSED + SUBGROUPS - 1) / SUBGROUPS)
#define MY_Y (BLOCKS * KEY_BLOCKS / SUBGROUPS)
#define MY_STATE ((KEY_BLOCKS * KEY_BLOCKS + SUBGROUPS - 1) / SUBGROUPS)
// Quads of a state that a thread holds, and earlier chunks whose loads are in flight together.
#define HELD (S * S / 4 / WG)
#define AHEAD 2
// INNER and OUTER are the numbers of levels inside a block of MM tokens and across blocks; the first LOCAL levels are inside
// the tokens of a thread.

// Shared memory in uvec4 of eight halves; one more in each row keeps rows in different banks.
#define LINE (S / 8 + 1)
#define TILE (CHUNK * LINE)
#define TILES (INNER > OUTER + 2 ? INNER : OUTER + 2)
#define K_AT (OUTER * TILE)
#define R_AT ((TILES - 1) * TILE)
#define V_AT (TILES * TILE)
// Weights and the state take the place of tiles, before R_AT; `Matrices` in Rust sees to it that they fit.
#define WEIGHT_LINE (CHUNK / 8 + 1)
#define STATE_AT (CHUNK * WEIGHT_LINE)
#define Y_LINE (S / 4 + 1)
// The masks of the inner levels lie where the values come later.
#define MASK_AT V_AT
shared uvec4 space[V_AT + TILE];
shared vec2 block_decay[GROUPS * PAIRS];
// Lanes of a subgroup that hold keys of the same token, and how many such shares a token's sums have.
#define CLUSTER (SG < PAIRS ? SG : PAIRS)
#define SHARES (PAIRS / CLUSTER)
shared float bonus[CHUNK * SHARES];
shared vec2 top[SUBGROUPS];
shared uint number;
shared bool lost;

#define MATRIX_A coopmat<float16_t, gl_ScopeSubgroup, MM, MM, gl_MatrixUseA>
#define MATRIX_B coopmat<float16_t, gl_ScopeSubgroup, MM, MM, gl_MatrixUseB>
#define MATRIX_C coopmat<float, gl_ScopeSubgroup, MM, MM, gl_MatrixUseAccumulator>
#define MATRIX_HALF coopmat<float16_t, gl_ScopeSubgroup, MM, MM, gl_MatrixUseAccumulator>
#define BY_ROWS gl_CooperativeMatrixLayoutRowMajor
#define BY_COLUMNS gl_CooperativeMatrixLayoutColumnMajor

layout(buffer_reference, std430, buffer_reference_align = 8) buffer F32x2 { vec2 v[]; };
// What other workgroups of this launch write or read.
layout(buffer_reference, std430, buffer_reference_align = 16) coherent buffer Slot { float v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) coherent buffer Slot4 { vec4 v[]; };
#define MEMORY_MODEL 1
#include "last_one.glsl"

uvec2 slot_of(uint chunk, uint head) { return state_of(p.scratch, chunk, p.heads * S * S, head); }
// The first word counts workgroups.
uvec2 mark_of(uint chunk, uint head) { return row_address(p.marks, chunk * p.heads + head + 1, 4); }

// The power of two that takes numbers of at most `most` below 2^exponent; its inverse is one as well.
float scale_to(int exponent, float most) {
    int e = clamp(int(floatBitsToUint(most) >> 23), 30, 220);
    return uintBitsToFloat(uint(126 + exponent + 127 - e) << 23);
}

float sum_of_cluster(float x) {
    [[unroll]] for (uint lane = 1; lane < CLUSTER; lane *= 2) x += subgroupShuffleXor(x, lane);
    return x;
}

void put_top(vec2 x) {
    x = subgroupMax(x);
    if (gl_SubgroupInvocationID == 0) top[gl_SubgroupID] = x;
}
vec2 get_top() {
    vec2 x = top[0];
    [[unroll]] for (uint i = 1; i < SUBGROUPS; i++) x = max(x, top[i]);
    return x;
}

// Two halves of row `row` of the tile at `tile`.
void put(uint tile, uint row, uint pair, vec2 x) {
    uint at = (tile + row * LINE) * 4 + pair;
    space[at / 4][at % 4] = packHalf2x16(x);
}

// Adds rows `row` .. of the tile times rows `column` .. of it, transposed.
#define ADD_OUTER(SUM, TILE_AT, ROW, COLUMN)                                                    \
    STEP_LOOP for (uint e = 0; e < S; e += MM) {                                                \
        MATRIX_A left;                                                                          \
        MATRIX_B right;                                                                         \
        coopMatLoad(left, space, (TILE_AT) + (ROW) * LINE + e / 8, LINE, BY_ROWS);              \
        coopMatLoad(right, space, (TILE_AT) + (COLUMN) * LINE + e / 8, LINE, BY_COLUMNS);       \
        SUM = coopMatMulAdd(left, right, SUM);                                                  \
    }

// Waits until a chunk has filled its slot.
void wait_for(uint chunk, uint head) {
    uvec2 mark = mark_of(chunk, head);
    for (uint tries = 0; tries < MOST_TRIES; tries++) {
        if (look(mark) == 0) continue;
        acquire(mark);
        return;
    }
    lost = true;
}

// The blocks of tokens of crossed pair number n: row 1; rows 2, 2; rows 3, 3, 3; ...
uvec2 crossed(uint n) {
    uint row = 1;
    while (n >= row) n -= row++;
    return uvec2(row, n);
}

void main() {
    uint tid = gl_LocalInvocationID.x;
    if (tid == 0) {
        number = atomicAdd(Counter(p.marks).v[0], 1);
        lost = false;
    }
    barrier();
    uint head = number % p.heads, chunk = number / p.heads;
    if (chunk >= p.chunks) return;
    uint sequence = chunk_sequence(chunk);
    uvec2 tokens = chunk_tokens(chunk, sequence);
    uint first = tokens.x, end = tokens.y;
    uint place = chunk - first_chunk(sequence);
    if (first >= end) {
        // The state of a sequence without tokens stays as it is; other numbers stand for no chunk.
        if (SLOTS == 0 && place == 0 && start_of(sequence) == end_of(sequence)) {
            F32x4 was = F32x4(state_before(sequence, head));
            F32x4 is = F32x4(state_after(sequence, head));
            [[unroll]] for (uint n = 0; n < HELD; n++) is.v[tid + n * WG] = was.v[tid + n * WG];
        }
        return;
    }
    bool is_last = end == end_of(sequence);

    uint pair = tid % PAIRS, group = tid / PAIRS;
    uint own = first + TOKENS * group;
    vec2 k[TOKENS], r[TOKENS], w[TOKENS];
// The thread's share of a tensor.
#define FETCH(INTO, BASE, NOTHING)                                                              \
    {                                                                                           \
        uvec2 at = offset(head_of(BASE, own, head), 8 * pair);                                  \
        [[unroll]] for (uint n = 0; n < TOKENS; n++)                                            \
            INTO[n] = own + n < end ? F32x2(offset(at, n * p.heads * (S * 4))).v[0] : vec2(NOTHING); \
    }
    FETCH(k, p.k, 0)
    FETCH(w, p.td, 1)
    FETCH(r, p.r, 0)
    for (uint at = tid; at < INNER * MM * MM; at += WG) {
        uint level = at / (MM * MM), t = at / MM % MM, s = at % MM;
        bool some = t > s && (t ^ s) >> level == 1;
        space[MASK_AT + at / 4][at % 4] = floatBitsToUint(some ? 1.0 : 0.0);
    }
    vec2 most = vec2(0), decay = vec2(1);
    vec2 bonus_of_key = vec2(1);
#if !AFTER_UPDATE
    bonus_of_key = F32x2(p.tf).v[head * PAIRS + pair];
#endif
    [[unroll]] for (uint n = 0; n < TOKENS; n++) {
        most = max(most, vec2(max(abs(r[n].x), abs(r[n].y)), max(abs(k[n].x), abs(k[n].y))));
        decay *= w[n];
        vec2 product = r[n] * bonus_of_key * k[n];
        float sum = sum_of_cluster(product.x + product.y);
        if (pair % CLUSTER == 0) bonus[(TOKENS * group + n) * SHARES + pair / CLUSTER] = sum;
#if AFTER_UPDATE
        r[n] *= w[n];
#endif
    }
    block_decay[group * PAIRS + pair] = decay;
    put_top(most);
    barrier();

    // Weights are sums of S products of at most 2^8.
    most = get_top();
    float r_scale = scale_to(4, most.x), k_scale = scale_to(4, most.y);
    [[unroll]] for (uint n = 0; n < TOKENS; n++) {
        r[n] *= r_scale;
        k[n] *= k_scale;
    }
// The rows of a level.
#define PUT_ROWS(TILE_AT, LEVEL)                                                                \
    [[unroll]] for (uint n = 0; n < TOKENS; n++) {                                              \
        uint t = TOKENS * group + n;                                                            \
        put(TILE_AT, t, pair, (t >> (LEVEL) & 1) == 1 ? r[n] : k[n]);                           \
    }
// The same and the step to the next level: one more factor, the decay of the neighbouring block. It is the thread's own,
// or that of other threads.
#define PUT_INSIDE(TILE_AT, LEVEL)                                                              \
    PUT_ROWS(TILE_AT, LEVEL)                                                                    \
    [[unroll]] for (uint n = 0; n < TOKENS; n++) {                                              \
        if ((n >> (LEVEL) & 1) == 1) r[n] *= w[(n >> (LEVEL)) - 1];                             \
        else k[n] *= w[(n >> (LEVEL)) + 1];                                                     \
    }                                                                                           \
    [[unroll]] for (uint n = 0; n < TOKENS >> ((LEVEL) + 1); n++) w[n] = w[2 * n] * w[2 * n + 1];
#define PUT_ACROSS(TILE_AT, LEVEL)                                                              \
    PUT_ROWS(TILE_AT, LEVEL)                                                                    \
    {                                                                                           \
        const uint span = 1 << ((LEVEL) - LOCAL);                                               \
        uint neighbour = (group / span ^ 1) * span;                                             \
        vec2 factor = block_decay[neighbour * PAIRS + pair];                                    \
        [[unroll]] for (uint n = 1; n < span; n++) factor *= block_decay[(neighbour + n) * PAIRS + pair]; \
        bool later = (group / span & 1) == 1;                                                   \
        [[unroll]] for (uint n = 0; n < TOKENS; n++) {                                          \
            if (later) r[n] *= factor;                                                          \
            else k[n] *= factor;                                                                \
        }                                                                                       \
    }
    PUT_INSIDE(0, 0)
    PUT_INSIDE(TILE, 1)
    PUT_INSIDE(2 * TILE, 2)
#if INNER > 3 && LOCAL > 3
    PUT_INSIDE(3 * TILE, 3)
#elif INNER > 3
    PUT_ACROSS(3 * TILE, 3)
#endif
    barrier();

    MATRIX_C diagonal[MY_DIAGONAL];
    [[unroll]] for (uint i = 0; i < MY_DIAGONAL; i++) {
        uint block = gl_SubgroupID + i * SUBGROUPS;
        diagonal[i] = MATRIX_C(0.0);
        if (block < BLOCKS) {
            STEP_LOOP for (uint level = 0; level < INNER; level++) {
                MATRIX_C sum = MATRIX_C(0.0), mask;
                ADD_OUTER(sum, level * TILE, block * MM, block * MM)
                coopMatLoad(mask, space, MASK_AT + level * (MM * MM / 4), MM / 4, BY_ROWS);
                diagonal[i] = diagonal[i] + sum * mask;
            }
        }
    }
    // Values come late: registers, of which all threads have as many as the hungriest phase wants, decide how many
    // workgroups there are at once.
    vec2 v[TOKENS];
    FETCH(v, p.v, 0)
    most = vec2(0);
    [[unroll]] for (uint n = 0; n < TOKENS; n++) most = max(most, abs(v[n]));
    put_top(vec2(max(most.x, most.y), 0));
    barrier();

    float v_scale = scale_to(14, get_top().x);
    [[unroll]] for (uint n = 0; n < TOKENS; n++) put(V_AT, TOKENS * group + n, pair, v[n] * v_scale);
#if INNER < LOCAL
    PUT_INSIDE(0, INNER)
#else
    PUT_ACROSS(0, INNER)
#endif
#if OUTER > 1
    PUT_ACROSS(TILE, INNER + 1)
#endif
#if OUTER > 2
    PUT_ACROSS(2 * TILE, INNER + 2)
#endif
    [[unroll]] for (uint n = 0; n < TOKENS; n++) {
        put(K_AT, TOKENS * group + n, pair, k[n]);
        put(R_AT, TOKENS * group + n, pair, r[n]);
    }
    barrier();

    MATRIX_C across[MY_CROSSED];
    [[unroll]] for (uint i = 0; i < MY_CROSSED; i++) {
        // Those without a block of the diagonal come first.
        uint n = (gl_SubgroupID + SUBGROUPS - BLOCKS % SUBGROUPS) % SUBGROUPS + i * SUBGROUPS;
        across[i] = MATRIX_C(0.0);
        if (n < CROSSED) {
            uvec2 blocks = crossed(n);
            ADD_OUTER(across[i], findMSB(blocks.x ^ blocks.y) * TILE, blocks.x * MM, blocks.y * MM)
        }
    }
    // What the chunk makes of an empty state.
    Slot slot = Slot(slot_of(chunk, head));
    float state_scale = 1 / k_scale / v_scale;
    [[unroll]] for (uint i = 0; i < MY_STATE; i++) {
        uint block = gl_SubgroupID * MY_STATE + i;
        uint row = block / KEY_BLOCKS * MM, column = block % KEY_BLOCKS * MM;
        if (block < KEY_BLOCKS * KEY_BLOCKS) {
            MATRIX_C sum = MATRIX_C(0.0);
            STEP_LOOP for (uint t = 0; t < CHUNK; t += MM) {
                MATRIX_A left;
                MATRIX_B right;
                coopMatLoad(left, space, K_AT + t * LINE + row / 8, LINE, BY_COLUMNS);
                coopMatLoad(right, space, V_AT + t * LINE + column / 8, LINE, BY_ROWS);
                sum = coopMatMulAdd(left, right, sum);
            }
            sum = sum * state_scale;
            coopMatStore(sum, slot.v, row * S + column, S, BY_ROWS);
        }
    }
    if (tid < PAIRS) {
        vec2 all = block_decay[tid];
        [[unroll]] for (uint n = 1; n < GROUPS; n++) all *= block_decay[n * PAIRS + tid];
        Slot decays = Slot(head_of(p.decays, chunk, head));
        decays.v[2 * tid] = all.x;
        decays.v[2 * tid + 1] = all.y;
    }
    barrier();
    [[unroll]] for (uint i = 0; i < MY_DIAGONAL; i++) {
        uint block = gl_SubgroupID + i * SUBGROUPS;
        MATRIX_HALF half_sum = MATRIX_HALF(diagonal[i]);
        if (block < BLOCKS) coopMatStore(half_sum, space, block * MM * WEIGHT_LINE + block * MM / 8, WEIGHT_LINE, BY_ROWS);
    }
    [[unroll]] for (uint i = 0; i < MY_CROSSED; i++) {
        uint n = (gl_SubgroupID + SUBGROUPS - BLOCKS % SUBGROUPS) % SUBGROUPS + i * SUBGROUPS;
        MATRIX_HALF half_sum = MATRIX_HALF(across[i]);
        if (n < CROSSED) {
            uvec2 blocks = crossed(n);
            coopMatStore(half_sum, space, blocks.x * MM * WEIGHT_LINE + blocks.y * MM / 8, WEIGHT_LINE, BY_ROWS);
        }
    }
    meet();
    bool passes_state = place % LINK == 0;
    if (tid == 0 && !is_last && !passes_state) raise(mark_of(chunk, head));

    // The chunks from `from` on add to the state after the one before. What they add together does not depend on that
    // state, so it is ready when the state comes: the chain of all chunks goes through one read and one write a link.
    uint from = place == 0 ? chunk : chunk - (place - 1) % LINK;
    if (tid < chunk - from) wait_for(from + tid, head);
    meet();
    vec4 state[HELD];
    float passed[HELD];
    [[unroll]] for (uint n = 0; n < HELD; n++) {
        state[n] = vec4(0);
        passed[n] = 1;
    }
    for (uint earlier = from; earlier < chunk; earlier += AHEAD) {
        vec4 added[AHEAD][HELD];
        float decays[AHEAD][HELD];
        [[unroll]] for (uint i = 0; i < AHEAD; i++) {
            if (earlier + i < chunk) {
                uvec2 other = slot_of(earlier + i, head), other_decays = head_of(p.decays, earlier + i, head);
                [[unroll]] for (uint n = 0; n < HELD; n++) {
                    added[i][n] = Slot4(other).v[tid + n * WG];
                    decays[i][n] = Slot(other_decays).v[(tid + n * WG) / (S / 4)];
                }
            }
        }
        [[unroll]] for (uint i = 0; i < AHEAD; i++) {
            if (earlier + i < chunk) {
                [[unroll]] for (uint n = 0; n < HELD; n++) {
                    state[n] = fma(vec4(decays[i][n]), state[n], added[i][n]);
                    passed[n] *= decays[i][n];
                }
            }
        }
    }
    if (place > 0) {
        if (tid == 0) wait_for(from - 1, head);
        meet();
    }
    uvec2 before = place == 0 ? state_before(sequence, head) : slot_of(from - 1, head);
    // A sequence of padding starts from zeros.
    if (place > 0 || has_state(sequence)) [[unroll]] for (uint n = 0; n < HELD; n++)
        state[n] = fma(vec4(passed[n]), Slot4(before).v[tid + n * WG], state[n]);
    if (lost) [[unroll]] for (uint n = 0; n < HELD; n++) state[n] = vec4(uintBitsToFloat(0x7fc00000u));
    float largest = 0;
    [[unroll]] for (uint n = 0; n < HELD; n++) {
        vec4 x = abs(state[n]);
        largest = max(largest, max(max(x.x, x.y), max(x.z, x.w)));
    }
    put_top(vec2(largest, 0));
    if (is_last ? has_state(sequence) : passes_state) {
        Slot4 added = Slot4(slot_of(chunk, head));
        uvec2 after = is_last ? state_after(sequence, head) : slot_of(chunk, head);
        [[unroll]] for (uint n = 0; n < HELD; n++) {
            uint key = (tid + n * WG) / (S / 4);
            float all = block_decay[key / 2][key % 2];
            [[unroll]] for (uint i = 1; i < GROUPS; i++) all *= block_decay[i * PAIRS + key / 2][key % 2];
            Slot4(after).v[tid + n * WG] = fma(vec4(all), state[n], added.v[tid + n * WG]);
        }
    }
    meet();
    if (tid == 0 && !is_last && passes_state) raise(mark_of(chunk, head));

    float before_scale = scale_to(14, get_top().x);
    [[unroll]] for (uint n = 0; n < HELD; n++) {
        uint key = (tid + n * WG) / (S / 4), at = 2 * ((tid + n * WG) % (S / 4));
        vec4 x = state[n] * before_scale;
        uint line = STATE_AT + key * LINE + at / 4;
        space[line][at % 4] = packHalf2x16(x.xy);
        space[line][at % 4 + 1] = packHalf2x16(x.zw);
    }
    barrier();
    uint y_row = gl_SubgroupID * MY_Y / KEY_BLOCKS, y_column = gl_SubgroupID * MY_Y % KEY_BLOCKS;
    MATRIX_C y[MY_Y];
    [[unroll]] for (uint i = 0; i < MY_Y; i++) y[i] = MATRIX_C(0.0);
    for (uint s = 0; s <= y_row; s++) {
        MATRIX_A left;
        coopMatLoad(left, space, y_row * MM * WEIGHT_LINE + s * MM / 8, WEIGHT_LINE, BY_ROWS);
        [[unroll]] for (uint i = 0; i < MY_Y; i++) {
            MATRIX_B right;
            coopMatLoad(right, space, V_AT + s * MM * LINE + (y_column + i) * MM / 8, LINE, BY_ROWS);
            y[i] = coopMatMulAdd(left, right, y[i]);
        }
    }
    MATRIX_C from_state[MY_Y];
    [[unroll]] for (uint i = 0; i < MY_Y; i++) from_state[i] = MATRIX_C(0.0);
    STEP_LOOP for (uint e = 0; e < S; e += MM) {
        MATRIX_A left;
        coopMatLoad(left, space, R_AT + y_row * MM * LINE + e / 8, LINE, BY_ROWS);
        [[unroll]] for (uint i = 0; i < MY_Y; i++) {
            MATRIX_B right;
            coopMatLoad(right, space, STATE_AT + e * LINE + (y_column + i) * MM / 8, LINE, BY_ROWS);
            from_state[i] = coopMatMulAdd(left, right, from_state[i]);
        }
    }
    barrier();
    float own_factor = p.scale / r_scale * state_scale, state_factor = p.scale / r_scale / before_scale;
    [[unroll]] for (uint i = 0; i < MY_Y; i++) {
        MATRIX_C sum = y[i] * own_factor + from_state[i] * state_factor;
        coopMatStore(sum, space, y_row * MM * Y_LINE + (y_column + i) * MM / 4, Y_LINE, BY_ROWS);
    }
    barrier();
    float bonus_factor = p.scale / v_scale;
    for (uint at = tid; at < CHUNK * S / 4; at += WG) {
        uint t = at / (S / 4), quad = at % (S / 4);
        if (first + t >= end) break;
        float factor = bonus[t * SHARES];
        [[unroll]] for (uint i = 1; i < SHARES; i++) factor += bonus[t * SHARES + i];
        uvec4 line = space[V_AT + t * LINE + quad / 2];
        uvec2 halves = quad % 2 == 0 ? line.xy : line.zw;
        vec4 value = vec4(unpackHalf2x16(halves.x), unpackHalf2x16(halves.y));
        vec4 x = uintBitsToFloat(space[t * Y_LINE + quad]);
        F32x4(head_of(p.y, first + t, head)).v[quad] = fma(vec4(factor * bonus_factor), value, x);
    }
}
