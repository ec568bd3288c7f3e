// ssm_scan in chunks of CHUNK tokens, for decays that are one for each head (Mamba 2). With D = softplus(dt + bias), l_t the sum of D a over
// the tokens of the chunk up to t, and S the state before it, a row of N elements for each channel:
//   y_t = sum over u <= t of (c_t . b_u) e^(l_t - l_u) D_u x_u, plus e^(l_t) S c_t, plus skip x_t
//   S after = e^(l_last) S + sum over u of e^(l_last - l_u) (D_u x_u) b_u
// All sums are products of matrices (`tiles.glsl`). Exponentials are of differences, which are not above 0 where a is not. Tokens past the
// end of a sequence are zeros with D = 0: they change nothing.
// x, y: [p.channels, p.heads, tokens]; dt: [heads, tokens]; b, c: [N, groups, tokens]; a, bias, skip: [heads]; states: [N, channels, heads,
// states]. Tokens of x, dt, b and c lie strides apart.
// One workgroup per (sequence, head, COLS channels) goes from chunk to chunk, the state in the registers of its teams. What the next chunk
// needs is on its way while one is computed.
#version 450
#include "kiln.glsl"
#include "quads.glsl"
#include "sequences.glsl"
#include "activations.glsl"
#include "tiles.glsl"

layout(local_size_x = WG) in;

#define N_LINE LINE_OF(N)
#define X_LINE LINE_OF(COLS)
#define M_LINE LINE_OF(CHUNK)
#define Y_LINE (COLS / 4 + 1)
#define G_LINE ((CHUNK > COLS ? CHUNK : COLS) / 4 + 1)
#define N_TILES (N / MM)
#define COL_TILES (COLS / MM)
#define BLOCKS (CHUNK / MM)
#define G_JOBS (BLOCKS * (BLOCKS + 1) / 2)
#define Y_JOBS (BLOCKS * COL_TILES)
#define STATE_JOBS (COL_TILES * N_TILES)
#define STATE_HELD ((STATE_JOBS + TEAMS - 1) / TEAMS)
// Quads of c, b and x that a thread brings.
#define N_HELD ((CHUNK * N / 4 + WG - 1) / WG)
#define X_HELD ((CHUNK * COLS / 4 + WG - 1) / WG)

shared QUAD c_stage[CHUNK * N_LINE];
shared QUAD b_stage[CHUNK * N_LINE];
// D x, then decayed up to the end of the chunk.
shared QUAD x_stage[CHUNK * X_LINE];
shared QUAD late_stage[CHUNK * X_LINE];
// The state before the chunk.
shared QUAD s_stage[COLS * N_LINE];
// The factors of D x in y.
shared QUAD m_stage[CHUNK * M_LINE];
// c b^T, then what the chunk itself gives to y.
shared vec4 g_stage[CHUNK * G_LINE];
// What the state gives to y.
shared vec4 y_stage[CHUNK * Y_LINE];
shared float rates[CHUNK];
shared float logs[CHUNK];

const uint C = 0, B = 1, X = 2, S = 3;

// Four elements of a token's row from number `at` on.
vec4 quad_of(uvec2 base, uint token, uint stride, uint at) {
    uvec2 row = row_address(base, token, stride * 4);
#if ALIGNED
    return F32x4(row).v[at / 4];
#else
    return vec4(F32(row).v[at], F32(row).v[at + 1], F32(row).v[at + 2], F32(row).v[at + 3]);
#endif
}

float step_of(uint token, uint head) {
    float dt = F32(row_address(p.dt, token, p.dt_stride * 4)).v[head];
#if BIAS
    dt += F32(p.dt_bias).v[head];
#endif
    return softplus(dt);
}

