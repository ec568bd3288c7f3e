// Where fragment_prefill.comp has keys and values of a round from: the memory of the cache, or tiles in shared memory that hold what lanes would
// load, vector by vector, so that a lane reads 16 bytes beside those of its neighbours. Keys are as they lie in the cache; values are
// turned on their way to the tile, once for all subgroups.
#if K_STAGED || V_STAGED
#define STAGED 1
#else
#define STAGED 0
#endif

#if Q_SHARED
shared uvec4 q_tile[NW * RB * Q_PUT * SG];
#define Q_AT(M) ((gl_SubgroupID * RB * Q_PUT + (M)) * SG + lane)
#endif

// Row of the cache for a key of a block of the round from `start` on. Keys that no query sees are replaced by the nearest visible one: their
// weight is zero, and what is zero times whatever else lies there may be no number.
uint cached_row(uint start, uint block, uint key) {
    uint first = clamp(start + block * MN, lowest / MN * MN, (highest - 1) / MN * MN);
    return cache_row(sequence, first) + clamp(first + key, lowest, highest - 1) - first;
}
uvec2 key_row(uint start, uint block, uint key) { return row_address(keys, cached_row(start, block, key), p.k_stride[0]); }
uvec2 value_row(uint start, uint block, uint key) { return row_address(values, cached_row(start, block, key), p.v_stride[0]); }

// Eight elements of a row, as they are loaded and as halves. Codes (K_CODES, V_CODES bits of them: Q8_0 or Q4_0 in whole words) are
// decoded on their way to the tile, so that nothing waits for loads before; elements of a quad come in the order 0, 2, 1, 3 then, which
// queries and results keep to. Other formats are halves as soon as they are loaded.
#if K_CODES || V_CODES
// Two words of codes with the one behind them, and the word that has the scale. Blocks of odd numbers have codes at multiples of 4 bytes;
// those of even ones are two bytes late, and are loaded from two bytes before.
uvec4 load_codes(uvec2 row, uint e, uint bits) {
    uint bytes = 2 + 4 * bits, block = e / 4, odd = block % 2, word = (bits == 8 ? e % 4 : e % 2) * 2;
    U32 from = U32(offset(row, block * bytes + 4 * word + 2 * odd));
    return uvec4(from.v[0], from.v[1], from.v[2 - odd], U32(offset(row, block * bytes - 2 * odd)).v[0]);
}
// Bytes 0 and 2 of a word become the mantissas of halves from 1024 on, which is exact. The codes of Q8_0 have a sign: 128 is added.
uint code_pair(uint codes, f16vec2 scale, uint bits) {
    uint halves = bits == 8 ? (codes & 0x00ff00ffu) ^ 0x64806480u : (codes & 0x000f000fu) | 0x64006400u;
    return packFloat2x16((unpackFloat2x16(halves) - f16vec2(bits == 8 ? float16_t(1024 + 128) : float16_t(1024 + 8))) * scale);
}
uvec4 halves_of_codes(uvec4 raw, uint e, uint bits) {
    bool odd = e / 4 % 2 == 1;
    uint a = odd ? raw.x : raw.x >> 16 | raw.y << 16, b = odd ? raw.y : raw.y >> 16 | raw.z << 16;
    f16vec2 scale = odd ? unpackFloat2x16(raw.w).yy : unpackFloat2x16(raw.w).xx;
    // Elements 16 apart share a byte.
    uint shift = bits == 4 ? e % 4 / 2 * 4 : 0;
    a >>= shift;
    b >>= shift;
    return uvec4(code_pair(a, scale, bits), code_pair(a >> 8, scale, bits), code_pair(b, scale, bits), code_pair(b >> 8, scale, bits));
}
#endif
#if K_CODES
uvec4 eight_of_key(uvec2 row, uint e) { return load_codes(row, e, K_CODES); }
uvec4 key_halves(uvec4 raw, uint e) { return halves_of_codes(raw, e, K_CODES); }
#define K_IN_ORDER(V) V.xzyw
#else
#define K_IN_ORDER(V) V
uvec4 key_halves(uvec4 raw, uint e) { return raw; }
#if K_HALVES
uvec4 eight_of_key(uvec2 row, uint e) { return U32x4(row).v[e]; }
#else
uvec4 eight_of_key(uvec2 row, uint e) {
    f16vec4 a, b;
    half_k8(row, 8 * e, a, b);
    return uvec4(packFloat2x16(a.xy), packFloat2x16(a.zw), packFloat2x16(b.xy), packFloat2x16(b.zw));
}
#endif
#endif
#if V_CODES
uvec4 eight_of_value(uvec2 row, uint e) { return load_codes(row, e, V_CODES); }
uvec4 value_halves(uvec4 raw, uint e) { return halves_of_codes(raw, e, V_CODES); }
#define V_IN_ORDER(V) V.xzyw
#else
#define V_IN_ORDER(V) V
uvec4 value_halves(uvec4 raw, uint e) { return raw; }
#if V_HALVES
uvec4 eight_of_value(uvec2 row, uint e) { return U32x4(row).v[e]; }
#else
uvec4 eight_of_value(uvec2 row, uint e) {
    f16vec4 a, b;
    half_v8(row, 8 * e, a, b);
    return uvec4(packFloat2x16(a.xy), packFloat2x16(a.zw), packFloat2x16(b.xy), packFloat2x16(b.zw));
}
#endif
#endif

