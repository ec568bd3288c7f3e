// The end of a tile on matrix units. What an activation vector or a row of the tile needs is worked out once for the tile and kept in
// shared memory: asking for it element by element costs a tenth of the product. Needs place.glsl, TILE_M, TILE_N and WG.
// Packed activations may have no scales.
#ifndef FACTORS
#define FACTORS 1
#endif
#if PREPARED
shared float column_scale[TILE_N];
#endif
#if BIAS
shared float row_bias[TILE_M];
#endif
#if !STORE_TENSOR
shared uvec2 column_d[TILE_N];
#endif
#if RESIDUAL
shared uvec2 column_residual[TILE_N];
#endif

// A barrier must follow before anything is finished.
void prepare_finish() {
    for (uint i = gl_LocalInvocationID.x; i < TILE_N; i += WG) {
        uint n = min(first_n + i, end_n - 1);
        // The factor is a power of two, so nothing is lost: pack_activations.comp divided by it.
#if NORMED_PACKED_B
        // The norm of the activations, from the squares of what was divided by factors.
        uint low = U32(p.squares).v[n], high = U32(p.squares).v[p.n + n];
        float factor = F32(p.factors).v[n], sum = float(high) / 16.0 + float(low) / 68719476736.0;
        if (sum > 0 && sum < LEAST_SQUARES) overflow();
        column_scale[i] = inversesqrt(sum / float(p.k) + EPS / (factor * factor)) * p.scale;
#elif FACTORS
        column_scale[i] = F32(p.factors).v[column_number(n)] * p.scale;
#else
        column_scale[i] = p.scale;
#endif
#if !STORE_TENSOR
        column_d[i] = column_of_d(n);
#endif
#if RESIDUAL
        column_residual[i] = column_of_residual(n);
#endif
    }
#if BIAS
    for (uint i = gl_LocalInvocationID.x; i < TILE_M; i += WG) row_bias[i] = F32(tile_bias).v[min(first_m + i, p.m - 1)];
#endif
}

// Element (row, activation vector) of the tile: the sum becomes the result. The row must lie inside.
float finish_at(float sum, uint row, uint column) {
    sum *= column_scale[column];
#if BIAS
    sum += row_bias[row];
#endif
#if RESIDUAL
    sum += F32(column_residual[column]).v[first_m + row];
#endif
    return sum;
}

#if defined(PUT4_D)
// Four sums of an activation vector, from this row of the tile on.
void put_four(vec4 sums, uint row, uint column) {
    uint m = first_m + row;
#if VECTORS_D && !RESIDUAL
    if (m + 4 <= p.m) {
        [[unroll]] for (uint i = 0; i < 4; i++) sums[i] = finish_at(sums[i], row + i, column);
        PUT4_D(column_d[column], m, sums);
        return;
    }
#endif
    [[unroll]] for (uint i = 0; i < 4; i++)
        if (m + i < p.m) STORE_D(column_d[column], m + i, finish_at(sums[i], row + i, column));
}
#endif
