// pool_keys: the weighed mean of the tokens of a block, channel by channel, for each row whose token finishes one; zeros for all others.
// A thread for four channels of a row; the largest weight is found while the sums grow, which are rescaled where it changes.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "formats.glsl"

#define QUADS (WIDTH / 4)

uint sequence_of(uint row) {
#if SEQUENCES
    return uint(I32(p.sequences).v[row]);
#elif ONE_SEQUENCE
    return 0;
#else
    return row;
#endif
}

void main() {
    K_INIT();
    uint at = group_index() * WG + gl_LocalInvocationID.x;
    uint row = at / QUADS, element = at % QUADS * 4;
    if (row >= p.rows) return;
    uint seen = uint(max(I32(p.positions).v[row] + 1, 0));
    vec4 top = vec4(0.0), sum = vec4(0.0), weighed = vec4(0.0);
    if (seen > 0 && seen % SIZE == 0) {
        uint first = seen - SIZE, table = sequence_of(row) * PAGES;
#if OVERLAPS
        uint from = first >= SIZE ? first - SIZE : first;
#else
        uint from = first;
#endif
        for (uint token = from; token < seen; token++) {
            uint cached = uint(I32(p.table).v[table + token / PAGE]) * PAGE + token % PAGE;
#if OVERLAPS
            uint e = element + (token >= first ? WIDTH : 0);
#else
            uint e = element;
#endif
            vec4 value = K_LOAD4(row_address(p.values, cached, p.stride), e);
            vec4 weight = vec4(0.0);
#if WEIGHTS
            weight = K_LOAD4(row_address(p.weights, cached, p.stride), e);
#endif
#if PLACES
            uint place = token % SIZE * (OVERLAPS == 1 ? 2 * WIDTH : WIDTH) + e;
            weight += vec4(F32(p.places).v[place], F32(p.places).v[place + 1], F32(p.places).v[place + 2], F32(p.places).v[place + 3]);
#endif
            if (token == from) top = weight;
            vec4 higher = max(top, weight), old = exp(top - higher), now = exp(weight - higher);
            sum = sum * old + now;
            weighed = weighed * old + now * value;
            top = higher;
        }
        weighed /= sum;
    }
    uvec2 y = row_address(p.y, row, 4 * WIDTH);
    [[unroll]] for (uint i = 0; i < 4; i++) F32(y).v[element + i] = weighed[i];
}
