// ssm_scan, token after token: D = softplus(dt + bias), s[n] = exp(D a) s[n] + D x b[n], y = sum over n of s[n] c[n], plus skip x.
// x, y: [p.channels, p.heads, tokens]; dt: [heads, tokens]; b, c: [N, groups, tokens]; a: [N, heads] with PER_STATE, else [heads];
// bias, skip: [heads]; states: [N, channels, heads, states]. Tokens of x, dt, b and c lie strides apart.
// A column is a channel of a head. One workgroup per (sequence, group, COLS columns of it): columns are independent of each other. LANES
// threads share a column; each keeps its part of the state in registers. STEP tokens are staged in shared memory at once, and the lanes'
// shares of y are added up once per STEP.
#version 450
#include "kiln.glsl"
#include "quads.glsl"
#include "sequences.glsl"
#include "activations.glsl"

layout(local_size_x = WG) in;

#define QUADS (N / 4)
#define HELD (QUADS / LANES)

shared vec4 b_stage[STEP * QUADS];
shared vec4 c_stage[STEP * QUADS];
// Of each token and column: the decay, or with PER_STATE its exponent without a; what is written; what is skipped to y.
shared float decay_stage[STEP * COLS];
shared float x_stage[STEP * COLS];
shared float skip_stage[STEP * COLS];
shared float y_stage[STEP * WG];

void main() {
    uint columns = p.channels * p.heads / p.groups, slices = (columns + COLS - 1) / COLS;
    uint place = group_index();
    uint first_column = place % slices * COLS;
    uint of = place / slices % p.groups;
    uint sequence = place / slices / p.groups;
    if (sequence >= p.sequences) return;
    uint first = start_of(sequence), end = end_of(sequence);
    uint base = of * columns;

    uint tid = gl_LocalInvocationID.x;
    uint lane = tid % LANES, col = tid / LANES;
    bool used = first_column + col < columns;
    // Threads without a column do as the last one does, and write nothing.
    uint column = base + min(first_column + col, columns - 1);
    uint slot = p.slots == uvec2(0) ? sequence : U32(p.slots).v[sequence];
    bool kept = slot < p.states;
    uvec2 state_at = row_address(row_address(p.state, kept ? slot : 0, p.channels * p.heads * N * 4), column, N * 4);
    vec4 state[HELD];
    [[unroll]] for (uint n = 0; n < HELD; n++) state[n] = kept ? F32x4(state_at).v[lane + n * LANES] : vec4(0);
#if PER_STATE
    vec4 a[HELD];
    [[unroll]] for (uint n = 0; n < HELD; n++) {
        [[unroll]] for (uint e = 0; e < 4; e++) a[n][e] = F32(row_address(p.a, column / p.channels, N * 4)).v[4 * (lane + n * LANES) + e];
    }
#endif

    for (uint now = first; now < end; now += STEP) {
        uint tokens = min(STEP, end - now);
        barrier();
        for (uint at = tid; at < tokens * N; at += WG) {
            uint token = now + at / N, n = at % N;
            b_stage[at / 4][at % 4] = F32(row_address(p.b, token, p.b_stride * 4)).v[of * N + n];
            c_stage[at / 4][at % 4] = F32(row_address(p.c, token, p.c_stride * 4)).v[of * N + n];
        }
        for (uint at = tid; at < tokens * COLS; at += WG) {
            uint token = now + at / COLS, from = base + min(first_column + at % COLS, columns - 1);
            uint head = from / p.channels;
            float dt = F32(row_address(p.dt, token, p.dt_stride * 4)).v[head];
#if BIAS
            dt += F32(p.dt_bias).v[head];
#endif
            float wide = softplus(dt), x = F32(row_address(p.x, token, p.x_stride * 4)).v[from];
#if PER_STATE
            decay_stage[at] = wide;
#else
            decay_stage[at] = exp(wide * F32(p.a).v[head]);
#endif
            x_stage[at] = wide * x;
#if SKIP
            skip_stage[at] = x * F32(p.skip).v[head];
#else
            skip_stage[at] = 0;
#endif
        }
        barrier();
        for (uint t = 0; t < tokens; t++) {
            float decay = decay_stage[t * COLS + col], x = x_stage[t * COLS + col];
            vec4 sum = vec4(0);
            [[unroll]] for (uint n = 0; n < HELD; n++) {
                uint at = t * QUADS + lane + n * LANES;
#if PER_STATE
                state[n] = fma(exp(decay * a[n]), state[n], x * b_stage[at]);
#else
                state[n] = fma(vec4(decay), state[n], x * b_stage[at]);
#endif
                sum = fma(c_stage[at], state[n], sum);
            }
            y_stage[(t * LANES + lane) * COLS + col] = sum4(sum);
        }
        barrier();
        for (uint at = tid; at < tokens * COLS; at += WG) {
            precise float y = 0;
            [[unroll]] for (uint n = 0; n < LANES; n++) y += y_stage[(at / COLS * LANES + n) * COLS + at % COLS];
            uint to = first_column + at % COLS;
            if (to < columns)
                F32(row_address(p.y, now + at / COLS, p.channels * p.heads * 4)).v[base + to] = y + skip_stage[at];
        }
    }

    if (!kept || !used) return;
    [[unroll]] for (uint n = 0; n < HELD; n++) F32x4(state_at).v[lane + n * LANES] = state[n];
}
