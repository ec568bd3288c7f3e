// The head of Q4_K and Q5_K: f16 d @0, f16 dmin @2, eight six-bit scales and minimums @4[12].
// The first four have six bits of a byte each; the upper two bits of those bytes are the upper bits of the last four,
// whose lower bits share a byte.
#include "formats/codes.glsl"

// Scales (x) and minimums (y) of sub-blocks 2 c and 2 c + 1, in the two lowest bytes.
uvec2 k4_pairs(uvec4 head, uint c) {
    uint shift = 16 * (c & 1u);
    uint a = head.y >> shift, b = head.z >> shift, w = head.w >> shift;
    return c < 2 ? uvec2(a, b) & 0x3f3fu : (uvec2(w, w >> 4) & 0x0f0fu) | ((uvec2(a, b) >> 2) & 0x3030u);
}
// Scale and minimum of the first (j = 0) or second of them.
vec2 k4_scale_of(uvec4 head, uvec2 pairs, uint j) {
    precise vec2 s = unpackHalf2x16(head.x) * vec2((pairs >> (8 * j)) & 255u);
    return vec2(s.x, -s.y);
}

// A byte as a float: it goes into the mantissa of 2^23, as converting integers is slow on many GPUs.
vec2 k4_float(uvec2 bytes) { return uintBitsToFloat((bytes & 255u) | 0x4b000000u) - 8388608.0; }
// The scales of both of them as whole numbers, times a number (x and y), and what all values get when codes are counted from `middle`
// (z and w).
vec4 k4_parts_of(uvec4 head, uvec2 pairs, float middle) {
    vec2 d = unpackHalf2x16(head.x), scales = k4_float(uvec2(pairs.x, pairs.x >> 8)), least = k4_float(uvec2(pairs.y, pairs.y >> 8));
    return vec4(scales, scales * (middle * d.x) - d.y * least);
}

// Scale and minimum of sub-block i (0 to 7) of a block whose first 16 bytes are `head`.
vec2 k4_scale(uvec4 head, uint i) { return k4_scale_of(head, k4_pairs(head, i / 2), i & 1u); }
