// What follows when every subgroup of a workgroup has sums of its own for ROWS heads: they become one, and that the result, or with SPLIT
// a partial result, of which the last workgroup to finish (SPLIT 2, counters) or another dispatch (SPLIT 1) adds up all.
#if SPLIT == 2
#include "last_one.glsl"
#endif

#define GROUPS ((RATIO + ROWS - 1) / ROWS)
// Sequences of a workgroup, each with ROWS heads.
#ifndef TOGETHER
#define TOGETHER 1
#endif
#define ALL_ROWS (ROWS * TOGETHER)
#define BATCHES ((BATCH + TOGETHER - 1) / TOGETHER)
#define MERGED (ALL_ROWS * HSV / 4)
shared vec4 merged[SUBGROUPS * MERGED > WG ? SUBGROUPS * MERGED : WG];
shared vec2 pairs_of[SUBGROUPS * ALL_ROWS > WG ? SUBGROUPS * ALL_ROWS : WG];

// An element of the sums of a head.
void put_merged(uint row, uint e, float x) { merged[gl_SubgroupID * MERGED + row * (HSV / 4) + e / 4][e % 4] = x; }

// Whose sums they are: the first head and sequence, and the rows of all.
struct Merging {
    uint token, batch, group, head, rows, split, used;
};
uint head_of(Merging m, uint row) { return m.head + row % ROWS; }
uint result_of(Merging m, uint row) { return result_row(m.token, head_of(m, row), m.batch + row / ROWS); }

void merge(Merging m) {
    uint t = gl_SubgroupID * (WG / SUBGROUPS) + gl_SubgroupInvocationID;
    uint rows = m.rows, split = m.split, used = m.used;
    barrier();
#if SPLIT == 2
    bool whole = used == 1;
#else
    bool whole = SPLIT == 0;
#endif
    // A thread has one element of a row, with ROUNDING and EMIT_PACKED_B four.
#if ROUNDING || EMIT_PACKED_B
#define ITEM vec4
#define ITEMS (HSV / 4)
#define MERGED_AT(S, I) merged[(S) * MERGED + (I)]
#define PARTIAL_AT(SUMS, E) PartialSum(SUMS).v[E]
#else
#define ITEM float
#define ITEMS HSV
#define MERGED_AT(S, I) merged[(S) * MERGED + (I) / 4][(I) % 4]
#define PARTIAL_AT(SUMS, E) PartialSum(SUMS).v[(E) / 4][(E) % 4]
#endif
    for (uint i = t; i < rows * ITEMS; i += WG) {
        uint r = i / ITEMS, e = i % ITEMS;
        float most = HIDDEN;
        [[unroll]] for (uint s = 0; s < SUBGROUPS; s++) most = max(most, pairs_of[s * ALL_ROWS + r].x);
        float all = 0.0;
        ITEM x = ITEM(0.0);
        [[unroll]] for (uint s = 0; s < SUBGROUPS; s++) {
            vec2 pair = pairs_of[s * ALL_ROWS + r];
            float alpha = exp(pair.x - most);
            all += pair.y * alpha;
            x += MERGED_AT(s, i) * alpha;
        }
        uint row = result_of(m, r);
#if SPLIT
        if (!whole) {
            PARTIAL_AT(partial_sums(row, split), e) = x;
            if (e == 0) partial_pair(row, split).v[0] = vec2(most, all);
            continue;
        }
#endif
        x *= result_factor(head_of(m, r), most, all);
#if ROUNDING || EMIT_PACKED_B
        put_result(row, e, x);
#else
        F32(row_address(p.result, row, HSV * 4)).v[e] = x;
#endif
    }

#if SPLIT == 2
    if (whole) return;
    if (!is_last_of(row_address(p.counters, result_row(m.token, m.group, m.batch), 4), used)) return;
    // PARTS threads share four elements of the result, and the splits among them.
    for (uint first = 0; first < rows * (HSV / 4); first += WG / PARTS) {
        uint i = first + t % (WG / PARTS), part = t / (WG / PARTS);
        uint r = i / (HSV / 4), e = i % (HSV / 4);
        bool mine = i < rows * (HSV / 4);
        vec4 x = vec4(0.0);
        vec2 pair = vec2(HIDDEN, 0.0);
        if (mine) combine_part(result_of(m, r), e, uvec2(part, PARTS), used, pair, x);
#if PARTS > 1
        barrier();
        merged[t] = x;
        pairs_of[t] = pair;
        barrier();
        if (part > 0) continue;
        float most = HIDDEN;
        [[unroll]] for (uint j = 0; j < PARTS; j++) most = max(most, pairs_of[j * (WG / PARTS) + t].x);
        x = vec4(0.0);
        float all = 0.0;
        [[unroll]] for (uint j = 0; j < PARTS; j++) {
            vec2 pair = pairs_of[j * (WG / PARTS) + t];
            float alpha = exp(pair.x - most);
            all += pair.y * alpha;
            x += merged[j * (WG / PARTS) + t] * alpha;
        }
        pair = vec2(most, all);
#endif
        if (mine) combined(result_of(m, r), head_of(m, r), e, pair, x);
    }
#endif
}
