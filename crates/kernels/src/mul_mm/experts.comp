// The list of tiles of an expert product: (token, slot) pairs sorted by expert, then cut into tiles of up to TILE_N pairs
// of one expert. ids: I32 [used, tokens]; a pair is the number token * used + slot, so tokens are counted with 32 bits.
// One workgroup: it reads the ids twice, and its work is small beside the product's. Where a pair lands among those of
// its expert may differ from run to run (SLOTS writes down which place among the activations of all tiles it got); the activations of a product do not see each other, so results do not.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
// Pairs of each expert, then where its next pair goes.
shared uint count[N_EXPERTS];
shared uint place[N_EXPERTS];
#if SLOTS
// The first pair and the first tile of each expert.
shared uint first_pair[N_EXPERTS];
shared uint first_tile[N_EXPERTS];
#endif

uint expert_of(uint pair) {
    uint token = pair / p.used;
    return U32(row_address(p.ids, token, p.ids_stride)).v[pair - token * p.used];
}

// Every pair I of this thread and its expert E; eight loads are on their way at once.
#define EXPERTS_OF_PAIRS(I, E, STATEMENT)                                                         \
    for (uint first = t; first < p.pairs_in_all; first += 8 * WG) {                               \
        uint experts[8];                                                                          \
        [[unroll]] for (uint j = 0; j < 8; j++) experts[j] = expert_of(min(first + j * WG, p.pairs_in_all - 1)); \
        [[unroll]] for (uint j = 0; j < 8; j++) {                                                 \
            uint I = first + j * WG, E = experts[j];                                              \
            if (I < p.pairs_in_all) { STATEMENT }                                                 \
        }                                                                                         \
    }

void main() {
    uint t = gl_LocalInvocationID.x;
    for (uint e = t; e < N_EXPERTS; e += WG) count[e] = 0;
    barrier();
    EXPERTS_OF_PAIRS(i, e, if (e < N_EXPERTS) atomicAdd(count[e], 1);)
    barrier();
    for (uint e = t; e < N_EXPERTS; e += WG) {
        uint pairs = 0, tiles = 0;
        for (uint before = 0; before < e; before++) {
            pairs += count[before];
            tiles += (count[before] + TILE_N - 1) / TILE_N;
        }
        place[e] = pairs;
#if SLOTS
        first_pair[e] = pairs;
        first_tile[e] = tiles;
#endif
        uint end = pairs + count[e];
        for (uint first = pairs; first < end; first += TILE_N) {
            uint at = 3 * tiles + 1;
            U32(p.tiles).v[at] = e;
            U32(p.tiles).v[at + 1] = first;
            U32(p.tiles).v[at + 2] = end;
            tiles++;
        }
        if (e == N_EXPERTS - 1) U32(p.tiles).v[0] = tiles;
    }
    barrier();
#if SLOTS
    EXPERTS_OF_PAIRS(i, e,
        uint slot = ~0u;
        if (e < N_EXPERTS) {
            uint at = atomicAdd(place[e], 1);
            U32(p.pairs).v[at] = i;
            slot = first_tile[e] * TILE_N + at - first_pair[e];
        }
        U32(p.slots).v[i] = slot;)
#else
    EXPERTS_OF_PAIRS(i, e, if (e < N_EXPERTS) U32(p.pairs).v[atomicAdd(place[e], 1)] = i;)
#endif
}
