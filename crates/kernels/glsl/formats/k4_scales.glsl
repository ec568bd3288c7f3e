// The head of Q4_K and Q5_K: f16 d @0, f16 dmin @2, eight six-bit scales and minimums @4[12].
// The first four have six bits of a byte each; the upper two bits of those bytes are the upper bits of the last four,
// whose lower bits share a byte.
#include "formats/codes.glsl"

// Scale and minimum of sub-block i (0 to 7) of a block whose first 16 bytes are `head`.
vec2 k4_scale(uvec4 head, uint i) {
    uint shift = 8 * (i & 3u);
    uint a = head.y >> shift, b = head.z >> shift, c = head.w >> shift;
    uint scale = i < 4 ? a & 63u : (c & 15u) | ((a >> 2) & 0x30u);
    uint least = i < 4 ? b & 63u : ((c >> 4) & 15u) | ((b >> 2) & 0x30u);
    vec2 d = unpackHalf2x16(head.x);
    precise vec2 s = d * vec2(scale, least);
    return vec2(s.x, -s.y);
}
