// Which keys a query sees, where their rows lie, and how a score becomes a logit: what every path of flash_attention
// shares. A logit at or below HIDDEN belongs to a key that is not seen; it starts the running maximum, too, so that
// differences of maxima are never NaN.

const float HIDDEN = -1.7014117e38;

// Sequence of a token.
uint sequence_of(uint token, uint batch) {
#if SEQUENCES
    return uint(I32(p.sequences).v[token]);
#else
    return batch;
#endif
}

#if CAUSAL
int position_of(uint token, uint batch) { return I32(p.positions).v[batch * p.tokens + token]; }

// The position of the last key that a query sees, wherever its window begins.
int last_of(uint token, uint batch) {
#if SEES_AHEAD
    return I32(p.positions).v[(BATCH + batch) * p.tokens + token];
#else
    return position_of(token, batch);
#endif
}
#endif

// Number of keys that are in the cache.
uint length_of(uint sequence) {
#if CAUSAL
    return min(uint(max(I32(p.lengths).v[LENGTHS * sequence], 0)), p.keys);
#else
    return p.keys;
#endif
}

// The first key a query sees and the one after the last.
uvec2 keys_of(uint token, uint batch, uint length) {
#if CAUSAL
    int at = position_of(token, batch);
#if BOTH
    // A row without a token, at -1, sees nothing.
    uint end = at < 0 ? 0 : (WINDOW > 0 ? min(uint(at + WINDOW), length) : length);
#else
    uint end = min(uint(max(last_of(token, batch) + 1, 0)), length);
#endif
#if CHUNKED
    return uvec2(uint(max(at, 0)) / WINDOW * WINDOW, end);
#elif WINDOW > 0
    return uvec2(uint(max(at - (WINDOW - 1), 0)), end);
#else
    return uvec2(0, end);
#endif
#else
    return uvec2(0, length);
#endif
}

// Row of the cache that holds a key.
uint cache_row(uint sequence, uint key) {
#if PAGE > 0
    return uint(I32(p.pages).v[sequence * PAGES + key / PAGE]) * PAGE + key % PAGE;
#else
    return key;
#endif
}

// First row of a head's cache.
uvec2 cache_of(uvec2 base, uint head_stride, uint batch_stride, uint head, uint sequence) {
    uvec2 at = row_address(base, head, head_stride);
#if PAGE > 0
    return at;
#else
    return row_address(at, sequence / SHARED_BY, batch_stride);
#endif
}
// Without pages, their parameter holds the batch strides.
uvec2 keys_at(uint head, uint sequence) { return cache_of(p.k, p.k_stride[1], p.pages.x, head, sequence); }
uvec2 values_at(uint head, uint sequence) { return cache_of(p.v, p.v_stride[1], p.pages.y, head, sequence); }

float slope_of(uint head) {
#if ALIBI
    uint n = 1u << findMSB(uint(HEADS));
    float steps = head < n ? float(head + 1) : float(head - n) + 0.5;
    return exp2(-MAX_BIAS * steps / float(n));
#else
    return 1.0;
#endif
}

#if DISTANCES
// What a score gets by the distance of its key from the query. The parameter of sinks says where that stands.
float by_distance(uint head, int position, uint key) {
    int row = clamp(int(key) - position, -REACH, REACH) + REACH;
    return F32(p.sinks).v[uint(row) * HEADS + min(head, HEADS - 1)];
}
#endif

#if MASK
uvec2 mask_row(uint token, uint head, uint batch) {
    uvec2 at = row_address(p.mask, token, p.mask_stride[0]);
    at = row_address(at, head % (p.mask_shape & 0xffffu), p.mask_stride[1]);
    return row_address(at, batch % (p.mask_shape >> 16), p.mask_stride[2]);
}
#endif

// tanh without the overflow of built-ins that divide sinh by cosh.
float capped(float score) {
#if SOFTCAP
    float x = score / CAP;
    float e = exp(-2.0 * abs(x));
    float small = x - x * x * x * (0.33333333 - 0.13333333 * x * x);
    return CAP * (abs(x) < 0.05 ? small : sign(x) * (1.0 - e) / (1.0 + e));
#else
    return score;
#endif
}

// exp(logit - top), 0 for hidden keys.
float weight(float logit, float row_max) { return logit <= HIDDEN ? 0.0 : exp(logit - row_max); }
