// gated_delta_net in chunks of CHUNK tokens. With G_t the sum of the logarithms of the decays of the chunk's tokens up to t (for each key,
// with VECTOR), r = sigmoid(beta), Z the state before the chunk, and the weights of two tokens u <= t
//   kk[t][u] = sum over keys of k_t k_u e^(G_t - G_u),   qk[t][u] = sum over keys of q_t k_u e^(G_t - G_u),
// the changes d_t that tokens make to the state solve a triangular system, from which all else follows:
//   d_t + r_t (sum over u < t of kk[t][u] d_u) = r_t (v_t - Z (e^(G_t) k_t))
//   y_t = scale (Z (e^(G_t) q_t) + sum over u <= t of qk[t][u] d_u),   Z after = e^(G_last) Z + sum over u of d_u (e^(G_last - G_u) k_u)
// Sums over keys and tokens are products of matrices (`tiles.glsl`), the weights of VECTOR aside, which do not factor without overflow; the
// system is solved in f32, a column by one thread. Exponentials are of differences, which are not above 0 where logarithms are not. Tokens
// past the end of a sequence are zeros whose decay is one: they change nothing.
// q, k: [S, key_heads, tokens]; v, y: [S, heads, tokens]; beta: [heads, tokens]; g: [heads, tokens], or with VECTOR [S, heads, tokens];
// states: [S keys, S values, heads, states]. Tokens of q, k, v, g and beta lie strides apart. The logarithm of a decay is
//   GATE 0: g;  GATE 1: a softplus(g + bias);  GATE 2: bound sigmoid(a (g + bias));  a: [heads]; bias: as a token's g.
// One workgroup per (sequence, head, COLS values) goes from chunk to chunk, the state in the registers of its teams. What the next chunk
// needs is on its way while one is computed.
#version 450
#include "kiln.glsl"
#include "quads.glsl"
#include "sequences.glsl"
#include "activations.glsl"
#include "tiles.glsl"

layout(local_size_x = WG) in;

#define QUADS (S / 4)
#define S_LINE LINE_OF(S)
#define V_LINE LINE_OF(COLS)
#define W_LINE LINE_OF(CHUNK)
#define Y_LINE (COLS / 4 + 1)
#define A_LINE (CHUNK / 4 + 1)
#define KEY_TILES (S / MM)
#define COL_TILES (COLS / MM)
#define BLOCKS (CHUNK / MM)
#define LOWER (BLOCKS * (BLOCKS + 1) / 2)
#define Y_JOBS (BLOCKS * COL_TILES)
#define STATE_JOBS (COL_TILES * KEY_TILES)
#define STATE_HELD ((STATE_JOBS + TEAMS - 1) / TEAMS)
// Quads of keys and of values that a thread brings.
#define K_HELD ((CHUNK * QUADS + WG - 1) / WG)
#define V_HELD ((CHUNK * COLS / 4 + WG - 1) / WG)
#define GATES (VECTOR == 1 ? S : 1)

// Queries; after the first products the weights qk, the changes d, and the same decayed up to the end of the chunk.
#define D_AT (CHUNK * W_LINE)
#define LATE_AT (D_AT + CHUNK * V_LINE)
#define LATER (LATE_AT + CHUNK * V_LINE)
shared QUAD q_stage[CHUNK * S_LINE > LATER ? CHUNK * S_LINE : LATER];
shared QUAD k_stage[CHUNK * S_LINE];
// The state before the chunk.
shared QUAD s_stage[COLS * S_LINE];
#if VECTOR
// Keys and queries decayed since the beginning of the chunk; instead of the queries later keys decayed up to its end.
shared QUAD k_decayed[CHUNK * S_LINE];
shared QUAD q_decayed[CHUNK * S_LINE];
shared vec4 key_logs[CHUNK * QUADS];
// The decay of the chunk in every row of a tile.
shared vec4 key_decays[MM * QUADS];
#else
shared float rates[CHUNK];
shared float logs[CHUNK];
#endif
shared float betas[CHUNK];
// kk, then the triangle of the system; qk.
shared vec4 a_stage[CHUNK * A_LINE];
shared vec4 w_stage[CHUNK * A_LINE];
// Z k, then the right side of the system, then what the chunk itself gives to y.
shared vec4 d_stage[CHUNK * Y_LINE];
// What the state gives to y.
shared vec4 y_stage[CHUNK * Y_LINE];