// What a lane loads of the values of a block for V_TILES matrices, and the components of one of these.
#if FRAGMENT_LAYOUT == 0
#define V_LOADS 4
#define VALUE_KEY(LANE, I) key_of(quad_of(LANE), I)
uint low_halves(uint a, uint b) { return packFloat2x16(f16vec2(unpackFloat2x16(a).x, unpackFloat2x16(b).x)); }
uint high_halves(uint a, uint b) { return packFloat2x16(f16vec2(unpackFloat2x16(a).y, unpackFloat2x16(b).y)); }
#define TURNED(V, AT, J)                                                                                 \
    uvec4(low_halves(V[AT][J], V[(AT) + 1][J]), low_halves(V[(AT) + 2][J], V[(AT) + 3][J]),              \
          high_halves(V[AT][J], V[(AT) + 1][J]), high_halves(V[(AT) + 2][J], V[(AT) + 3][J]))
#else
#define V_LOADS 1
#define VALUE_KEY(LANE, I) (LANE)
#define TURNED(V, AT, J) V[AT]
#endif

#if K_STAGED
#define K_VECTORS (BLOCKS * QUADS_OF_LANE * K_CHUNKS * SG)
#define K_FETCHED ((K_VECTORS + WG - 1) / WG)
shared uvec4 k_tile[2 * K_VECTORS];
void fetch_keys(uint start, out uvec4 part[K_FETCHED]) {
    STEP_LOOP for (uint i = 0; i < K_FETCHED; i++) {
        uint at = (t + i * WG) / SG, chunk = at % K_CHUNKS, h = at / K_CHUNKS % QUADS_OF_LANE, block = at / K_CHUNKS / QUADS_OF_LANE;
        if (K_VECTORS % WG == 0 || block < BLOCKS)
            part[i] = eight_of_key(key_row(start, block, row_of(lane, h)), chunk * QUADS + quad_of(lane));
    }
}
void put_keys(uint round, uvec4 part[K_FETCHED]) {
    STEP_LOOP for (uint i = 0; i < K_FETCHED; i++) {
        uint at = t + i * WG, chunk = at / SG % K_CHUNKS;
        if (K_VECTORS % WG == 0 || at < K_VECTORS)
            k_tile[round % 2 * K_VECTORS + at] = key_halves(part[i], chunk * QUADS + quad_of(lane));
    }
}
#define KEYS_COMING uvec4 k_part[K_FETCHED];
#define FETCH_KEYS(START) fetch_keys(START, k_part);
#define PUT_KEYS(ROUND) put_keys(ROUND, k_part);
#define KEY_ROWS(START)
#define KEY_PART(ROUND, BLOCK, H, N) k_tile[((ROUND) % 2 * BLOCKS * QUADS_OF_LANE * K_CHUNKS + ((BLOCK) * QUADS_OF_LANE + H) * K_CHUNKS + N) * SG + lane]
#else
#define KEYS_COMING
#define FETCH_KEYS(START)
#define PUT_KEYS(ROUND)
#define KEY_ROWS(START)                                                                                  \
    uvec2 key_rows[BLOCKS * QUADS_OF_LANE];                                                              \
    STEP_LOOP for (uint i = 0; i < BLOCKS * QUADS_OF_LANE; i++) key_rows[i] = key_row(START, i / QUADS_OF_LANE, row_of(lane, i % QUADS_OF_LANE));
