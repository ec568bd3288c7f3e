// choose_keys, second launch: the MOST best blocks of a column, in their order. A workgroup of WG threads for each column of the list.
// Scores become integers in the same order. Four rounds of counting eight bits find the least one that is chosen, and how many of those
// that equal it; then each thread takes a run of blocks, and sums over the threads before it say where its own go.
#version 450
#include "kiln.glsl"
#include "order.glsl"

layout(local_size_x = WG) in;
#include "choose_keys/places.glsl"

#define TOKENS (PER_KEY * BLOCK)
#define BINS 256
#define BINS_OF_THREAD ((BINS + WG - 1) / WG)
shared uint bins[BINS];
shared uint found, rest, last_chosen;
shared uvec2 before[WG];

uvec2 scores;
uint keys, blocks;

// The last blocks come before all others.
uint goodness(uint block) {
    if (block + NEAR >= blocks) return 0xffffffffu;
    uint best = 0;
    for (uint key = block * BLOCK; key < min(keys, block * BLOCK + BLOCK); key++) best = max(best, order_key(U32(scores).v[key]));
    return best;
}

// Every bin becomes the sum of itself and all behind it.
void add_bins_up() {
    uint t = gl_LocalInvocationID.x;
    for (uint s = 1; s < BINS; s <<= 1) {
        uint sums[BINS_OF_THREAD];
        [[unroll]] for (uint n = 0, i = t; n < BINS_OF_THREAD; n++, i += WG)
            if (i < BINS) sums[n] = bins[i] + (i + s < BINS ? bins[i + s] : 0);
        barrier();
        [[unroll]] for (uint n = 0, i = t; n < BINS_OF_THREAD; n++, i += WG) if (i < BINS) bins[i] = sums[n];
        barrier();
    }
}

// The goodness of the last block that is chosen, and how many as good are.
uvec2 least() {
    uint t = gl_LocalInvocationID.x, prefix = 0, wanted = MOST;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (uint i = t; i < BINS; i += WG) bins[i] = 0;
        barrier();
        for (uint block = t; block < blocks; block += WG) {
            uint good = goodness(block);
            if (shift == 24 || good >> (shift + 8) == prefix >> (shift + 8)) atomicAdd(bins[(good >> shift) & 255u], 1);
        }
        barrier();
        add_bins_up();
        for (uint i = t; i < BINS; i += WG) {
            uint above = i + 1 < BINS ? bins[i + 1] : 0;
            if (bins[i] >= wanted && above < wanted) {
                found = i;
                rest = wanted - above;
            }
        }
        barrier();
        prefix |= found << shift;
        wanted = rest;
        barrier();
    }
    return uvec2(prefix, wanted);
}

void main() {
    uint column = group_index(), t = gl_LocalInvocationID.x;
    if (column >= p.columns) return;
    uint row = row_of_column(column), group = column % GROUPS;
    uint seen = min(seen_by(row), uint(PAGES * PAGE)), sequence = sequence_of(row);
    keys = seen / PER_KEY;
    blocks = (keys + BLOCK - 1) / BLOCK;
    scores = row_address(p.scores, column, 4 * p.keys);
    if (t == 0) last_chosen = 0;

    bool all = blocks <= MOST;
    uvec2 end = uvec2(0, blocks);
    if (!all) end = least();

    // Those that are better than the least one and those that equal it, of which the first are chosen.
    uint run = (blocks + WG - 1) / WG, start = min(t * run, blocks), stop = min(start + run, blocks);
    uvec2 mine = uvec2(0);
    for (uint block = start; block < stop; block++) {
        uint good = all ? 0 : goodness(block);
        mine += uvec2(good > end.x ? 1 : 0, good == end.x ? 1 : 0);
    }
    before[t] = mine;
    barrier();
    for (uint s = 1; s < WG; s <<= 1) {
        uvec2 sum = before[t] + (t >= s ? before[t - s] : uvec2(0));
        barrier();
        before[t] = sum;
        barrier();
    }
    uvec2 at = before[t] - mine;
    uvec2 list = row_address(p.list, column, 4 * ROOM);
    for (uint block = start; block < stop; block++) {
        uint good = all ? 0 : goodness(block);
        bool equals = good == end.x, takes = good > end.x || (equals && at.y < end.y);
        uint to = (at.x + min(at.y, end.y)) * TOKENS;
        at += uvec2(good > end.x ? 1 : 0, equals ? 1 : 0);
        if (!takes) continue;
        if (block == blocks - 1) last_chosen = 1;
        for (uint i = 0; i < TOKENS && block * TOKENS + i < seen; i++)
            I32(list).v[to + i] = int(cache_row(sequence, block * TOKENS + i, PAGE) * GROUPS + group);
    }
    barrier();
    uint count = min(blocks, uint(MOST)) * TOKENS;
    // The last block may not be full yet.
    if (last_chosen == 1 && blocks * TOKENS > seen) count -= blocks * TOKENS - seen;
#if TAIL
    for (uint token = keys * PER_KEY + t; token < seen; token += WG)
        I32(list).v[count + token - keys * PER_KEY] = int(cache_row(sequence, token, PAGE) * GROUPS + group);
    count += seen - keys * PER_KEY;
#endif
    for (uint i = count + t; i < ROOM; i += WG) I32(list).v[i] = 0;
    if (t == 0) I32(p.counts).v[column] = int(count);
}
