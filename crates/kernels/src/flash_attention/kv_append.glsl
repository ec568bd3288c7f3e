// What arrives with a token (KV_APPEND): its queries, key and value as the products left them. The workgroup turns the queries of its
// heads. If it has the last run of keys, it turns the key as well, rounds key and value to what the caches hold, writes both there, and uses
// them from shared memory: their rows cannot be read in this dispatch. Bits are those of kv_write, whose work this is.
// A head is HSK / 8 items of eight elements: four pairs each, then elements that are in no pair. Lane l of a team has items l, l + LANES ..
#include "rope_phase.glsl"
#if NORMS
#extension GL_KHR_shader_subgroup_arithmetic : require
#endif

// The queries, the key and the value.
shared vec4 appended[(ROWS + 1) * (HSK / 4) + HSV / 4];
#define APPENDED_K (ROWS * (HSK / 4))
#define APPENDED_V (APPENDED_K + HSK / 4)
#define PAIR_ITEMS (PAIRS / 4)

// The token's own key where this workgroup's run has it; past all keys where not.
uint own_key;
vec4 cosines[K_CHUNKS], sines[K_CHUNKS];

// Turns depend on nothing that is still being computed.
void prepare_turns(int position, uint lane) {
    [[unroll]] for (uint c = 0; c < K_CHUNKS; c++) {
        uint item = min(lane + c * LANES, PAIR_ITEMS - 1);
        [[unroll]] for (uint i = 0; i < 4; i++) {
            vec2 turn = cos_sin(phase_of(position, 4 * item + i)) * uintBitsToFloat(MAGNITUDE);
            cosines[c][i] = turn.x;
            sines[c][i] = turn.y;
        }
    }
}

// Which quads of a head an item has.
uvec2 quads_of(uint item) {
    if (item >= PAIR_ITEMS) {
        uint rest = 2 * (item - PAIR_ITEMS);
        rest += rest < OFFSET / 4 ? 0 : PAIRS / 2;
        return uvec2(rest, rest + 1);
    }
#if ADJACENT
    return uvec2(OFFSET / 4 + 2 * item, OFFSET / 4 + 2 * item + 1);
#else
    return uvec2(OFFSET / 4 + item, OFFSET / 4 + item + PAIRS / 4);
#endif
}

void turn_pairs(inout vec4 a, inout vec4 b, vec4 c, vec4 s) {
#if ADJACENT
    vec4 first = vec4(a.xz, b.xz), second = vec4(a.yw, b.yw);
#else
    vec4 first = a, second = b;
#endif
    vec4 x = first * c - second * s, y = first * s + second * c;
#if ADJACENT
    a = vec4(x.x, y.x, x.y, y.y);
    b = vec4(x.z, y.z, x.w, y.w);
#else
    a = x;
    b = y;
#endif
}

#if K_HALF
vec4 as_cached_k(vec4 x) { return vec4(f16vec4(within_half(x))); }
void store_k(uvec2 row, uint quad, vec4 x) { F16x4(row).v[quad] = f16vec4(within_half(x)); }
#else
vec4 as_cached_k(vec4 x) { return x; }
void store_k(uvec2 row, uint quad, vec4 x) { F32x4(row).v[quad] = x; }
#endif
#if V_HALF
vec4 as_cached_v(vec4 x) { return vec4(f16vec4(within_half(x))); }
void store_v(uvec2 row, uint quad, vec4 x) { F16x4(row).v[quad] = f16vec4(within_half(x)); }
#else
vec4 as_cached_v(vec4 x) { return x; }
void store_v(uvec2 row, uint quad, vec4 x) { F32x4(row).v[quad] = x; }
#endif

// Eight halves that are exact, or eight floats, as `fetch_k` and `fetch_v` give them.
void raw_of(vec4 a, vec4 b, out uvec4 x) {
    x = uvec4(packHalf2x16(a.xy), packHalf2x16(a.zw), packHalf2x16(b.xy), packHalf2x16(b.zw));
}
void raw_of(vec4 a, vec4 b, out Floats x) {
    x.a = a;
    x.b = b;
}

#if NORMS
shared float norm_factors[ROWS + 1];

// The factor of a head's norm, the squares added up in the order of kv_write: NORM_THREADS threads take elements in turn, then
// their subgroups are added up. Called by a whole subgroup.
void norm_factor(uvec2 head, float eps, uint row) {
    float partial = 0.0;
    [[unroll]] for (uint s = 0; s < NORM_THREADS / SUBGROUP; s++) {
        float squares = 0.0;
        for (uint i = s * SUBGROUP + gl_SubgroupInvocationID; i < HSK; i += NORM_THREADS) {
            float x = F32(head).v[i];
            squares += x * x;
        }
        float sum = subgroupAdd(squares);
        if (gl_SubgroupInvocationID == s) partial = sum;
    }
    float factor = inversesqrt(subgroupAdd(partial) / float(HSK) + eps);
    if (gl_SubgroupInvocationID == 0) norm_factors[row] = factor;
}
#endif

