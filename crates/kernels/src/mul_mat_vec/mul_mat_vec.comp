// mul_mat_vec: d[m, n] = scale * sum_k a[k, m] * b[k, n] (+ bias[m]) (+ residual[m, n]), for COLS columns at once
// a: rows of any format; b: F32 or F16; d: F32. One workgroup of WG threads for ROWS rows; the threads share each row's
// groups of 32 elements (plain types: of 4), every column is loaded once for all rows. Rows past the last are computed
// again as the last and not stored, so a row's bits do not depend on the number of rows.
#version 450
#include "kiln.glsl"
#include "formats.glsl"
#include "reduce.glsl"

layout(local_size_x = WG) in;

float acc[ROWS][COLS];

#if A_BLOCKS
vec4 unpack(uint codes) {
    int c = int(codes);
    return vec4(bitfieldExtract(c, 0, 8), bitfieldExtract(c, 8, 8), bitfieldExtract(c, 16, 8), bitfieldExtract(c, 24, 8));
}

// Elements e .. e + 31 of every row and column.
void step32(uvec2 rows[ROWS], uvec2 columns[COLS], uint e) {
    uint codes[ROWS][8];
    vec2 lo[ROWS], hi[ROWS];
    [[unroll]] for (uint r = 0; r < ROWS; r++) A_GROUP32(rows[r], e, codes[r], lo[r], hi[r]);
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        vec4 x[8];
        [[unroll]] for (uint i = 0; i < 8; i++) x[i] = B_LOAD4(columns[c], e + 4 * i);
#if A_SHIFTED
        float sum_lo = dot(x[0] + x[1] + x[2] + x[3], vec4(1));
        float sum_hi = dot(x[4] + x[5] + x[6] + x[7], vec4(1));
#endif
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            float dot_lo = 0, dot_hi = 0;
            [[unroll]] for (uint i = 0; i < 4; i++) dot_lo += dot(unpack(codes[r][i]), x[i]);
            [[unroll]] for (uint i = 4; i < 8; i++) dot_hi += dot(unpack(codes[r][i]), x[i]);
            acc[r][c] += lo[r].x * dot_lo + hi[r].x * dot_hi;
#if A_SHIFTED
            acc[r][c] += lo[r].y * sum_lo + hi[r].y * sum_hi;
#endif
        }
    }
}
#endif

void main() {
    uint group = group_index();
    uint row_groups = (p.m + ROWS - 1) / ROWS;
    if (group >= row_groups * p.b_shape[0] * p.b_shape[1]) return;
    A_INIT();
    uint first = group % row_groups * ROWS;
    uint i2 = group / row_groups % p.b_shape[0];
    uint i3 = group / row_groups / p.b_shape[0];
    uint tid = gl_LocalInvocationID.x;

    uvec2 a = row_address(row_address(p.a, i2 / p.share[0], p.a_stride[1]), i3 / p.share[1], p.a_stride[2]);
    uvec2 b = row_address(row_address(p.b, i2, p.b_stride[1]), i3, p.b_stride[2]);
    uvec2 rows[ROWS], columns[COLS];
    [[unroll]] for (uint r = 0; r < ROWS; r++) rows[r] = row_address(a, min(first + r, p.m - 1), p.a_stride[0]);
    [[unroll]] for (uint c = 0; c < COLS; c++) columns[c] = row_address(b, c, p.b_stride[0]);
    [[unroll]] for (uint r = 0; r < ROWS; r++)
        [[unroll]] for (uint c = 0; c < COLS; c++) acc[r][c] = 0;

#if A_BLOCKS
    for (uint e = tid * 32; e < p.k; e += WG * 32) step32(rows, columns, e);
#elif VECTORS
    for (uint e = tid * 4; e < p.k; e += WG * 4) {
        vec4 w[ROWS];
        [[unroll]] for (uint r = 0; r < ROWS; r++) w[r] = A_LOAD4(rows[r], e);
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            vec4 x = B_LOAD4(columns[c], e);
            [[unroll]] for (uint r = 0; r < ROWS; r++) acc[r][c] += dot(w[r], x);
        }
    }
#else
    for (uint e = tid; e < p.k; e += WG) {
        [[unroll]] for (uint r = 0; r < ROWS; r++) {
            float w = A_LOAD(rows[r], e);
            [[unroll]] for (uint c = 0; c < COLS; c++) acc[r][c] = fma(w, B_LOAD(columns[c], e), acc[r][c]);
        }
    }
#endif

    uvec2 d = row_address(row_address(p.d, i2, p.d_stride[1]), i3, p.d_stride[2]);
#if RESIDUAL
    uvec2 residual = row_address(row_address(p.residual, i2, p.residual_stride[1]), i3, p.residual_stride[2]);
#endif
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            float sum = p.scale * wg_sum(acc[r][c]);
            uint row = first + r;
            if (tid == 0 && row < p.m) {
#if BIAS
                sum += F32(p.bias).v[row];
#endif
#if RESIDUAL
                sum += F32(row_address(residual, c, p.residual_stride[0])).v[row];
#endif
                F32(row_address(d, c, p.d_stride[0])).v[row] = sum;
            }
        }
    }
}
