// The arithmetic of a draw: the lines of `numbers.rs`, which says why, with the same bits. `precise`: a multiplication and an
// addition must not become one operation, which would round once where the CPU rounds twice.

uint mix_bits(uint x) {
    x = (x ^ (x >> 17)) * 0xed5ad4bbu;
    x = (x ^ (x >> 11)) * 0xac4c1b51u;
    x = (x ^ (x >> 15)) * 0x31848babu;
    return x ^ (x >> 14);
}

uvec2 stream_of(uvec2 seed, uint position) {
    uint first = mix_bits(seed.x ^ mix_bits(position ^ 0x9e3779b9u));
    return uvec2(first, mix_bits(seed.y + mix_bits(first + position)));
}

float leading(uint x) {
    uint below = uint(max(findMSB(x) - 23, 0));
    return float((x >> below) << below);
}

const float LN_FACTORS[8] = float[8](-1.151461e-1, 1.1676999e-1, -1.2420141e-1, 1.4249323e-1, -1.6668058e-1, 2.0000715e-1,
    -2.4999994e-1, 3.333333e-1);

float ln_near_one(float x) {
    precise float sum = 7.0376836e-2;
    [[unroll]] for (uint i = 0; i < 8; i++) sum = sum * x + LN_FACTORS[i];
    precise float square = x * x;
    precise float third = x * (square * sum);
    precise float result = x + (third - square * 0.5);
    return result;
}

float ln(float x) {
    uint bits = floatBitsToUint(x);
    int whole = (int(bits) - 0x3f3504f3) >> 23;
    precise float rest = uintBitsToFloat(bits - uint(whole << 23)) - 1.0;
    float exponent = float(whole);
    precise float result = ln_near_one(rest) + exponent * -2.1219444e-4 + exponent * 0.6933594;
    return result;
}

float gumbel_of(uvec2 stream, uint id) {
    uint w = mix_bits(mix_bits(id ^ stream.x) + stream.y) | 1u;
    const float unit = 1.0 / 4294967296.0;
    float exponential = w < (1u << 30) ? -ln_near_one(-(leading(w) * unit)) : -ln(leading(-w) * unit);
    return -ln(exponential);
}

float score_of(float logit, float temperature, float gumbel) {
    precise float score = logit + temperature * gumbel;
    return score;
}

const float EXP_FACTORS[5] = float[5](1.3982e-3, 8.333452e-3, 4.1665796e-2, 1.6666665e-1, 5e-1);

float scaled(float distance) {
    if (!(distance < 21.0)) return 0.0;
    float x = -distance;
    precise float at = x * 1.442695 + 0.5;
    float n = floor(at);
    precise float rest = x - n * 0.6933594 + n * 2.1219444e-4;
    precise float sum = 1.9875691e-4;
    [[unroll]] for (uint i = 0; i < 5; i++) sum = sum * rest + EXP_FACTORS[i];
    precise float square = rest * rest;
    precise float result = (sum * square + rest + 1.0) * uintBitsToFloat(uint(int(n) + 127 + 30) << 23);
    return result;
}

uint weight_of(float distance) { return uint(scaled(distance)); }

uint spread_of(float distance) {
    precise float product = scaled(distance) * distance;
    return distance < 21.0 ? uint(product) : 0u;
}
