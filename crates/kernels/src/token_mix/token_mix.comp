// token_mix: y[c,t,g] = x[c,t] + (x[c,t-1] - x[c,t]) * (lerp[c,g] + extra[c,t,g]), with before[c] for x[c,-1]; with KEEP
// the last token takes the place of `before`. x: [width, tokens]; lerp: [width, GROUPS], one more group in `another`;
// extra, y: [width, tokens, groups]. A thread computes four channels of one token in every group.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;

vec4 quad_of(uvec2 base, uint row, uint quad) { return F32x4(row_address(base, row, p.quads * 16)).v[quad]; }

void main() {
    uint unit = group_index() * WG + gl_LocalInvocationID.x;
    if (unit >= p.units) return;
    uint t = unit / p.quads, quad = unit % p.quads;
    vec4 x = quad_of(p.x, t, quad);
    vec4 shift = (t > 0 ? quad_of(p.x, t - 1, quad) : F32x4(p.before).v[quad]) - x;
#if KEEP
    // Nobody else reads these four elements.
    if (t == 0) F32x4(p.before).v[quad] = quad_of(p.x, p.tokens - 1, quad);
#endif
    [[unroll]] for (uint g = 0; g < GROUPS + ANOTHER; g++) {
        vec4 factor = g < GROUPS ? quad_of(p.lerp, g, quad) : F32x4(p.another).v[quad];
        uint row = g * p.tokens + t;
#if EXTRA
        factor += quad_of(p.extra, row, quad);
#endif
        F32x4(row_address(p.y, row, p.quads * 16)).v[quad] = fma(shift, factor, x);
    }
}
