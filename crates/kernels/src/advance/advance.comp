// advance: the inputs of the next decode step. For each active row (position >= 0) whose token is one and whose next position has a page:
// token = sampled, position and length one more, row = the position's cache row, recent[position % window] = token. Other rows
// get position -1 and cache row -1. history[step % steps] = the token; then step is one more. With OTHERS caches of a second kind have
// a table and rows of their own.
// sampled, tokens, positions, lengths, rows: [n]; table: [pages, n]; recent: [window, n]; history: [steps, n]. One workgroup of WG
// threads in all. With COORDINATES those of an active row, [n], are one more as well.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;

void main() {
    uint step = U32(p.step).v[0];
    for (uint i = gl_LocalInvocationID.x; i < p.n; i += WG) {
        int token = I32(p.sampled).v[i], position = I32(p.positions).v[i];
        uint next = uint(position + 1);
        bool runs = position >= 0;
        I32(p.history).v[i * p.steps + step % p.steps] = runs ? max(token, -1) : -1;
        int entry = -1;
        if (runs && next / p.page < p.pages) entry = I32(p.table).v[i * p.pages + next / p.page];
#if OTHERS
        int other = -1;
        if (runs && next / p.page < p.pages) other = I32(p.other_table).v[i * p.pages + next / p.page];
        if (token < 0 || other < 0) entry = -1;
        I32(p.other_rows).v[i] = entry < 0 ? -1 : other * int(p.page) + int(next % p.page);
#endif
        if (token < 0 || entry < 0) {
            I32(p.positions).v[i] = -1;
            I32(p.rows).v[i] = -1;
            continue;
        }
        I32(p.tokens).v[i] = token;
        I32(p.positions).v[i] = int(next);
        I32(p.lengths).v[i] += 1;
#if COORDINATES
        I32(p.coordinates).v[i] += 1;
#endif
        I32(p.rows).v[i] = entry * int(p.page) + int(next % p.page);
#if RECENT
        I32(p.recent).v[i * p.window + next % p.window] = token;
#endif
    }
    barrier();
    if (gl_LocalInvocationID.x == 0) U32(p.step).v[0] = step + 1;
}