#define KEY_PART(ROUND, BLOCK, H, N) eight_of_key(key_rows[(BLOCK) * QUADS_OF_LANE + H], (N) * QUADS + quad_of(lane))
#endif

#if V_STAGED
#define V_VECTORS (BLOCKS * O_MATRICES * SG)
#define V_FETCHED ((BLOCKS * V_CHUNKS * SG + WG - 1) / WG)
#define V_WHOLE (BLOCKS * V_CHUNKS * SG % WG == 0)
shared uvec4 v_tile[2 * V_VECTORS];
void fetch_values(uint start, out uvec4 part[V_FETCHED * V_LOADS]) {
    STEP_LOOP for (uint i = 0; i < V_FETCHED; i++) {
        uint at = (t + i * WG) / SG, chunk = at % V_CHUNKS, block = at / V_CHUNKS;
        if (V_WHOLE || block < BLOCKS)
            STEP_LOOP for (uint j = 0; j < V_LOADS; j++)
                part[i * V_LOADS + j] = eight_of_value(value_row(start, block, VALUE_KEY(lane, j)), value_chunk(lane, chunk));
    }
}
void put_values(uint round, uvec4 part[V_FETCHED * V_LOADS]) {
    STEP_LOOP for (uint i = 0; i < V_FETCHED; i++) {
        uint at = (t + i * WG) / SG;
        if (V_WHOLE || at < BLOCKS * V_CHUNKS) {
            uvec4 halves[V_LOADS];
            STEP_LOOP for (uint j = 0; j < V_LOADS; j++) halves[j] = value_halves(part[i * V_LOADS + j], value_chunk(lane, at % V_CHUNKS));
            STEP_LOOP for (uint j = 0; j < V_TILES; j++)
                v_tile[round % 2 * V_VECTORS + (at * V_TILES + j) * SG + lane] = TURNED(halves, 0, j);
        }
    }
}
#define VALUES_COMING uvec4 v_part[V_FETCHED * V_LOADS];
#define FETCH_VALUES(START) fetch_values(START, v_part);
#define PUT_VALUES(ROUND) put_values(ROUND, v_part);
#define VALUE_ROWS(START, BLOCK)
#define VALUE_PARTS_OF(BLOCK, N)
#define VALUE_PART(ROUND, BLOCK, N, J) v_tile[((ROUND) % 2 * BLOCKS * O_MATRICES + ((BLOCK) * V_CHUNKS + N) * V_TILES + J) * SG + lane]
#else
#define VALUES_COMING
#define FETCH_VALUES(START)
#define PUT_VALUES(ROUND)
#define VALUE_ROWS(START, BLOCK)                                                                         \
    uvec2 value_rows[V_LOADS];                                                                           \
    STEP_LOOP for (uint i = 0; i < V_LOADS; i++) value_rows[i] = value_row(START, BLOCK, VALUE_KEY(lane, i));
#define VALUE_PARTS_OF(BLOCK, N)                                                                         \
    uvec4 v[V_LOADS];                                                                                    \
    STEP_LOOP for (uint i = 0; i < V_LOADS; i++) v[i] = eight_of_value(value_rows[i], value_chunk(lane, N));
#define VALUE_PART(ROUND, BLOCK, N, J) TURNED(v, 0, J)
#endif

#define STAGED_PARTS KEYS_COMING VALUES_COMING
#define FETCH(START) FETCH_KEYS(START) FETCH_VALUES(START)
#define PUT(ROUND) PUT_KEYS(ROUND) PUT_VALUES(ROUND)
#if STAGED
#define MEET barrier();
#else
#define MEET
#endif
