// kv_write: what stands between the projections and attention, in one launch. Queries are turned by their positions in
// place (as rope does), keys are turned and written to their rows of the cache, values are written to theirs.
// q: [HEAD_DIM, Q_HEADS, tokens]; k, v: [K_COLS, tokens], [V_COLS, tokens]; caches: [.., rows], of floats or simple blocks.
// A row number outside of the caches drops the row. Threads: one for each pair of q in Q_GROUP heads, which turn alike (elements
// in no pair stay), then one for each UNIT_K elements of k, then one for each UNIT_V elements of v.
#version 450
#define HANDOVER_LATE 1
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
    await_inputs();
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
