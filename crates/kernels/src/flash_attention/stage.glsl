// Slices of K and V on their way to shared memory: BC keys, chunks of eight elements, zero past `end` and past the head.
// With PREFETCH a thread's chunks are loaded into registers first (FETCH_*) and stored later (PUT_*), so that loads and
// matrices overlap; without, PUT_* does both and is quick to compile.

#if PREFETCH
#define CHUNKS(SLICE) ((BC * SLICE / 8 + WG - 1) / WG)
#define STAGED_CHUNKS f16vec4 k_chunk[2 * CHUNKS(K_SLICE)], v_chunk[2 * CHUNKS(V_SLICE)];
#define FETCH_K(START, END, NUMBER) fetch_k(k_chunk, keys, sequence, START, END, NUMBER)
#define FETCH_V(START, END, NUMBER) fetch_v(v_chunk, values, sequence, START, END, NUMBER)
#define PUT_K(START, END, NUMBER) put_k(k_chunk)
#define PUT_V(START, END, NUMBER) put_v(v_chunk)

#define FETCH(NAME, SLICE, SIZE, HALF8, STRIDE)                                \
    void NAME(out f16vec4 chunk[2 * CHUNKS(SLICE)], uvec2 base, uint sequence, uint start, uint end, uint slice) { \
        [[unroll]] for (uint c = 0; c < CHUNKS(SLICE); c++) {                  \
            uint i = t + c * WG;                                               \
            uint key = start + i / (SLICE / 8), e = slice * SLICE + i % (SLICE / 8) * 8; \
            chunk[2 * c] = chunk[2 * c + 1] = f16vec4(0.0);                    \
            if (i < BC * SLICE / 8 && key < end && e < SIZE)                   \
                HALF8(row_address(base, cache_row(sequence, key), STRIDE), e, chunk[2 * c], chunk[2 * c + 1]); \
        }                                                                      \
    }
#define PUT(NAME, SLICE)                                                       \
    void NAME(f16vec4 chunk[2 * CHUNKS(SLICE)]) {                              \
        [[unroll]] for (uint c = 0; c < CHUNKS(SLICE); c++) {                  \
            uint i = t + c * WG;                                               \
            if (i >= BC * SLICE / 8) break;                                    \
            uint at = i / (SLICE / 8) * KV_STRIDE + i % (SLICE / 8) * 2;       \
            kv[at] = chunk[2 * c];                                             \
            kv[at + 1] = chunk[2 * c + 1];                                     \
        }                                                                      \
    }
FETCH(fetch_k, K_SLICE, HSK, half_k8, p.k_stride[0])
FETCH(fetch_v, V_SLICE, HSV, half_v8, p.v_stride[0])
PUT(put_k, K_SLICE)
PUT(put_v, V_SLICE)

#else
#define STAGED_CHUNKS
#define FETCH_K(START, END, NUMBER)
#define FETCH_V(START, END, NUMBER)
#define PUT_K(START, END, NUMBER) stage_k(keys, sequence, START, END, NUMBER)
#define PUT_V(START, END, NUMBER) stage_v(values, sequence, START, END, NUMBER)

#define STAGE(NAME, SLICE, SIZE, HALF8, STRIDE)                                \
    void NAME(uvec2 base, uint sequence, uint start, uint end, uint slice) {   \
        [[dont_unroll]] for (uint i = t; i < BC * SLICE / 8; i += WG) {        \
            uint key = start + i / (SLICE / 8), e = slice * SLICE + i % (SLICE / 8) * 8; \
            f16vec4 a = f16vec4(0.0), b = a;                                   \
            if (key < end && e < SIZE) HALF8(row_address(base, cache_row(sequence, key), STRIDE), e, a, b); \
            uint at = i / (SLICE / 8) * KV_STRIDE + i % (SLICE / 8) * 2;       \
            kv[at] = a;                                                        \
            kv[at + 1] = b;                                                    \
        }                                                                      \
    }
STAGE(stage_k, K_SLICE, HSK, half_k8, p.k_stride[0])
STAGE(stage_v, V_SLICE, HSV, half_v8, p.v_stride[0])
#endif