void main() {
    uint slices = (p.channels + COLS - 1) / COLS;
    uint place = group_index();
    uint channel = place % slices * COLS;
    uint head = place / slices % p.heads;
    uint sequence = place / slices / p.heads;
    if (sequence >= p.sequences) return;
    uint first = start_of(sequence), end = end_of(sequence);
    uint group = head / (p.heads / p.groups);
    uint tid = thread_number(), team = team_number();

    uint slot = p.slots == uvec2(0) ? sequence : U32(p.slots).v[sequence];
    bool kept = slot < p.states;
    uvec2 state_at = row_address(p.state, kept ? slot : 0, p.channels * p.heads * N * 4);
    state_at = row_address(state_at, head * p.channels + channel, N * 4);
    TILE state[STATE_HELD];
    // The row of channels of tile n, its quads of elements, and whether there is such a tile.
#define STATE_ROW(n) ((team + (n) * TEAMS) / N_TILES * MM)
#define STATE_QUAD(n) ((team + (n) * TEAMS) % N_TILES * (MM / 4))
#define HAS_STATE(n) (team + (n) * TEAMS < STATE_JOBS && channel + STATE_ROW(n) < p.channels)
    [[unroll]] for (uint n = 0; n < STATE_HELD; n++) {
        TILE_CLEAR(state[n])
        if (kept && HAS_STATE(n)) TILE_LOAD(state[n], F32x4(state_at).v, STATE_ROW(n) * (N / 4) + STATE_QUAD(n), N / 4)
    }

    float a = F32(p.a).v[head];
    vec4 c[N_HELD], b[N_HELD], x[X_HELD];
    float rate;
#define FETCH(NOW)                                                                              \
    [[unroll]] for (uint n = 0; n < N_HELD; n++) {                                              \
        uint at = tid + n * WG, token = (NOW) + at / (N / 4), from = group * N + at % (N / 4) * 4; \
        bool there = at < CHUNK * N / 4 && token < end;                                         \
        c[n] = there ? quad_of(p.c, token, p.c_stride, from) : vec4(0);                         \
        b[n] = there ? quad_of(p.b, token, p.b_stride, from) : vec4(0);                         \
    }                                                                                           \
    [[unroll]] for (uint n = 0; n < X_HELD; n++) {                                              \
        uint at = tid + n * WG, token = (NOW) + at / (COLS / 4), from = channel + at % (COLS / 4) * 4; \
        bool there = at < CHUNK * COLS / 4 && token < end && from < p.channels;                 \
        x[n] = there ? step_of(token, head) * quad_of(p.x, token, p.x_stride, head * p.channels + from) : vec4(0); \
    }                                                                                           \
    rate = tid < CHUNK && (NOW) + tid < end ? a * step_of((NOW) + tid, head) : 0.0;
    FETCH(first)
    if (tid < TOPS) tops[tid] = 0;
    barrier();

    for (uint now = first; now < end; now += CHUNK) {
        if (tid < CHUNK) rates[tid] = rate;
#if MATRICES
        float most_c = 0, most_b = 0, most_x = 0, most_s = 0;
        [[unroll]] for (uint n = 0; n < N_HELD; n++) {
            most_c = max(most_c, largest(c[n]));
            most_b = max(most_b, largest(b[n]));
        }
        [[unroll]] for (uint n = 0; n < X_HELD; n++) most_x = max(most_x, largest(x[n]));
        [[unroll]] for (uint n = 0; n < STATE_HELD; n++) TILE_MOST(state[n], most_s)
        raise_top(C, most_c);
        raise_top(B, most_b);
        raise_top(X, most_x);
        raise_top(S, most_s);
#endif
        barrier();
        // Sums of N products stay below 2^14.
        float c_scale = scale_below(3, C), b_scale = scale_below(3, B);
        float x_scale = scale_below(14, X), s_scale = scale_below(14, S);
        [[unroll]] for (uint n = 0; n < N_HELD; n++) {
            uint at = tid + n * WG, to = at / (N / 4) * N_LINE + at % (N / 4);
            if (at < CHUNK * N / 4) {
                c_stage[to] = QUAD(c[n] * c_scale);
                b_stage[to] = QUAD(b[n] * b_scale);
            }
        }
        [[unroll]] for (uint n = 0; n < X_HELD; n++) {
            uint at = tid + n * WG;
            if (at < CHUNK * COLS / 4) x_stage[at / (COLS / 4) * X_LINE + at % (COLS / 4)] = QUAD(x[n] * x_scale);
        }
        [[unroll]] for (uint n = 0; n < STATE_HELD; n++) {
            TILE scaled = state[n];
            TILE_SCALE(scaled, s_scale)
            if (team + n * TEAMS < STATE_JOBS) TILE_STORE_QUADS(scaled, s_stage, STATE_ROW(n) * N_LINE + STATE_QUAD(n), N_LINE)
        }
        if (tid < CHUNK) SUM_OF_FIRST(logs[tid], rates, CHUNK, tid + 1)
        barrier();

        if (tid < TOPS) tops[tid] = 0;
        if (now + CHUNK < end) {
            FETCH(now + CHUNK)
        }
        for (uint job = team; job < G_JOBS + Y_JOBS; job += TEAMS) {
            TILE sum;
            TILE_CLEAR(sum)
            if (job < G_JOBS) {
                uvec2 block = lower_block(job);
                TIMES_TRANSPOSED(sum, c_stage, block.x * MM * N_LINE, N_LINE, b_stage, block.y * MM * N_LINE, N_LINE, N)
                TILE_STORE(sum, g_stage, block.x * MM * G_LINE + block.y * (MM / 4), G_LINE)
            } else {
                uint row = (job - G_JOBS) / COL_TILES * MM, col = (job - G_JOBS) % COL_TILES * MM;
                TIMES_TRANSPOSED(sum, c_stage, row * N_LINE, N_LINE, s_stage, col * N_LINE, N_LINE, N)
                TILE_STORE(sum, y_stage, row * Y_LINE + col / 4, Y_LINE)
            }
        }
        barrier();

        // Where states grow, sums are kept small by what the whole chunk grows.
        float last = logs[CHUNK - 1], rise = max(last, 0.0);
        for (uint at = tid; at < CHUNK * CHUNK / 4; at += WG) {
            uint t = at / (CHUNK / 4), u = at % (CHUNK / 4) * 4;
            vec4 factors = vec4(0);
            [[unroll]] for (uint e = 0; e < 4; e++) {
                if (u + e <= t) factors[e] = g_stage[t * G_LINE + u / 4][e] * exp(logs[t] - logs[u + e] - rise);
            }
            m_stage[t * M_LINE + u / 4] = QUAD(factors);
        }
        for (uint at = tid; at < CHUNK * COLS / 4; at += WG) {
            uint t = at / (COLS / 4), to = t * X_LINE + at % (COLS / 4);
            late_stage[to] = QUAD(vec4(x_stage[to]) * exp(last - logs[t] - rise));
        }
        barrier();

        for (uint job = team; job < Y_JOBS; job += TEAMS) {
            uint row = job / COL_TILES * MM, col = job % COL_TILES * MM;
            TILE sum;
            TILE_CLEAR(sum)
            TIMES(sum, m_stage, row * M_LINE, M_LINE, x_stage, col / 4, X_LINE, row + MM)
            TILE_STORE(sum, g_stage, row * G_LINE + col / 4, G_LINE)
        }
        float unit = exp(rise) / (b_scale * x_scale), decay = exp(last) / unit;
        [[unroll]] for (uint n = 0; n < STATE_HELD; n++) {
            TILE_SCALE(state[n], decay)
            if (team + n * TEAMS < STATE_JOBS)
                TRANSPOSED_TIMES(state[n], late_stage, STATE_ROW(n) / 4, X_LINE, b_stage, STATE_QUAD(n), N_LINE, CHUNK)
            TILE_SCALE(state[n], unit)
        }
        barrier();

        float by_chunk = exp(rise) / (c_scale * b_scale * x_scale), by_state = 1.0 / (c_scale * s_scale);
        for (uint at = tid; at < CHUNK * COLS / 4; at += WG) {
            uint t = at / (COLS / 4), quad = at % (COLS / 4), to = head * p.channels + channel + 4 * quad;
            if (now + t >= end || channel + 4 * quad >= p.channels) continue;
            vec4 y = g_stage[t * G_LINE + quad] * by_chunk + y_stage[t * Y_LINE + quad] * (by_state * exp(logs[t]));
#if SKIP
            y += quad_of(p.x, now + t, p.x_stride, to) * F32(p.skip).v[head];
#endif
            uvec2 row = row_address(p.y, now + t, p.channels * p.heads * 4);
#if ALIGNED
            F32x4(row).v[to / 4] = y;
#else
            [[unroll]] for (uint e = 0; e < 4; e++) F32(row).v[to + e] = y[e];
#endif
        }
    }

    if (!kept) return;
    [[unroll]] for (uint n = 0; n < STATE_HELD; n++) {
        if (HAS_STATE(n)) TILE_STORE(state[n], F32x4(state_at).v, STATE_ROW(n) * (N / 4) + STATE_QUAD(n), N / 4)
    }
}