const uint TOP_Q = 0, TOP_K = 1, TOP_Z = 2, TOP_D = 3;

// Element `at` of a token's row, and four from there on.
float element(uvec2 base, uint token, uint stride, uint at) { return F32(row_address(base, token, stride * 4)).v[at]; }
vec4 quad_of(uvec2 base, uint token, uint stride, uint at) {
    uvec2 row = row_address(base, token, stride * 4);
#if ALIGNED
    return F32x4(row).v[at / 4];
#else
    return vec4(F32(row).v[at], F32(row).v[at + 1], F32(row).v[at + 2], F32(row).v[at + 3]);
#endif
}

// The logarithm of a decay.
float log_of(uint token, uint head, uint i) {
    float g = element(p.g, token, p.g_stride, head * GATES + i);
#if GATE == 0
    return g;
#else
    float a = F32(p.a).v[head], x = g + F32(p.bias).v[head * GATES + i];
#if GATE == 1
    return a * softplus(x);
#else
    return BOUND * sigmoid(a * x);
#endif
#endif
}

void main() {
    uint slices = S / COLS;
    uint place = group_index();
    uint value = place % slices * COLS;
    uint head = place / slices % p.heads;
    uint sequence = place / slices / p.heads;
    if (sequence >= p.sequences) return;
    uint first = start_of(sequence), end = end_of(sequence);
    uint key_head = GROUPED == 1 ? head / (p.heads / KEY_HEADS) : head % KEY_HEADS;
    uint tid = thread_number(), team = team_number();

    uint slot = p.slots == uvec2(0) ? sequence : U32(p.slots).v[sequence];
    bool kept = slot < p.states;
    uvec2 state_at = row_address(p.state, kept ? slot : 0, p.heads * S * S * 4);
    state_at = row_address(state_at, head * S + value, S * 4);
    TILE state[STATE_HELD];
    // The row of values of tile n, its quads of keys, and whether there is such a tile.
#define STATE_ROW(n) ((team + (n) * TEAMS) / KEY_TILES * MM)
#define STATE_QUAD(n) ((team + (n) * TEAMS) % KEY_TILES * (MM / 4))
#define HAS_STATE(n) (team + (n) * TEAMS < STATE_JOBS)
    [[unroll]] for (uint n = 0; n < STATE_HELD; n++) {
        TILE_CLEAR(state[n])
        if (kept && HAS_STATE(n)) TILE_LOAD(state[n], F32x4(state_at).v, STATE_ROW(n) * QUADS + STATE_QUAD(n), QUADS)
    }

    vec4 q[K_HELD], k[K_HELD], v[V_HELD];
#if VECTOR
    vec4 g[K_HELD];
#else
    float rate;
#endif
    float beta;
#define FETCH_KEYS(NOW)                                                                         \
    [[unroll]] for (uint n = 0; n < K_HELD; n++) {                                              \
        uint at = tid + n * WG, token = (NOW) + at / QUADS, from = key_head * S + at % QUADS * 4; \
        bool there = at < CHUNK * QUADS && token < end;                                         \
        q[n] = there ? quad_of(p.q, token, p.q_stride, from) : vec4(0);                         \
        k[n] = there ? quad_of(p.k, token, p.k_stride, from) : vec4(0);                         \
    }                                                                                           \
    FETCH_GATES(NOW)                                                                            \
    beta = tid < CHUNK && (NOW) + tid < end ? sigmoid(element(p.beta, (NOW) + tid, p.beta_stride, head)) : 0.0;
#if VECTOR
#define FETCH_GATES(NOW)                                                                        \
    [[unroll]] for (uint n = 0; n < K_HELD; n++) {                                              \
        uint at = tid + n * WG, token = (NOW) + at / QUADS;                                     \
        g[n] = vec4(0);                                                                         \
        if (at < CHUNK * QUADS && token < end) {                                                \
            [[unroll]] for (uint e = 0; e < 4; e++) g[n][e] = log_of(token, head, at % QUADS * 4 + e); \
        }                                                                                       \
    }
#else
#define FETCH_GATES(NOW) rate = tid < CHUNK && (NOW) + tid < end ? log_of((NOW) + tid, head, 0) : 0.0;
#endif
#define FETCH_VALUES(NOW)                                                                       \
    [[unroll]] for (uint n = 0; n < V_HELD; n++) {                                              \
        uint at = tid + n * WG, token = (NOW) + at / (COLS / 4), from = head * S + value + at % (COLS / 4) * 4; \
        v[n] = at < CHUNK * COLS / 4 && token < end ? quad_of(p.v, token, p.v_stride, from) : vec4(0); \
    }
    FETCH_KEYS(first)
    FETCH_VALUES(first)
    if (tid < TOPS) tops[tid] = 0;
    barrier();

    for (uint now = first; now < end; now += CHUNK) {
        if (tid < CHUNK) betas[tid] = beta;
#if VECTOR
        [[unroll]] for (uint n = 0; n < K_HELD; n++) {
            if (tid + n * WG < CHUNK * QUADS) key_logs[tid + n * WG] = g[n];
        }
#else
        if (tid < CHUNK) rates[tid] = rate;
#endif
#if MATRICES
        float most_q = 0, most_k = 0, most_z = 0;
        [[unroll]] for (uint n = 0; n < K_HELD; n++) {
            most_q = max(most_q, largest(q[n]));
            most_k = max(most_k, largest(k[n]));
        }
        [[unroll]] for (uint n = 0; n < STATE_HELD; n++) TILE_MOST(state[n], most_z)
        raise_top(TOP_Q, most_q);
        raise_top(TOP_K, most_k);
        raise_top(TOP_Z, most_z);
#endif
        barrier();
        // Sums over keys stay below 2^13.
        float q_scale = scale_below(3, TOP_Q), k_scale = scale_below(3, TOP_K), z_scale = scale_below(14, TOP_Z);
        [[unroll]] for (uint n = 0; n < K_HELD; n++) {
            uint at = tid + n * WG, to = at / QUADS * S_LINE + at % QUADS;
            if (at < CHUNK * QUADS) {
                q_stage[to] = QUAD(q[n] * q_scale);
                k_stage[to] = QUAD(k[n] * k_scale);
            }
        }
        [[unroll]] for (uint n = 0; n < STATE_HELD; n++) {
            TILE scaled = state[n];
            TILE_SCALE(scaled, z_scale)
            if (HAS_STATE(n)) TILE_STORE_QUADS(scaled, s_stage, STATE_ROW(n) * S_LINE + STATE_QUAD(n), S_LINE)
        }
#if VECTOR
        for (uint at = tid; at < QUADS; at += WG) {
            precise vec4 sum = vec4(0);
            for (uint t = 0; t < CHUNK; t++) {
                sum += key_logs[t * QUADS + at];
                key_logs[t * QUADS + at] = sum;
            }
        }
        barrier();
        [[unroll]] for (uint n = 0; n < K_HELD; n++) {
            uint at = tid + n * WG, to = at / QUADS * S_LINE + at % QUADS;
            if (at < CHUNK * QUADS) {
                vec4 decay = exp(key_logs[at]);
                q_decayed[to] = QUAD(q[n] * q_scale * decay);
                k_decayed[to] = QUAD(k[n] * k_scale * decay);
            }
        }
#else
        if (tid < CHUNK) SUM_OF_FIRST(logs[tid], rates, CHUNK, tid + 1)
#endif
        barrier();

        if (tid < TOPS) tops[tid] = 0;
        if (now + CHUNK < end) {
            FETCH_KEYS(now + CHUNK)
        }
#if VECTOR
#define K_LEFT k_decayed
#define Q_LEFT q_decayed
#define WEIGHT_JOBS 0
        for (uint pair = tid; pair < CHUNK * (CHUNK + 1) / 2; pair += WG) {
            uvec2 tu = lower_block(pair);
            vec4 on_k = vec4(0), on_q = vec4(0);
            for (uint i = 0; i < QUADS; i++) {
                vec4 other = vec4(k_stage[tu.y * S_LINE + i]) * exp(key_logs[tu.x * QUADS + i] - key_logs[tu.y * QUADS + i]);
                on_k = fma(vec4(k_stage[tu.x * S_LINE + i]), other, on_k);
                on_q = fma(vec4(q_stage[tu.x * S_LINE + i]), other, on_q);
            }
            a_stage[tu.x * A_LINE + tu.y / 4][tu.y % 4] = sum4(on_k);
            w_stage[tu.x * A_LINE + tu.y / 4][tu.y % 4] = sum4(on_q);
        }
#else
#define K_LEFT k_stage
#define Q_LEFT q_stage
#define WEIGHT_JOBS (2 * LOWER)
#endif
        for (uint job = team; job < WEIGHT_JOBS + 2 * Y_JOBS; job += TEAMS) {
            TILE sum;
            TILE_CLEAR(sum)
            if (job < WEIGHT_JOBS) {
                uvec2 block = lower_block(job / 2);
                uint to = block.x * MM * A_LINE + block.y * (MM / 4);
                if (job % 2 == 0) {
                    TIMES_TRANSPOSED(sum, k_stage, block.x * MM * S_LINE, S_LINE, k_stage, block.y * MM * S_LINE, S_LINE, S)
                    TILE_STORE(sum, a_stage, to, A_LINE)
                } else {
                    TIMES_TRANSPOSED(sum, q_stage, block.x * MM * S_LINE, S_LINE, k_stage, block.y * MM * S_LINE, S_LINE, S)
                    TILE_STORE(sum, w_stage, to, A_LINE)
                }
            } else {
                uint n = (job - WEIGHT_JOBS) / 2, row = n / COL_TILES * MM, col = n % COL_TILES * MM;
                if (job % 2 == 0) {
                    TIMES_TRANSPOSED(sum, K_LEFT, row * S_LINE, S_LINE, s_stage, col * S_LINE, S_LINE, S)
                    TILE_STORE(sum, d_stage, row * Y_LINE + col / 4, Y_LINE)
                } else {
                    TIMES_TRANSPOSED(sum, Q_LEFT, row * S_LINE, S_LINE, s_stage, col * S_LINE, S_LINE, S)
                    TILE_STORE(sum, y_stage, row * Y_LINE + col / 4, Y_LINE)
                }
            }
        }
        barrier();

#if VECTOR
        const float rise = 0.0;
#define DECAY(T) 1.0
#define BETWEEN(U, T) 1.0
#else
        // Where states grow, operands are kept small by the most that they grow within the chunk.
        float rise = 0.0;
        [[unroll]] for (uint t = 0; t < CHUNK; t++) rise += max(rates[t], 0.0);
#define DECAY(T) exp(logs[T])
#define BETWEEN(U, T) exp(logs[T] - logs[U])
#endif
        float shrink = exp(-rise);
        for (uint at = tid; at < CHUNK * CHUNK / 4; at += WG) {
            uint t = at / (CHUNK / 4), u = at % (CHUNK / 4) * 4;
            vec4 triangle = vec4(0), weights = vec4(0);
            [[unroll]] for (uint e = 0; e < 4; e++) {
                if (u + e <= t) {
                    float between = BETWEEN(u + e, t);
                    weights[e] = w_stage[t * A_LINE + u / 4][e] * between * shrink;
                    if (u + e < t) triangle[e] = a_stage[t * A_LINE + u / 4][e] * between * betas[t] / (k_scale * k_scale);
                }
            }
            a_stage[t * A_LINE + u / 4] = triangle;
            q_stage[t * W_LINE + u / 4] = QUAD(weights);
        }
        [[unroll]] for (uint n = 0; n < V_HELD; n++) {
            uint at = tid + n * WG, t = at / (COLS / 4), to = t * Y_LINE + at % (COLS / 4);
            if (at < CHUNK * COLS / 4) d_stage[to] = betas[t] * (v[n] - d_stage[to] * (DECAY(t) / (k_scale * z_scale)));
        }
#if VECTOR
        for (uint at = tid; at < CHUNK * QUADS; at += WG) {
            uint to = at / QUADS * S_LINE + at % QUADS;
            q_decayed[to] = QUAD(vec4(k_stage[to]) * exp(key_logs[(CHUNK - 1) * QUADS + at % QUADS] - key_logs[at]));
        }
        for (uint at = tid; at < MM * QUADS; at += WG) key_decays[at] = exp(key_logs[(CHUNK - 1) * QUADS + at % QUADS]);
#endif
        barrier();

        // Elements of the triangle from t on are zero, so whole quads of it are read.
        float x[CHUNK], most = 0;
        [[unroll]] for (uint t = 0; t < CHUNK; t++) x[t] = 0;
        if (tid < COLS) {
            [[unroll]] for (uint t = 0; t < CHUNK; t++) {
                vec4 sum = vec4(0);
                [[unroll]] for (uint u = 0; u < t; u += 4)
                    sum = fma(a_stage[t * A_LINE + u / 4], vec4(x[u], x[u + 1], x[u + 2], x[u + 3]), sum);
                x[t] = d_stage[t * Y_LINE + tid / 4][tid % 4] - sum4(sum);
                most = max(most, abs(x[t]));
            }
        }
        raise_top(TOP_D, most);
        if (now + CHUNK < end) {
            FETCH_VALUES(now + CHUNK)
        }
        barrier();
        float d_scale = scale_below(14, TOP_D);
        if (tid < COLS) {
            [[unroll]] for (uint t = 0; t < CHUNK; t++) {
                uint to = t * V_LINE + tid / 4;
                q_stage[D_AT + to][tid % 4] = NUMBER(x[t] * d_scale);
#if !VECTOR
                q_stage[LATE_AT + to][tid % 4] = NUMBER(x[t] * d_scale * (BETWEEN(t, CHUNK - 1) * shrink));
#endif
            }
        }
        barrier();

        for (uint job = team; job < Y_JOBS; job += TEAMS) {
            uint row = job / COL_TILES * MM, col = job % COL_TILES * MM;
            TILE sum;
            TILE_CLEAR(sum)
            TIMES(sum, q_stage, row * W_LINE, W_LINE, q_stage, D_AT + col / 4, V_LINE, row + MM)
            TILE_STORE(sum, d_stage, row * Y_LINE + col / 4, Y_LINE)
        }
        float unit = exp(rise) / (d_scale * k_scale);
        [[unroll]] for (uint n = 0; n < STATE_HELD; n++) {
#if VECTOR
            TILE_SCALE(state[n], 1.0 / unit)
            if (HAS_STATE(n)) {
                TILE_SCALE_COLUMNS(state[n], key_decays, STATE_QUAD(n), QUADS)
                TRANSPOSED_TIMES(state[n], q_stage, D_AT + STATE_ROW(n) / 4, V_LINE, q_decayed, STATE_QUAD(n), S_LINE, CHUNK)
            }
#else
            TILE_SCALE(state[n], DECAY(CHUNK - 1) / unit)
            if (HAS_STATE(n))
                TRANSPOSED_TIMES(state[n], q_stage, LATE_AT + STATE_ROW(n) / 4, V_LINE, k_stage, STATE_QUAD(n), S_LINE, CHUNK)
#endif
            TILE_SCALE(state[n], unit)
        }
        barrier();

        float by_chunk = p.scale * exp(rise) / (q_scale * k_scale * d_scale), by_state = p.scale / (q_scale * z_scale);
        for (uint at = tid; at < CHUNK * COLS / 4; at += WG) {
            uint t = at / (COLS / 4), quad = at % (COLS / 4), to = head * S + value + 4 * quad;
            if (now + t >= end) break;
            vec4 y = d_stage[t * Y_LINE + quad] * by_chunk + y_stage[t * Y_LINE + quad] * (by_state * DECAY(t));
            uvec2 row = row_address(p.y, now + t, p.heads * S * 4);
#if ALIGNED
            F32x4(row).v[to / 4] = y;
#else
            [[unroll]] for (uint e = 0; e < 4; e++) F32(row).v[to + e] = y[e];
#endif
        }
    }

    if (!kept) return;
    [[unroll]] for (uint n = 0; n < STATE_HELD; n++) {
        if (HAS_STATE(n)) TILE_STORE(state[n], F32x4(state_at).v, STATE_ROW(n) * QUADS + STATE_QUAD(n), QUADS)
    }
}