// Where what arrives comes from, and where it goes.
struct Arrival {
    uint lane, team;
    // First query of the workgroup, how many it has, and the head of the caches.
    uvec2 queries;
    uint rows, kv_head, batch;
    // Whether the token's key and value are this workgroup's to turn and round, and to write, to this row.
    bool last, writes;
    uint id;
};

uvec2 new_key(Arrival x) { return offset(row_address(p.k_new, x.batch, p.new_stride[0]), x.kv_head * HSK * 4); }

// Row `row` of the queries, or the key behind them.
void arrive_row(Arrival x, uint row) {
    bool key = row == ROWS;
    uvec2 from = key ? new_key(x) : row_address(x.queries, row, p.q_stride[1]);
    uvec2 to = row_address(keys, x.id, p.k_stride[0]);
    [[unroll]] for (uint c = 0; c < K_CHUNKS; c++) {
        uint item = x.lane + c * LANES;
        if (item >= HSK / 8) break;
        uvec2 quad = quads_of(item);
        vec4 a = F32x4(from).v[quad.x], b = F32x4(from).v[quad.y];
#if NORMS
        float factor = norm_factors[row];
        uvec2 weight = key ? p.k_weight : p.q_weight;
        bool weighed = key ? K_WEIGHT == 1 : Q_WEIGHT == 1;
        a *= weighed ? factor * F32x4(weight).v[quad.x] : vec4(factor);
        b *= weighed ? factor * F32x4(weight).v[quad.y] : vec4(factor);
#endif
        if (item < PAIR_ITEMS) turn_pairs(a, b, cosines[c], sines[c]);
        if (key) {
            if (x.writes) {
                store_k(to, quad.x, a);
                store_k(to, quad.y, b);
            }
            a = as_cached_k(a);
            b = as_cached_k(b);
        }
        appended[row * (HSK / 4) + quad.x] = a;
        appended[row * (HSK / 4) + quad.y] = b;
    }
}

void arrive_value(Arrival x) {
    uvec2 from = offset(row_address(p.v_new, x.batch, p.new_stride[1]), x.kv_head * HSV * 4);
    uvec2 to = row_address(values, x.id, p.v_stride[0]);
    for (uint quad = x.lane; quad < HSV / 4; quad += LANES) {
        vec4 a = F32x4(from).v[quad];
        if (x.writes) store_v(to, quad, a);
        appended[APPENDED_V + quad] = as_cached_v(a);
    }
}

// Fills `appended`; every thread of the workgroup comes here.
void arrive(Arrival x) {
#if NORMS
    for (uint row = gl_SubgroupID; row <= ROWS; row += SUBGROUPS) {
        if (row < x.rows) norm_factor(row_address(x.queries, row, p.q_stride[1]), uintBitsToFloat(Q_EPS), row);
        if (row == ROWS && x.last) norm_factor(new_key(x), uintBitsToFloat(K_EPS), row);
    }
    barrier();
#endif
    // A row for each team.
    [[unroll]] for (uint first = 0; first < ROWS + 2; first += TEAMS) {
        uint row = first + x.team;
        if (row < x.rows || (row == ROWS && x.last)) arrive_row(x, row);
        if (row == ROWS + 1 && x.last) arrive_value(x);
    }
    barrier();
}

// Puts the token's key instead of what was loaded for it and for those past the end. That is never used, but has to be finite.
void take_own_key(uint first, uint lane, inout RawK k[PREFETCH * K_CHUNKS]) {
    [[unroll]] for (uint c = 0; c < K_CHUNKS; c++) {
        uint e = min(lane + c * LANES, HSK / 8 - 1);
        [[unroll]] for (uint f = 0; f < PREFETCH; f++)
            if (first + f >= own_key) raw_of(appended[APPENDED_K + 2 * e], appended[APPENDED_K + 2 * e + 1], k[f * K_CHUNKS + c]);
    }
}

// The same for its value. Apart from the key, so that values are still on their way while keys are multiplied.
void take_own_value(uint first, uint lane, inout RawV v[PREFETCH * V_CHUNKS]) {
    [[unroll]] for (uint c = 0; c < V_CHUNKS; c++) {
        uint e = min(lane + c * LANES, HSV / 8 - 1);
        [[unroll]] for (uint f = 0; f < PREFETCH; f++)
            if (first + f >= own_key) raw_of(appended[APPENDED_V + 2 * e], appended[APPENDED_V + 2 * e + 1], v[f * V_CHUNKS + c]);
    }
}
