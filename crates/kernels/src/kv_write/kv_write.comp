// kv_write: what stands between the projections and attention, in one launch. Queries are turned by their positions in
// place (as rope does), keys are turned and written to their rows of the cache, values are written to theirs.
// q: [HEAD_DIM, Q_HEADS, tokens]; k, v: [K_COLS, tokens], [V_COLS, tokens]; caches: [.., rows], of floats or simple blocks.
// A row number outside of the caches drops the row. Threads: one for each pair of q in Q_GROUP heads, which have the same angle (elements
// in no pair stay), then one for each UNIT_K elements of k, then one for each UNIT_V elements of v.
// NORMS: every head of q and k is normed first (as rms_norm does); a workgroup has a head of q, k or v of a token.
#version 450
#define GRID_WAIT_LATE 1
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "formats.glsl"
#if BLOCKS
#include "encode.glsl"
#endif
#include "rope_phase.glsl"

vec2 turn_of(uint token, uint pair) {
    return cos_sin(phase_of(I32(p.positions).v[token], pair)) * uintBitsToFloat(MAGNITUDE);
}

uint pair_of_query(uint item) { return item % PAIRS; }
uint token_of_query(uint item) { return item / PAIRS / (Q_HEADS / Q_GROUP); }
void query(uint item, vec2 turn) {
    uint pair = pair_of_query(item), group = item / PAIRS % (Q_HEADS / Q_GROUP), token = token_of_query(item);
#if ADJACENT
    uint a = OFFSET + 2 * pair, b = a + 1;
#else
    uint a = OFFSET + pair, b = a + PAIRS;
#endif
    [[unroll]] for (uint i = 0; i < Q_GROUP; i++) {
        uvec2 x = row_address(row_address(p.q, group * Q_GROUP + i, p.q_stride[0]), token, p.q_stride[1]);
        float xa = F32(x).v[a], xb = F32(x).v[b];
        F32(x).v[a] = xa * turn.x - xb * turn.y;
        F32(x).v[b] = xa * turn.y + xb * turn.x;
    }
}

// The pair of element e of a token's keys; PAIRS or more where it is in none.
uint pair_of_key(uint e) {
    uint at = e % HEAD_DIM - OFFSET;
    // Elements before the offset have wrapped around.
    if (at >= 2 * PAIRS) return PAIRS;
#if ADJACENT
    return at / 2;
#else
    return at % PAIRS;
#endif
}

// Element e of a token's keys, turned.
float key(uvec2 row, uint e, vec2 turn) {
    float x = F32(row).v[e];
    if (pair_of_key(e) >= PAIRS) return x;
#if ADJACENT
    bool first = (e % HEAD_DIM - OFFSET) % 2 == 0;
    float other = F32(row).v[first ? e + 1 : e - 1];
#else
    bool first = e % HEAD_DIM - OFFSET < PAIRS;
    float other = F32(row).v[first ? e + PAIRS : e - PAIRS];
#endif
    return first ? x * turn.x - other * turn.y : other * turn.y + x * turn.x;
}

#if UNIT_K == 32
#define WRITE_K(row, e) K_ENCODE(offset(row, (e) / 32 * K_BLOCK_BYTES))
#endif
#if UNIT_V == 32
#define WRITE_V(row, e) V_ENCODE(offset(row, (e) / 32 * V_BLOCK_BYTES))
#endif

#if NORMS
#include "reduce.glsl"
shared float normed[HEAD_DIM];

// The head at `x`, normed, in shared memory.
void norm_head(uvec2 x, bool weighed, uvec2 weight, float eps) {
    float squares = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < HEAD_DIM; i += WG) {
        float v = F32(x).v[i];
        squares += v * v;
        normed[i] = v;
    }
    float factor = inversesqrt(wg_sum(squares) / float(HEAD_DIM) + eps);
    for (uint i = gl_LocalInvocationID.x; i < HEAD_DIM; i += WG) normed[i] *= weighed ? factor * F32(weight).v[i] : factor;
    barrier();
}

// Element i of it, turned.
float turned(uint token, uint i) {
    uint pair = pair_of_key(i);
    if (pair >= PAIRS) return normed[i];
    vec2 turn = turn_of(token, pair);
#if ADJACENT
    uint first = OFFSET + 2 * pair, second = first + 1;
#else
    uint first = OFFSET + pair, second = first + PAIRS;
#endif
    return i == first ? normed[first] * turn.x - normed[second] * turn.y : normed[first] * turn.y + normed[second] * turn.x;
}

