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

// The scale of it as a whole number (x), what that is to be multiplied by (y), and the minimum (z).
vec3 k4_parts_of(uvec4 head, uvec2 pairs, uint j) {
    vec2 whole = vec2((pairs >> (8 * j)) & 255u), d = unpackHalf2x16(head.x);
    return vec3(whole.x, d.x, -d.y * whole.y);
}

// Scale and minimum of sub-block i (0 to 7) of a block whose first 16 bytes are `head`.
vec2 k4_scale(uvec4 head, uint i) { return k4_scale_of(head, k4_pairs(head, i / 2), i & 1u); }
