// What both launches of `sample` know of a row: its settings (the words of `row.rs`), its scratch memory, and reductions.
//   scratch of a row: [vocab] adjusted logits, [CHUNK_WORDS] for each chunk, [LIST] ids
//   words of a chunk: 0 key, 1 id of the best token; 2 key, 3 id of the largest logit as it came in, 4 sum of exponentials
//                     relative to that; 5 whether there was a NaN
#include "reduce.glsl"
#include "order.glsl"
#include "sample/numbers.glsl"

// The key of minus infinity: tokens at or below it are forbidden.
#define FORBIDDEN 0x007fffffu
#define WHOLE (1u << 24)

struct Settings {
    float temperature;
    uint top_k, top_p, typical_p;
    float ln_min_p;
    uvec2 seed;
    bool cuts;
};

uint setting(uint row, uint word) { return U32(p.settings).v[row * WORDS + word]; }

Settings settings_of(uint row) {
    Settings s;
    s.temperature = uintBitsToFloat(setting(row, 0));
    s.top_k = setting(row, 1);
    s.top_p = setting(row, 2);
    s.typical_p = setting(row, 3);
    s.ln_min_p = uintBitsToFloat(setting(row, 4));
    s.seed = uvec2(setting(row, 10), setting(row, 11));
    bool limited = setting(row, 4) != 0xff800000u;
    s.cuts = s.temperature > 0.0 && (s.top_k > 0 || s.top_p < WHOLE || s.typical_p < WHOLE || limited);
    return s;
}

uint chunks_of_row() { return (p.vocab + CHUNK - 1) / CHUNK; }
uvec2 scratch_of(uint row) { return row_address(p.scratch, row, p.scratch_words * 4); }
uvec2 chunk_words(uvec2 scratch, uint chunk) { return offset(scratch, (p.vocab + chunk * CHUNK_WORDS) * 4); }
uvec2 list_of(uvec2 scratch) { return offset(scratch, (p.vocab + chunks_of_row() * CHUNK_WORDS) * 4); }

// How far a logit lies below the largest one; two infinite ones are level.
float below(uint key, uint most_key, float x, float most) {
    precise float distance = most - x;
    return key == most_key ? 0.0 : distance;
}

// The better of (key, id): the larger key, of equal ones the lower id.
bool better(uvec2 a, uvec2 b) { return a.x > b.x || (a.x == b.x && a.y < b.y); }
const uvec2 NONE = uvec2(0, 0xffffffffu);

shared uvec2 pair_space[WG];

// Both must be called by every thread of the workgroup; all get the result.
uvec2 wg_best(uvec2 mine) {
    uint t = gl_LocalInvocationID.x;
#if SUBGROUPS
    uint key = subgroupMax(mine.x), id = subgroupMin(mine.x == key ? mine.y : 0xffffffffu);
    barrier();
    if (subgroupElect()) pair_space[gl_SubgroupID] = uvec2(key, id);
    barrier();
    uvec2 best = pair_space[0];
    for (uint i = 1; i < gl_NumSubgroups; i++) if (better(pair_space[i], best)) best = pair_space[i];
    return best;
#else
    barrier();
    pair_space[t] = mine;
    barrier();
    for (uint s = WG / 2; s > 0; s >>= 1) {
        if (t < s && better(pair_space[t + s], pair_space[t])) pair_space[t] = pair_space[t + s];
        barrier();
    }
    return pair_space[0];
#endif
}

// Ids that threads leave for each other.
layout(buffer_reference, std430, buffer_reference_align = 4) coherent buffer Ids { uint v[]; };

shared uint list_length;
shared uvec2 chunk_bound;

uvec2 best_of_chunk(uvec2 scratch, uint chunk, uint word) {
    U32 words = U32(chunk_words(scratch, chunk));
    return uvec2(words.v[word], words.v[word + 1]);
}

// The k-th best of the chunks' best tokens, as (key, id): k tokens at least are as good. The words of a chunk from `word` on hold
// its best.
uvec2 bound_of_chunks(uvec2 scratch, uint k, uint word) {
    uint chunks = chunks_of_row();
    barrier();
    for (uint c = gl_LocalInvocationID.x; c < min(chunks, WG); c += WG) pair_space[c] = best_of_chunk(scratch, c, word);
    barrier();
    for (uint c = gl_LocalInvocationID.x; c < chunks; c += WG) {
        uvec2 mine = best_of_chunk(scratch, c, word);
        uint before = 0;
        for (uint i = 0; i < min(chunks, WG); i++) before += uint(better(pair_space[i], mine));
        // Chunks that did not fit shared memory.
        for (uint i = WG; i < chunks; i++) before += uint(better(best_of_chunk(scratch, i, word), mine));
        if (before == k - 1) chunk_bound = mine;
    }
    barrier();
    return chunk_bound;
}

// Loads in flight of a pass over the whole row.
#define AHEAD 8

// Threads that look through a chunk together.
#define TEAM 32

// Appends the tokens first, first + step, .. before `end` that are as good as the bound.
void list_run(uvec2 logits, uvec2 list, uvec2 bound, uint first, uint step, uint end) {
    for (; first < end; first += step * AHEAD) {
        uint bits[AHEAD];
        [[unroll]] for (uint j = 0; j < AHEAD; j++) bits[j] = U32(logits).v[min(first + j * step, end - 1)];
        [[unroll]] for (uint j = 0; j < AHEAD; j++) {
            uint id = first + j * step;
            if (id < end && !better(bound, uvec2(order_key(bits[j]), id))) {
                uint at = atomicAdd(list_length, 1);
                if (at < LIST) Ids(list).v[at] = id;
            }
        }
    }
}

// Lists the tokens of a row of logits that are as good as the bound, in no order, and gives their number; of more than LIST only
// this many are listed. Where the bound is that of few chunks, the others need no look: the words of a chunk from `word` on hold
// its best.
uint list_best(uvec2 logits, uvec2 list, uvec2 bound, bool few, uvec2 scratch, uint word) {
    uint tid = gl_LocalInvocationID.x;
    barrier();
    if (tid == 0) list_length = 0;
    barrier();
    if (few) {
        for (uint c = tid / TEAM; c < chunks_of_row(); c += WG / TEAM)
            if (!better(bound, best_of_chunk(scratch, c, word)))
                list_run(logits, list, bound, c * CHUNK + tid % TEAM, TEAM, min((c + 1) * CHUNK, p.vocab));
    } else {
        list_run(logits, list, bound, tid, WG, p.vocab);
    }
    memoryBarrierBuffer();
    barrier();
    return list_length;
}

// Whole numbers of 64 bits, low word first.
uvec2 plus64(uvec2 a, uvec2 b) {
    uint carry;
    uint low = uaddCarry(a.x, b.x, carry);
    return uvec2(low, a.y + b.y + carry);
}
uvec2 minus64(uvec2 a, uvec2 b) {
    uint borrow;
    uint low = usubBorrow(a.x, b.x, borrow);
    return uvec2(low, a.y - b.y - borrow);
}
bool less64(uvec2 a, uvec2 b) { return a.y < b.y || (a.y == b.y && a.x < b.x); }

uvec2 wg_sum64(uvec2 mine) {
    uint t = gl_LocalInvocationID.x;
    barrier();
    pair_space[t] = mine;
    barrier();
    for (uint s = WG / 2; s > 0; s >>= 1) {
        if (t < s) pair_space[t] = plus64(pair_space[t], pair_space[t + s]);
        barrier();
    }
    return pair_space[0];
}