void main() {
    const uint heads = Q_HEADS + 2 * KV_HEADS;
    uint token = group_index() / heads, head = group_index() % heads, t = gl_LocalInvocationID.x;
    grid_wait();
    if (token >= p.tokens) return;
    if (head < Q_HEADS) {
        uvec2 x = row_address(row_address(p.q, head, p.q_stride[0]), token, p.q_stride[1]);
        norm_head(x, Q_WEIGHT == 1, p.q_weight, p.eps[0]);
        for (uint i = t; i < HEAD_DIM; i += WG) F32(x).v[i] = turned(token, i);
        return;
    }
    uint id = U32(p.ids).v[token];
    if (id >= p.rows) return;
    head -= Q_HEADS;
    if (head < KV_HEADS) {
        uint start = head * HEAD_DIM;
        uvec2 dst = row_address(p.k_cache, id, p.k_row);
        norm_head(offset(row_address(p.k, token, p.k_stride), 4 * start), K_WEIGHT == 1, p.k_weight, p.eps[1]);
        for (uint i = t * UNIT_K; i < HEAD_DIM; i += WG * UNIT_K) {
#if UNIT_K == 32
            for (uint j = 0; j < 32; j++) block_x[j] = turned(token, i + j);
            WRITE_K(dst, start + i);
#else
            K_STORE(dst, start + i, turned(token, i));
#endif
        }
        return;
    }
    uint start = (head - KV_HEADS) * VALUE_DIM;
    uvec2 src = row_address(p.v, token, p.v_stride), dst = row_address(p.v_cache, id, p.v_row);
    for (uint i = t * UNIT_V; i < VALUE_DIM; i += WG * UNIT_V) {
#if UNIT_V == 32
        for (uint j = 0; j < 32; j++) block_x[j] = F32(src).v[start + i + j];
        WRITE_V(dst, start + i);
#else
        V_STORE(dst, start + i, F32(src).v[start + i]);
#endif
    }
}
#else
void main() {
    uint item = group_index() * WG + gl_LocalInvocationID.x;
    uint q_items = p.tokens * (Q_HEADS / Q_GROUP) * PAIRS;
    bool is_query = item < q_items;
    uint other = item - q_items;
    const uint k_units = K_COLS / UNIT_K, v_units = V_COLS / UNIT_V;
    bool is_key = other < p.tokens * k_units;
    if (!is_key) other -= p.tokens * k_units;
    uint units = is_key ? k_units : v_units, token = is_query ? token_of_query(item) : other / units;
    // Sines and cosines depend on nothing that is still being computed.
    vec2 turn = vec2(1.0, 0.0);
    if (is_query) {
        turn = turn_of(token, pair_of_query(item));
    } else if (UNIT_K == 1 && is_key) {
        uint pair = pair_of_key(other % units);
        if (pair < PAIRS) turn = turn_of(token, pair);
    }
    grid_wait();
    if (is_query) {
        query(item, turn);
        return;
    }
    if (token >= p.tokens) return;
    uint id = U32(p.ids).v[token];
    if (id >= p.rows) return;
    if (is_key) {
        uvec2 src = row_address(p.k, token, p.k_stride), dst = row_address(p.k_cache, id, p.k_row);
        uint e = other % units * UNIT_K;
#if UNIT_K == 32
        for (uint i = 0; i < 32; i++) {
            uint pair = pair_of_key(e + i);
            if (pair < PAIRS) turn = turn_of(token, pair);
            block_x[i] = key(src, e + i, turn);
        }
        WRITE_K(dst, e);
#else
        K_STORE(dst, e, key(src, e, turn));
#endif
    } else {
        uvec2 src = row_address(p.v, token, p.v_stride), dst = row_address(p.v_cache, id, p.v_row);
        uint e = other % units * UNIT_V;
#if UNIT_V == 32
        for (uint i = 0; i < 32; i++) block_x[i] = F32(src).v[e + i];
        WRITE_V(dst, e);
#else
        V_STORE(dst, e, F32(src).v[e]);
#endif
    }
}
#endif
