// ngram_rows: a thread for each head of each row. Numbers of 64 bits are two words, the low one first.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;

uvec2 times(uvec2 number, uint factor) {
    uint high, low;
    umulExtended(number.x, factor, high, low);
    return uvec2(low, high + number.y * factor);
}

// What is left of a division, bit by bit; `size` is below 2^31.
uint rest(uvec2 number, uint size) {
    uint left = 0;
    for (int bit = 63; bit >= 0; bit--) {
        uint word = bit >= 32 ? number.y : number.x;
        left = left << 1 | (word >> (bit & 31) & 1u);
        if (left >= size) left -= size;
    }
    return left;
}

void main() {
    uint at = group_index() * WG + gl_LocalInvocationID.x;
    if (at >= p.count) return;
    uint row = at / (HEADS * (N - 1)), head = at % (HEADS * (N - 1)), longest = head / HEADS + 1;
    F32 tokens = F32(row_address(p.tokens, row, 4 * N));
    uvec2 hash = times(U32x2(p.multipliers).v[0], uint(max(int(tokens.v[N - 1]) - 1, 0)));
    bool ended = false;
    for (uint s = 1; s <= longest; s++) {
        int token = int(tokens.v[N - 1 - s]) - 1;
        ended = ended || token < 0 || token == int(p.end);
        hash ^= times(U32x2(p.multipliers).v[s], ended ? p.end : uint(token));
    }
    I32(p.rows).v[at] = int(rest(hash, uint(I32(p.sizes).v[head])) + uint(I32(p.offsets).v[head]));
}
