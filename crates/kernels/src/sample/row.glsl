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
