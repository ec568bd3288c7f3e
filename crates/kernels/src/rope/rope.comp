// rope: turns pairs of elements (a, b) of each head by an angle that grows with the token's position:
//   a' = (a cos - b sin) * magnitude, b' = (a sin + b cos) * magnitude, angle = position * turns[pair] of a full turn
// x, y: [head_dim, heads, tokens, batch] with any outer strides; positions: I32 [tokens] or [tokens, 4];
// turns: [2, pairs], high and low word of a 64-bit fraction of a turn. The elements of [offset, offset + 2 * pairs) are
// turned, the others copied (COPY 0 where x is y). One thread per pair or copied element.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;

// Which row of positions a pair follows: time, height, width or extra.
uint position_row(uint pair) {
#if SECTIONS == 0
    return 0;
#elif SECTIONS == 3
    return pair % (p.sections[0] + p.sections[1]) < p.sections[0] ? 0 : 1;
#else
    uint sector = pair % (p.sections[0] + p.sections[1] + p.sections[2] + p.sections[3]);
#if SECTIONS == 1
    uint end = p.sections[0];
    uint row = 0;
    while (row < 3 && sector >= end) {
        row++;
        end += p.sections[row];
    }
    return row;
#else
    uint row = sector % 3;
    return sector < 3 * p.sections[row] ? row : 3;
#endif
#endif
}

#include "rope_phase.glsl"

void main() {
    uint item = group_index() * WG + gl_LocalInvocationID.x;
    if (item >= p.items) return;
    uvec4 at = unravel(item, uint[4](p.row_items, p.shape[0], p.shape[1], p.shape[2]));
    uint x0 = at.y * p.x_stride[0] + at.z * p.x_stride[1] + at.w * p.x_stride[2];
    uint y0 = at.y * p.y_stride[0] + at.z * p.y_stride[1] + at.w * p.y_stride[2];

#if COPY
    if (at.x >= p.pairs) {
        uint i = at.x - p.pairs;
        if (i >= p.offset) i += 2 * p.pairs;
        STORE_Y(p.y, y0 + i, LOAD_X(p.x, x0 + i));
        return;
    }
#endif

#if ADJACENT
    uint a = p.offset + 2 * at.x, b = a + 1;
#else
    uint a = p.offset + at.x, b = a + p.pairs;
#endif
    int position = I32(p.positions).v[at.z + position_row(at.x) * p.positions_stride];
    vec2 turn = cos_sin(phase_of(position, at.x)) * p.magnitude;
    turn.y *= p.direction;
    float xa = LOAD_X(p.x, x0 + a), xb = LOAD_X(p.x, x0 + b);
    STORE_Y(p.y, y0 + a, xa * turn.x - xb * turn.y);
    STORE_Y(p.y, y0 + b, xa * turn.y + xb * turn.x);
}
