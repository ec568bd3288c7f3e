// Partial results of splits over keys, and how they become the result. A partial of a row is (top, weights) and HSV
// unnormalised sums. Splits are summed in order, whichever workgroup does it, so the bits are always the same.
// The scratch holds all pairs, then all sums; partial number = row * splits + split, row = (batch, token, head).

#ifndef ROUNDING
#define ROUNDING 0
#endif
#if ROUNDING
#include "rounded.glsl"
#endif
// EMIT_PACKED_B: results are left as matrix units take them, for the product that reads them.
#if EMIT_PACKED_B
#include "mul_mm/fragment_order.glsl"
#endif

layout(buffer_reference, std430, buffer_reference_align = 8) coherent buffer PartialPair { vec2 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) coherent buffer PartialSum { vec4 v[]; };

uint result_row(uint token, uint head, uint batch) { return (batch * p.tokens + token) * HEADS + head; }

PartialPair partial_pair(uint row, uint split) {
    return PartialPair(row_address(p.scratch, row * p.splits + split, 8));
}

// Sums of a row's first split; those of the next one follow.
uvec2 partial_sums(uint row, uint split) {
    uint pairs = p.tokens * HEADS * BATCH * p.splits;
    return row_address(row_address(p.scratch, (pairs + 1) / 2, 16), row * p.splits + split, HSV * 4);
}

// The factor that turns sums relative to `row_max` into the result: one over all weights, the sink's among them.
float result_factor(uint head, float row_max, float row_sum) {
    float share = 1.0;
#if SINKS
    float sink = F32(p.sinks).v[head];
    if (sink > row_max) {
        share = exp(row_max - sink);
        row_sum = row_sum * share + 1.0;
    } else {
        row_sum += exp(sink - row_max);
    }
#endif
    return row_sum > 0.0 ? share / row_sum : 0.0;
}

// Four elements of the sums of a row, and (maximum, weights), over the splits part.x, part.x + part.y .. below `splits`.
void combine_part(uint row, uint element4, uvec2 part, uint splits, out vec2 pair, out vec4 sum) {
    PartialPair pairs = partial_pair(row, 0);
    uvec2 sums = partial_sums(row, 0);
    pair = vec2(HIDDEN, 0.0);
    sum = vec4(0.0);
    for (uint first = part.x; first < splits; first += part.y * COMBINE) {
        // Loads first: as many as COMBINE pairs and sums are on their way at once.
        vec2 one[COMBINE];
        vec4 got[COMBINE];
        [[unroll]] for (uint i = 0; i < COMBINE; i++) {
            uint s = min(first + i * part.y, splits - 1);
            one[i] = pairs.v[s];
            got[i] = PartialSum(row_address(sums, s, HSV * 4)).v[element4];
        }
        float row_max = pair.x;
        [[unroll]] for (uint i = 0; i < COMBINE; i++) {
            // Splits without weight may have left no sums behind.
            if (first + i * part.y >= splits || !(one[i].y > 0.0)) one[i] = vec2(HIDDEN, 0.0);
            row_max = max(row_max, one[i].x);
        }
        float alpha = exp(pair.x - row_max);
        pair = vec2(row_max, pair.y * alpha);
        sum *= alpha;
        [[unroll]] for (uint i = 0; i < COMBINE; i++) {
            float share = one[i].y > 0.0 ? exp(one[i].x - row_max) : 0.0;
            pair.y += one[i].y * share;
            if (one[i].y > 0.0) sum += got[i] * share;
        }
    }
}

// Four elements of the result of a row. With ROUNDING the eight threads of a group of 32 come here at once.
void put_result(uint row, uint element4, vec4 x) {
    F32x4(row_address(p.result, row, HSV * 4)).v[element4] = x;
#if ROUNDING
    put_rounded(p.rounding, HEADS * HSV, row * HSV + 4 * element4, x, vec4(1.0));
#endif
#if EMIT_PACKED_B
    store_quad(PIECE, p.emit_packed_b, row / HEADS, p.tokens * BATCH, row % HEADS * HSV + 4 * element4, HEADS * HSV, x);
#endif
}

void combined(uint row, uint head, uint element4, vec2 pair, vec4 sum) {
    put_result(row, element4, sum * result_factor(head, pair.x, pair.y));
}

// Four elements of the result of a row from its first `splits` partials.
void combine(uint row, uint head, uint element4, uint splits) {
    vec2 pair;
    vec4 sum;
    combine_part(row, element4, uvec2(0, 1), splits, pair, sum);
    combined(row, head, element4, pair, sum);
}

// The share of the keys of all sequences for each of GOOD_GROUPS workgroups, at least LONG_RUN of them.
uint fair_share() {
    uint all = 0;
    for (uint i = 0; i < BATCH; i++) all += length_of(i);
    return max(all / max(GOOD_GROUPS * RATIO / HEADS, 1u), uint(LONG_RUN));
}

// The tiles of a split: those of `seen`, dealt out evenly in up to SHORT_SPLITS runs of at least RUN tiles, or in more where the
// sequence has more than its share of the keys of all. `used` is the number of splits that have any, at least 1.
uvec2 split_tiles(uvec2 seen, uint split, out uint used) {
    uint first = seen.x / BC;
    uint count = max((seen.y + BC - 1) / BC, first) - first;
    used = clamp((count + RUN - 1) / RUN, 1u, uint(SHORT_SPLITS));
    if (p.splits > SHORT_SPLITS && count * BC > used * LONG_RUN) {
        uint share = fair_share();
        used = clamp((count * BC + share / 2) / share, used, p.splits);
    }
    if (split >= used) return uvec2(first + count);
    return uvec2(first + count * split / used, first + count * (split + 1) / used);
}
