// Columns that leave their producer ready to be multiplied. Of LEN elements, which are whole groups of 32: codes of 16 bits, four of
// them as `rounded_halves` gives them, then a factor for each group, then the sum of each group's squares. With a weight, codes and
// factors are of the elements times their weights, the squares of the elements themselves. `rounded.rs` is the other half.
#extension GL_KHR_shader_subgroup_shuffle : require
#include "rounding.glsl"

// Where the factor and the sum of squares of a group are, in words.
#define ROUNDED_SCALE(LEN, G) ((LEN) / 2 + (G))
#define ROUNDED_SQUARES(LEN, G) ((LEN) / 2 + (LEN) / 32 + (G))

// Puts elements e .. e + 3 of a column down. Eight neighbours of a subgroup, which have a group together, come here at once. The bits
// are those that products make of the floats where they round them for themselves.
void put_rounded(uvec2 to, uint len, uint e, vec4 x, vec4 weight) {
    float squares = dot(x, x);
    x *= weight;
    float most = most_of(x);
    [[unroll]] for (uint s = 1; s < 8; s *= 2) {
        most = max(most, subgroupShuffleXor(most, s));
        squares += subgroupShuffleXor(squares, s);
    }
    U32x2(to).v[e / 4] = rounded_halves(x, inverse_of(most, 32512.0));
    if (e % 32 == 0) {
        F32(to).v[ROUNDED_SCALE(len, e / 32)] = most * (1.0 / 32512.0);
        F32(to).v[ROUNDED_SQUARES(len, e / 32)] = squares;
    }
}
