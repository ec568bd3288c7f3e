// Draws a token of a row that top_k, typical_p, top_p or min_p cut down, without sorting it: thresholds are searched four bits at a
// time by counting and weighing. Tokens are ordered by (depth, id), smallest first: depth is how far the key of the logit lies
// below the largest one. The first thing done is to list the few tokens that can matter, where few can.

uvec2 adjusted;       // The row's logits.
uvec2 list;           // Ids of the tokens that are looked through, if `listed`.
bool listed = false;
uint candidates;      // Number of tokens looked through.
uint most_key;
float most;           // The largest logit.
// What is kept: (depth, id) and (distance from the mean, id) up to these.
uvec2 deepest = uvec2(0xffffffffu), farthest = uvec2(0xffffffffu);
float mean;
bool typical = false;

struct Token {
    uint id, depth;
    float logit, distance;
    bool kept;
};

bool within(uint major, uint id, uvec2 bound) { return major < bound.x || (major == bound.x && id <= bound.y); }

uint off_mean(float distance) {
    precise float off = distance - mean;
    return floatBitsToUint(abs(off));
}

Token token_of(uint id, uint bits) {
    Token t;
    t.id = id;
    uint key = order_key(bits);
    t.depth = most_key - key;
    t.logit = uintBitsToFloat(bits);
    t.distance = below(key, most_key, t.logit, most);
    t.kept = key > FORBIDDEN && within(t.depth, id, deepest) && (!typical || within(off_mean(t.distance), id, farthest));
    return t;
}

Token candidate(uint n) {
    uint id = listed ? Ids(list).v[n] : n;
    return token_of(id, U32(adjusted).v[id]);
}

// Sums of a pass for each value of four bits: numbers of tokens, and weights in parts of ten bits, whose sums fit.
shared uint bins[4][16];

// The last token, as its place in the order, of the shortest beginning of the kept tokens that has `least` of them, or weighs
// `least`. The order is (depth, id), or (distance from the mean, id).
uvec2 beginning(bool by_mean, bool by_weight, uvec2 least) {
    uint tid = gl_LocalInvocationID.x;
    uvec2 bound = uvec2(0);
    for (uint digit = 0; digit < 14; digit++) {
        // Eight digits of the depth, then six of the id, which has 24 bits.
        bool of_id = digit >= 8;
        uint shift = of_id ? 20 - 4 * (digit - 8) : 28 - 4 * digit;
        uint above = digit == 0 ? 0 : ~0u << (shift + 4);
        barrier();
        for (uint i = tid; i < 64; i += WG) bins[i / 16][i % 16] = 0;
        barrier();
        for (uint n = tid; n < candidates; n += WG) {
            Token t = candidate(n);
            uint major = by_mean ? off_mean(t.distance) : t.depth, word = of_id ? t.id : major;
            uint known = of_id ? bound.y : bound.x;
            bool here = t.kept && ((word ^ known) & above) == 0 && (!of_id || major == bound.x);
            if (!here) continue;
            uint bin = word >> shift & 15;
            atomicAdd(bins[0][bin], 1);
            if (by_weight) {
                uint weight = weight_of(t.distance);
                atomicAdd(bins[1][bin], weight & 1023);
                atomicAdd(bins[2][bin], weight >> 10 & 1023);
                atomicAdd(bins[3][bin], weight >> 20);
            }
        }
        barrier();
        uint bin = 0;
        uvec2 has;
        for (; bin < 16; bin++) {
            has = uvec2(bins[0][bin], 0);
            if (by_weight) {
                uvec2 middle = uvec2(bins[2][bin] << 10, bins[2][bin] >> 22);
                uvec2 high = uvec2(bins[3][bin] << 20, bins[3][bin] >> 12);
                has = plus64(uvec2(bins[1][bin], 0), plus64(middle, high));
            }
            if (!less64(has, least)) break;
            least = minus64(least, has);
        }
        // There is less than asked for: everything is kept.
        if (bin == 16) return uvec2(0xffffffffu);
        if (of_id) bound.y |= bin << shift;
        else bound.x |= bin << shift;
        // All of the bin is wanted.
        if (bins[0][bin] == 1 || (!by_weight && least == has)) {
            uint rest = (1u << shift) - 1;
            return of_id ? uvec2(bound.x, bound.y | rest) : uvec2(bound.x | rest, 0xffffffffu);
        }
    }
    return bound;
}

