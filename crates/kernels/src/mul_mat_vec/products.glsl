// Multiplies the slices of a team's rows. Sums run in the order of the slices, whatever PREFETCH is. `e` is where a slice was
// loaded from, as its row's address is; `at` is its first element.

#if A_BLOCKS
// What is in the flight, ready to be multiplied.
#define UNFOLD(f, e)                                                           \
    Values w[MATS][ROWS];                                                      \
    [[unroll]] for (uint m = 0; m < MATS; m++)                                 \
        [[unroll]] for (uint r = 0; r < ROWS; r++) w[m][r] = slice_values(prefetch[f][m][r], e);
#endif

float dot_onto(vec4 a, vec4 b, float sum) { return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum)))); }

#if INT
// One run at a time: value = scale * code + minimum, activation vector = factor * code, so the integer products of a run and, for
// formats with a minimum, the sum of its activation vector's codes are all there is to scale. Codes that are too large by a number
// have products that are too large by that many sums of the activation vector's codes.
#if SLICED
#define CODES16(j) slice_codes16(c, pass, lane, (run * SPAN_QUADS + j) / 4)
#define LOW16(j) slice_low16(c, pass, lane, (run * SPAN_QUADS + j) / 4)
#else
#define CODES16(j) column_codes16(c, span_at + 4 * j)
#define LOW16(j) column_low16(c, span_at + 4 * j)
#endif
void multiply_slice(uint f, uint e, uint pass, uint lane) {
    uint at = slice_start(pass * ROW_GROUP + lane);
    UNFOLD(f, e)
    [[unroll]] for (uint run = 0; run < RUNS; run++) {
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            uint x[SPAN_QUADS];
            uint span_at = at + QUAD_AT(run * SPAN_QUADS);
#if QUADS == 0
            [[unroll]] for (uint j = 0; j < SPAN_QUADS; j += 4) {
                uvec4 four = CODES16(j);
                [[unroll]] for (uint i = 0; i < 4; i++) x[j + i] = four[i];
            }
#else
            [[unroll]] for (uint j = 0; j < SPAN_QUADS; j++) x[j] = column_codes(c, span_at + QUAD_AT(j));
#endif
#if WIDE
            uint low[SPAN_QUADS];
#if QUADS == 0
            [[unroll]] for (uint j = 0; j < SPAN_QUADS; j += 4) {
                uvec4 four = LOW16(j);
                [[unroll]] for (uint i = 0; i < 4; i++) low[j + i] = four[i];
            }
#else
            [[unroll]] for (uint j = 0; j < SPAN_QUADS; j++) low[j] = column_low(c, span_at + QUAD_AT(j));
#endif
#endif
#if SLICED
            float scale = slice_scale(c, pass, lane, run);
#else
            float scale = column_scale(c, span_at);
#if SUMMED && !STAGED
            scale *= SHARE_OF(span_at);
#endif
#endif
#if defined(GROUP_SUMS) && SLICED
            float sum = slice_sum(c, pass, lane, run);
#elif defined(GROUP_SUMS)
            float sum = column_sum(c, span_at);
#elif A_HAS_MIN || ZERO_POINT
            int ones = 0;
            [[unroll]] for (uint j = 0; j < SPAN_QUADS; j++) {
#if WIDE
                ones += 256 * dotPacked4x8EXT(int(x[j]), 0x01010101) + dotPacked4x8EXT(int(low[j]), 0x01010101);
#else
                ones += dotPacked4x8EXT(int(x[j]), 0x01010101);
#endif
            }
            float sum = scale * float(ones);
#endif
            [[unroll]] for (uint m = 0; m < MATS; m++) [[unroll]] for (uint r = 0; r < ROWS; r++) {
                int dot = 0;
                [[unroll]] for (uint j = 0; j < SPAN_QUADS; j++) {
                    dot += dotPacked4x8EXT(int(w[m][r].codes[run * SPAN_QUADS + j]), int(x[j]));
                }
#if WIDE
                // 32 products of two bytes, times 256: 2^27 at most.
                dot *= 256;
                [[unroll]] for (uint j = 0; j < SPAN_QUADS; j++) {
                    dot += dotPacked4x8EXT(int(w[m][r].codes[run * SPAN_QUADS + j]), int(low[j]));
                }
#endif
                vec2 s = w[m][r].scales[run];
#if ZERO_POINT
                acc[m][r][c] = fma(s.x, fma(scale, float(dot), -float(ZERO_POINT) * sum), acc[m][r][c]);
#else
                acc[m][r][c] = fma(s.x * scale, float(dot), acc[m][r][c]);
#endif
#if A_HAS_MIN
                acc[m][r][c] = fma(s.y, sum, acc[m][r][c]);
#endif
            }
        }
    }
}
// With BATCH_INVARIANT an activation vector must have the same bits alone and beside others: the form for several serves one, too.
#elif A_BLOCKS && COLS == 1 && !defined(BATCH_INVARIANT)
// One activation vector: scales are multiplied with the sums of runs.
void multiply_slice(uint f, uint e, uint pass, uint lane) {
    uint at = slice_start(pass * ROW_GROUP + lane);
    UNFOLD(f, e)
    [[unroll]] for (uint run = 0; run < RUNS; run++) {
        float sums[MATS][ROWS];
        [[unroll]] for (uint m = 0; m < MATS; m++) [[unroll]] for (uint r = 0; r < ROWS; r++) sums[m][r] = 0;
        vec4 total = vec4(0);
        [[unroll]] for (uint j = 0; j < SPAN_QUADS; j++) {
            uint quad = run * SPAN_QUADS + j;
            vec4 x = column_quad(0, at + QUAD_AT(quad));
            total += x;
            [[unroll]] for (uint m = 0; m < MATS; m++) [[unroll]] for (uint r = 0; r < ROWS; r++)
                sums[m][r] = dot_onto(quad_values(w[m][r].codes[quad]), x, sums[m][r]);
        }
        float sum = total.x + total.y + (total.z + total.w);
        [[unroll]] for (uint m = 0; m < MATS; m++) [[unroll]] for (uint r = 0; r < ROWS; r++) {
            vec2 s = w[m][r].scales[run];
            acc[m][r][0] = fma(s.x, sums[m][r], acc[m][r][0]);
#if A_HAS_MIN
            acc[m][r][0] = fma(s.y, sum, acc[m][r][0]);
#endif
        }
    }
}
#elif SLICE > 1
// Several activations, or plain types: each value is made once for all activations.
void multiply_slice(uint f, uint e, uint pass, uint lane) {
    uint at = slice_start(pass * ROW_GROUP + lane);
#if A_BLOCKS
    UNFOLD(f, e)
#endif
    [[unroll]] for (uint j = 0; j < SLICE_QUADS; j++) {
        vec4 x[MATS][ROWS];
        [[unroll]] for (uint m = 0; m < MATS; m++) [[unroll]] for (uint r = 0; r < ROWS; r++) {
#if A_BLOCKS
            vec2 s = w[m][r].scales[j / SPAN_QUADS];
            x[m][r] = quad_values(w[m][r].codes[j]) * s.x;
#if A_HAS_MIN
            x[m][r] += s.y;
#endif
#else
            x[m][r] = plain_quad(prefetch[f][m][r], j);
#endif
        }
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            vec4 y = column_quad(c, at + QUAD_AT(j));
            [[unroll]] for (uint m = 0; m < MATS; m++) [[unroll]] for (uint r = 0; r < ROWS; r++)
                acc[m][r][c] = dot_onto(x[m][r], y, acc[m][r][c]);
        }
    }
}
#else
void multiply_slice(uint f, uint e, uint pass, uint lane) {
    uint at = slice_start(pass * ROW_GROUP + lane);
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        float x = column_element(c, at);
        [[unroll]] for (uint m = 0; m < MATS; m++) [[unroll]] for (uint r = 0; r < ROWS; r++)
            acc[m][r][c] = fma(prefetch[f][m][r].raw, x, acc[m][r][c]);
    }
}
#endif
