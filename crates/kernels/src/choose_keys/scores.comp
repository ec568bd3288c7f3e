// choose_keys, first launch: the scores of all keys that a query sees: sum over heads of weight * max(0, q . k), or with EACH
// q . k of one head. A workgroup of WG threads takes WG keys of one column of the list, a thread a key, which stays in its registers; the
// queries of HELD heads at a time lie in shared memory. Scores of keys that are not there are not written, nor read later.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "formats.glsl"
#include "choose_keys/places.glsl"

#define QUADS (WIDTH / 4)
shared vec4 held[HELD * QUADS];

void main() {
    K_INIT();
    uint tiles = (p.keys + WG - 1) / WG;
    uint column = group_index() / tiles, first = group_index() % tiles * WG;
    if (column >= p.columns) return;
    uint row = row_of_column(column), t = gl_LocalInvocationID.x;
    uint keys = min(seen_by(row) / PER_KEY, p.keys);
    if (first >= keys) return;
    uint key = first + t;
    bool inside = key < keys;

    vec4 k[QUADS];
    if (inside) {
        uvec2 at = row_address(p.k, cache_row(sequence_of(row), key, PAGE / PER_KEY), p.k_stride);
        [[unroll]] for (uint i = 0; i < QUADS; i++) k[i] = K_LOAD4(at, 4 * i);
    }
    uvec2 q = row_address(p.q, row, p.q_stride[1]);
#if EACH
    uint head0 = column % GROUPS, heads = head0 + 1;
#else
    const uint head0 = 0, heads = HEADS;
#endif
    float score = 0.0;
    for (uint head = head0; head < heads; head += HELD) {
        barrier();
        for (uint i = t; i < HELD * QUADS; i += WG) {
            uint h = head + i / QUADS;
            if (h < heads) held[i] = F32x4(row_address(q, h, p.q_stride[0])).v[i % QUADS];
        }
        barrier();
        if (!inside) continue;
        for (uint i = 0; i < min(uint(HELD), heads - head); i++) {
            vec4 sums = vec4(0.0);
            [[unroll]] for (uint e = 0; e < QUADS; e++) sums += k[e] * held[i * QUADS + e];
            float product = (sums.x + sums.y) + (sums.z + sums.w);
#if EACH
            score = product;
#else
            product = max(product, 0.0);
#if WEIGHTS
            product *= F32(row_address(p.weights, row, p.weights_stride)).v[head + i];
#endif
            score += product;
#endif
        }
    }
    if (inside) F32(row_address(p.scores, column, 4 * p.keys)).v[key] = score;
}