// Lists the allowed tokens that are as good as the bound, a (key, id). Where they are more than the list holds, the whole row is
// looked through on.
void list_up_to(uvec2 bound, bool few) {
    if (bound.x <= FORBIDDEN) bound = uvec2(FORBIDDEN + 1, 0xffffffffu);
    // The adjusted logits lie at the beginning of scratch memory.
    uint found = list_best(adjusted, list, bound, few, adjusted, 0);
    listed = found <= LIST;
    if (listed) candidates = found;
}

// A share of a weight in units of 2^-24, rounded down, and whether anything was lost.
uvec2 share_of(uvec2 weight, uint share, out bool rounded) {
    uint low_high, low, high_high, high, carry;
    umulExtended(weight.x, share, low_high, low);
    umulExtended(weight.y, share, high_high, high);
    uint middle = uaddCarry(low_high, high, carry);
    uint top = high_high + carry;
    rounded = (low & 0xffffffu) != 0;
    return uvec2(low >> 24 | middle << 8, middle >> 24 | top << 8);
}

uvec2 top_p_of(uvec2 weight, uint share) {
    bool rounded;
    uvec2 least = share_of(weight, share, rounded);
    if (rounded) least = plus64(least, uvec2(1, 0));
    return least == uvec2(0) ? uvec2(1, 0) : least;
}

uvec2 typical_p_of(uvec2 weight, uint share) {
    bool rounded;
    return plus64(share_of(weight, share, rounded), uvec2(1, 0));
}

uvec2 kept_weight() {
    uvec2 sum = uvec2(0);
    for (uint n = gl_LocalInvocationID.x; n < candidates; n += WG) {
        Token t = candidate(n);
        if (t.kept) sum = plus64(sum, uvec2(weight_of(t.distance), 0));
    }
    return wg_sum64(sum);
}

// Distances that a row is first cut down to.
#define STEPS 6
const float STEP[STEPS] = float[STEPS](1.0, 2.0, 4.0, 6.0, 9.0, 13.0);

// Lists the tokens within the first step that has `top_k` of them, or if that is 0, that weighs the share `top_p` of all. Gives
// the number, or the weight, that was asked for.
uvec2 list_by_steps(uint top_k, uint top_p) {
    uint counts[STEPS], weights[STEPS];
    [[unroll]] for (uint j = 0; j < STEPS; j++) counts[j] = weights[j] = 0;
    uvec2 sum = uvec2(0);
    for (uint first = gl_LocalInvocationID.x; first < p.vocab; first += WG * AHEAD) {
        uint bits[AHEAD];
        [[unroll]] for (uint i = 0; i < AHEAD; i++) bits[i] = U32(adjusted).v[min(first + i * WG, p.vocab - 1)];
        [[unroll]] for (uint i = 0; i < AHEAD; i++) {
            Token t = token_of(first + i * WG, bits[i]);
            if (t.id >= p.vocab || !t.kept) continue;
            uint weight = weight_of(t.distance);
            sum = plus64(sum, uvec2(weight, 0));
            [[unroll]] for (uint j = 0; j < STEPS; j++) {
                bool inside = t.distance <= STEP[j];
                counts[j] += uint(inside);
                // The low bits would overflow the sum; without them a step is only taken for too light.
                weights[j] += inside ? weight >> 16 : 0;
            }
        }
    }
    uvec2 least = top_k > 0 ? uvec2(top_k, 0) : top_p_of(wg_sum64(sum), top_p);
    for (uint j = 0; j < STEPS; j++) {
        uvec2 has = wg_sum64(uvec2(top_k > 0 ? counts[j] : weights[j], 0));
        if (top_k == 0) has = uvec2(has.x << 16, has.y << 16 | has.x >> 16);
        if (less64(has, least)) continue;
        // A little lower than the step, since distances were rounded: a few tokens more do no harm.
        float lowest = most - STEP[j] - 1e-5 * (abs(most) + STEP[j]);
        list_up_to(uvec2(order_key(floatBitsToUint(lowest)), 0xffffffffu), false);
        break;
    }
    return least;
}

