// Partial results of splits over keys, and how they become the result. A partial of a row is (top, weights) and HSV
// unnormalised sums. The order of summation is that of the splits, whoever does it, so the bits are always the same.
// The scratch holds all pairs, then all sums; partial number = row * splits + split, row = (batch, token, head).

layout(buffer_reference, std430, buffer_reference_align = 8) coherent buffer PartialPair { vec2 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) coherent buffer PartialSum { vec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) coherent buffer Counter { uint v[]; };

uint result_row(uint token, uint head, uint batch) { return (batch * p.tokens + token) * HEADS + head; }

PartialPair partial_pair(uint row, uint split) {
    return PartialPair(row_address(p.scratch, row * p.splits + split, 8));
}

// Sums of a row's first split; those of the next one follow.
uvec2 partial_sums(uint row, uint split) {
    uint pairs = p.tokens * HEADS * BATCH * p.splits;
    return row_address(row_address(p.scratch, (pairs + 1) / 2, 16), row * p.splits + split, HSV * 4);
}

// The factor that turns sums relative to `top` into the result: one over all weights, the sink's among them.
float result_factor(uint head, float top, float weights) {
    float share = 1.0;
#if SINKS
    float sink = F32(p.sinks).v[head];
    if (sink > top) {
        share = exp(top - sink);
        weights = weights * share + 1.0;
    } else {
        weights += exp(sink - top);
    }
#endif
    return weights > 0.0 ? share / weights : 0.0;
}

// Four elements of the result of a row from its first `splits` partials.
void combine(uint row, uint head, uint element4, uint splits) {
    PartialPair pairs = partial_pair(row, 0);
    float top = HIDDEN;
    for (uint s = 0; s < splits; s++) top = max(top, pairs.v[s].x);
    float weights = 0.0;
    vec4 sum = vec4(0.0);
    uvec2 sums = partial_sums(row, 0);
    for (uint first = 0; first < splits; first += COMBINE) {
        // Loads first: as many as COMBINE are on their way at once. Splits without weight left no sums behind.
        vec4 part[COMBINE];
        float share[COMBINE];
        [[unroll]] for (uint i = 0; i < COMBINE; i++) {
            uint s = first + i;
            vec2 pair = s < splits ? pairs.v[s] : vec2(HIDDEN, 0.0);
            bool any = pair.y > 0.0;
            part[i] = any ? PartialSum(row_address(sums, s, HSV * 4)).v[element4] : vec4(0.0);
            share[i] = any ? exp(pair.x - top) : 0.0;
            weights += pair.y * share[i];
        }
        [[unroll]] for (uint i = 0; i < COMBINE; i++) sum += part[i] * share[i];
    }
    F32x4(row_address(p.result, row, HSV * 4)).v[element4] = sum * result_factor(head, top, weights);
}

// The tiles of a split: those from `seen` on, dealt out in runs. `used` is the number of splits that have any, at least 1.
uvec2 split_tiles(uvec2 seen, uint split, out uint used) {
    uint first = seen.x / BC;
    uint end = max((seen.y + BC - 1) / BC, first);
    uint run = max((end - first + p.splits - 1) / p.splits, 1u);
    used = max((end - first + run - 1) / run, 1u);
    uint begin = min(first + split * run, end);
    return uvec2(begin, min(begin + run, end));
}
