// mul_mm in 8-bit integers: d[m, n] = scale * sum_k a[k, m] * b[k, n] (+ bias[m]) (+ residual[m, n])
// a: blocks of any format; b: activations from quantise_q8_1, blocks of 128 codes after four pairs of halves; d: F32 or F16.
// WG threads compute TILE_M x TILE_N, each THREAD_M x THREAD_N, from tiles of 32 elements of k in shared memory: one
// thread loads a row or an activation vector of the tile. A group's product is exact in integers; scales and minimums meet it in f32.
// Sums run over k in order, whatever the tile.
#version 450
#include "kiln.glsl"
#extension GL_EXT_integer_dot_product : require

#define THREADS_M (TILE_M / THREAD_M)
#define WG (THREADS_M * (TILE_N / THREAD_N))
layout(local_size_x = WG) in;
#include "formats.glsl"
#include "mul_mm/place.glsl"

// Nine words a row: eight with codes, one that keeps rows in different banks.
shared uint codes_a[TILE_M * 9];
shared uint codes_b[TILE_N * 9];
// Scale and minimum of both halves of a's group; b's scale, and the sums of both halves of its group.
shared vec4 scales_a[TILE_M];
shared vec4 scales_b[TILE_N];

int ones(uint x) { return dotPacked4x8EXT(int(x), 0x01010101); }

void load_row(uvec2 row, uint k, uint to) {
    uint codes[8];
    vec2 lo, hi;
    A_GROUP32(row, k, codes, lo, hi);
    [[unroll]] for (uint i = 0; i < 8; i++) codes_a[9 * to + i] = codes[i];
    scales_a[to] = vec4(lo, hi);
}

void load_column(uvec2 column, uint k, uint to) {
    uvec2 block = offset(column, k / 128 * 144);
    uint group = k / 32 % 4;
    ivec2 sums = ivec2(0);
    [[unroll]] for (uint i = 0; i < 8; i++) {
        uint codes = U32(block).v[4 + 8 * group + i];
        codes_b[9 * to + i] = codes;
        sums[i / 4] += ones(codes);
    }
    float scale = unpackHalf2x16(U32(block).v[group]).x;
    scales_b[to] = vec4(scale, scale * vec2(sums), 0);
}

void main() {
    A_INIT();
    if (!find_tile()) return;
    uint t = gl_LocalInvocationID.x;
    uvec2 line = t < TILE_M ? row_of_a(first_m + t) : column_of_b(first_n + t - TILE_M);
    // Neighbouring rows belong to neighbouring threads, so that they are stored together.
    uint tm = t % THREADS_M, tn = t / THREADS_M * THREAD_N;
    float sum[THREAD_N][THREAD_M];
    [[unroll]] for (uint n = 0; n < THREAD_N; n++)
        [[unroll]] for (uint m = 0; m < THREAD_M; m++) sum[n][m] = 0;

    for (uint k = 0; k < p.k; k += 32) {
        if (t < TILE_M) load_row(line, k, t);
        else if (t < TILE_M + TILE_N) load_column(line, k, t - TILE_M);
        barrier();
        [[unroll]] for (uint m = 0; m < THREAD_M; m++) {
            uint row = tm + m * THREADS_M;
            vec4 of_a = scales_a[row];
            uint codes[8];
            [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = codes_a[9 * row + i];
            [[unroll]] for (uint n = 0; n < THREAD_N; n++) {
                vec4 of_b = scales_b[tn + n];
                ivec2 dots = ivec2(0);
                [[unroll]] for (uint i = 0; i < 8; i++)
                    dots[i / 4] += dotPacked4x8EXT(int(codes[i]), int(codes_b[9 * (tn + n) + i]));
#if A_GROUP >= 32
                sum[n][m] += of_b.x * of_a.x * float(dots.x + dots.y);
#else
                sum[n][m] += of_b.x * dot(of_a.xz, vec2(dots));
#endif
#if A_HAS_MIN
                sum[n][m] += dot(of_a.yw, of_b.yz);
#endif
            }
        }
        barrier();
    }
    [[unroll]] for (uint n = 0; n < THREAD_N; n++) {
        uint at = first_n + tn + n;
        if (at >= end_n) continue;
        uvec2 d = column_of_d(at);
        [[unroll]] for (uint m = 0; m < THREAD_M; m++) {
            uint row = first_m + tm + m * THREADS_M;
            if (row < p.m) STORE_D(d, row, finish(sum[n][m], row, at));
        }
    }
}