// The mean distance in units of 2^-19: a quotient of 24 bits, by long division.
float mean_distance(uvec2 spreads, uvec2 weights) {
    uvec2 divisor = uvec2(weights.x << 4, weights.y << 4 | weights.x >> 28);
    uint quotient = 0;
    for (uint i = 0; i < 24; i++) {
        quotient <<= 1;
        if (!less64(spreads, divisor)) {
            spreads = minus64(spreads, divisor);
            quotient |= 1;
        }
        spreads = uvec2(spreads.x << 1, spreads.y << 1 | spreads.x >> 31);
    }
    return float(quotient) * (1.0 / 524288.0);
}

void cut_typical(uint share) {
    uvec2 spreads = uvec2(0);
    for (uint n = gl_LocalInvocationID.x; n < candidates; n += WG) {
        Token t = candidate(n);
        if (t.kept) spreads = plus64(spreads, uvec2(spread_of(t.distance), 0));
    }
    spreads = wg_sum64(spreads);
    uvec2 weights = kept_weight();
    mean = mean_distance(spreads, weights);
    farthest = beginning(true, true, typical_p_of(weights, share));
    typical = true;
}

// `best` is the (key, id) of the largest adjusted logit.
uint draw_with_cuts(Settings s, uint position, uvec2 scratch, uvec2 best) {
    adjusted = scratch;
    list = list_of(scratch);
    candidates = p.vocab;
    most_key = best.x;
    most = F32(adjusted).v[best.y];
    bool by_mean = s.typical_p < WHOLE;
    uvec2 least_weight = uvec2(0);
    if (s.top_k > 0 && s.top_k < p.vocab) {
        if (s.top_k <= chunks_of_row()) list_up_to(bound_of_chunks(scratch, s.top_k, 0), true);
        else list_by_steps(s.top_k, 0);
        deepest = beginning(false, false, uvec2(s.top_k, 0));
    } else if (!by_mean && s.top_p < WHOLE) {
        // The share is one of the whole row's weight, of which the list is a part.
        least_weight = list_by_steps(0, s.top_p);
    }
    if (by_mean) cut_typical(s.typical_p);
    if (s.top_p < WHOLE) {
        if (least_weight == uvec2(0)) least_weight = top_p_of(kept_weight(), s.top_p);
        deepest = beginning(false, true, least_weight);
    }

    uvec2 first = uvec2(most_key, 0);
    if (by_mean) {
        first = NONE;
        for (uint n = gl_LocalInvocationID.x; n < candidates; n += WG) {
            Token t = candidate(n);
            uvec2 pair = uvec2(most_key - t.depth, t.id);
            if (t.kept && better(pair, first)) first = pair;
        }
        first = wg_best(first);
    }
    uint first_bits = (first.x & 0x80000000u) != 0 ? first.x & 0x7fffffffu : ~first.x;
    precise float least = uintBitsToFloat(first_bits) + s.ln_min_p;
    bool limited = floatBitsToUint(s.ln_min_p) != 0xff800000u;

    uvec2 stream = stream_of(s.seed, position), taken = NONE;
    for (uint n = gl_LocalInvocationID.x; n < candidates; n += WG) {
        Token t = candidate(n);
        if (!t.kept || (limited && t.logit < least)) continue;
        float score = score_of(t.logit, s.temperature, gumbel_of(stream, t.id));
        uvec2 pair = uvec2(order_key(floatBitsToUint(score)), t.id);
        if (better(pair, taken)) taken = pair;
    }
    return wg_best(taken).y;
}
