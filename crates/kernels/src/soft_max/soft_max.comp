// soft_max: y[i] = exp(v[i] - top) / sum(exp(v - top)), v[i] = x[i] * scale + slope * mask[i], top = max(v), per row
// x, y: F32 [cols, rows, heads, batch] with any outer strides; mask (MASK 1): [cols, rows, m2, m3], repeated over heads
// and batch; slope (ALIBI 1) falls with the head; sinks (SINKS 1): one more logit per head that only top and sum see.
// One workgroup of WG threads per row. Rows short enough stay in registers, others are read twice and written twice.
#version 450
#include "kiln.glsl"
#include "reduce.glsl"
#include "row_share.glsl"

layout(local_size_x = WG) in;

const float LOWEST = -3.402823466e38;

uint x0, y0, mask0;
float slope = 1.0;

float value(uint i) {
    float v = F32(p.x).v[x0 + i] * p.scale;
#if MASK
    v += slope * LOAD_MASK(p.mask, mask0 + i);
#endif
    return v;
}

// Minus infinity is tested by its bits and never subtracted: a driver may compute as if there were no infinities, and a
// row that is masked everywhere must give 0.
float weight(float v, float top) {
    return floatBitsToUint(v) == 0xff800000u ? 0.0 : exp(v - top);
}

#if ALIBI
float alibi(uint head) {
    float n = float(p.heads_pow2);
    bool first = head < p.heads_pow2;
    float steps = first ? float(head + 1) : float(head - p.heads_pow2) + 0.5;
    return exp2(-p.max_bias * steps / n);
}
#endif

void main() {
    uint row = group_index();
    if (row >= p.rows) return;
    uvec4 at = unravel(row, uint[4](p.shape[0], p.shape[1], p.shape[2], 1));
    x0 = at.x * p.x_stride[0] + at.y * p.x_stride[1] + at.z * p.x_stride[2];
    y0 = at.x * p.y_stride[0] + at.y * p.y_stride[1] + at.z * p.y_stride[2];
#if MASK
    uint m2 = at.y % p.mask_shape[0], m3 = at.z % p.mask_shape[1];
    mask0 = at.x * p.mask_stride[0] + m2 * p.mask_stride[1] + m3 * p.mask_stride[2];
#endif
#if ALIBI
    slope = alibi(at.y);
#endif

    float top = LOWEST;
#if SINKS
    float sink = F32(p.sinks).v[at.y];
    top = max(top, sink);
#endif
    SHARE(i) {
        float v = value(i);
#if HELD
        held[k] = v;
#endif
        top = max(top, v);
    }
    top = wg_max(top);

    float sum = 0.0;
    SHARE(i) {
#if HELD
        float e = weight(held[k], top);
        held[k] = e;
#else
        float e = weight(value(i), top);
        F32(p.y).v[y0 + i] = e;
#endif
        sum += e;
    }
    sum = wg_sum(sum);
#if SINKS
    sum += weight(sink, top);
#endif

    float share = sum > 0.0 ? 1.0 / sum : 0.0;
    SHARE(i) {
#if HELD
        F32(p.y).v[y0 + i] = held[k] * share;
#else
        F32(p.y).v[y0 + i] *= share;
#endif
    }
}
