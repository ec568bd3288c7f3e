// sample, second launch: the token of each row, from what the chunks left; and log-probabilities of the logits as they came in.
// token, chosen: [rows]; top_ids, top_values: [n_top, rows]. One workgroup of WG threads for each row.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "sample/row.glsl"
#if CUTS
#include "sample/cuts.glsl"
#endif

void finish(uint row, int token) {
    if (gl_LocalInvocationID.x == 0) I32(p.token).v[row] = token;
}

#if LOGPROBS
// The best of the logits behind `last` in the order of (key, id), among the first `n` of a list or in the whole row.
uvec2 next_largest(uvec2 logits, uvec2 last, uvec2 list, uint n) {
    uvec2 best = NONE;
    for (uint i = gl_LocalInvocationID.x; i < (n <= LIST ? n : p.vocab); i += WG) {
        uint id = i;
        if (n <= LIST) id = Ids(list).v[i];
        uvec2 pair = uvec2(order_key(U32(logits).v[id]), id);
        if (better(last, pair) && better(pair, best)) best = pair;
    }
    return wg_best(best);
}

void no_logprobs(uint row) {
    for (uint i = gl_LocalInvocationID.x; i < p.n_top; i += WG) {
        U32(p.top_ids).v[row * p.n_top + i] = 0;
        F32(p.top_values).v[row * p.n_top + i] = 0;
    }
    if (gl_LocalInvocationID.x == 0) F32(p.chosen).v[row] = 0;
}

void logprobs(uint row, uvec2 scratch, uint token) {
    uint tid = gl_LocalInvocationID.x, chunks = chunks_of_row();
    uvec2 logits = row_address(p.logits, row, p.logits_stride * 4);
    uvec2 largest = NONE;
    for (uint c = tid; c < chunks; c += WG) {
        uvec2 words = chunk_words(scratch, c);
        uvec2 pair = uvec2(U32(words).v[2], U32(words).v[3]);
        if (better(pair, largest)) largest = pair;
    }
    largest = wg_best(largest);
    float most = F32(logits).v[largest.y], sum = 0;
    for (uint c = tid; c < chunks; c += WG) {
        uvec2 words = chunk_words(scratch, c);
        sum += F32(words).v[4] * exp(-below(U32(words).v[2], largest.x, F32(logits).v[U32(words).v[3]], most));
    }
    float rest = log(wg_sum(sum));
    if (tid == 0) {
        float x = F32(logits).v[token];
        F32(p.chosen).v[row] = -below(order_key(floatBitsToUint(x)), largest.x, x, most) - rest;
    }
    // Few tokens are as good as the n-th best of the chunks' best ones.
    uvec2 next = largest, list = list_of(scratch);
    uint n = LIST + 1;
    if (p.n_top > 1 && p.n_top <= chunks) 
        n = list_best(logits, list, bound_of_chunks(scratch, p.n_top, 2), true, scratch, 2);
    for (uint i = 0; i < p.n_top; i++) {
        if (i > 0) next = next_largest(logits, next, list, n);
        if (tid == 0) {
            U32(p.top_ids).v[row * p.n_top + i] = next.y;
            F32(p.top_values).v[row * p.n_top + i] = -below(next.x, largest.x, F32(logits).v[next.y], most) - rest;
        }
    }
}
#endif

void main() {
    uint row = group_index();
    if (row >= p.rows) return;
    int position = I32(p.positions).v[row];
    if (position < 0) {
        finish(row, 0);
#if LOGPROBS
        no_logprobs(row);
#endif
        return;
    }
    Settings s = settings_of(row);
    uvec2 scratch = scratch_of(row), best = NONE;
    uint broken = 0;
    for (uint c = gl_LocalInvocationID.x; c < chunks_of_row(); c += WG) {
        uvec2 words = chunk_words(scratch, c);
        uvec2 pair = uvec2(U32(words).v[0], U32(words).v[1]);
        broken |= U32(words).v[5];
        if (better(pair, best)) best = pair;
    }
    best = wg_best(best);
    broken = wg_best(uvec2(broken, 0)).x;
    if (broken != 0 || best.x <= FORBIDDEN || (CUTS == 0 && s.cuts)) {
        finish(row, -1);
#if LOGPROBS
        no_logprobs(row);
#endif
        return;
    }
    uint token = best.y;
#if CUTS
    if (s.cuts) token = draw_with_cuts(s, uint(position), scratch, best);
#endif
    finish(row, int(token));
#if LOGPROBS
    logprobs(row, scratch, token);
#endif
}
