// Where the tile of a workgroup lies: TILE_M rows of a from `first_m`, TILE_N activations of b from `first_n`. Workgroups
// that run side by side share activations, and where tiles lie in bands of SWIZZLE also rows. With EXPERTS, tiles come from the
// list that experts.comp made: each belongs to one expert, and its activations are the (token, slot) pairs that chose it.
// FLAT: there is one batch.
// With SPLIT, p.splits workgroups share a tile, each with p.chunk elements of k (partials.glsl); there are no batches then.
#ifndef SWIZZLE
#define SWIZZLE tiles_m
#endif
uint first_m, first_n, end_n;
uvec2 tile_a, tile_b, tile_d, tile_bias, tile_residual;
uint tile_columns; // Activations of b before those of the tile's batch.
#if SPLIT || EXPERTS
uint tile_number;
#endif
#if SPLIT
uint tile_split;
#define BEGIN_K (tile_split * p.chunk)
#define END_K min(p.k, BEGIN_K + p.chunk)
#else
#define BEGIN_K 0
#define END_K p.k
#endif

uvec2 batch_start(uvec2 base, uint i2, uint i3, uint stride[3]) {
    return row_address(row_address(base, i2, stride[1]), i3, stride[2]);
}

// False where the grid has more workgroups than there are tiles.
bool find_tile() {
    if (p.m == 0) return false;
    uint tiles_m = (p.m + TILE_M - 1) / TILE_M;
    uint tile = group_index();
#if EXPERTS
    first_m = tile % tiles_m * TILE_M;
    tile /= tiles_m;
    tile_number = tile;
    // The list: number of tiles, then expert, first pair and end of pairs of each.
    if (tile >= U32(p.tiles).v[0]) return false;
    first_n = U32(p.tiles).v[3 * tile + 2];
    end_n = U32(p.tiles).v[3 * tile + 3];
    uint expert = U32(p.tiles).v[3 * tile + 1];
    tile_a = row_address(p.a, expert, p.a_stride[1]);
    tile_bias = row_address(p.bias, expert, 4 * p.m);
#else
    if (p.n == 0) return false;
    uint tiles_n = (p.n + TILE_N - 1) / TILE_N;
    end_n = p.n;
    uint tiles = tiles_m * tiles_n;
#if SPLIT
    tile_split = tile % p.splits;
    tile /= p.splits;
    tile_number = tile;
#endif
    uint in_batch = tile % tiles;
    tile /= tiles;
    // Bands of SWIZZLE rows of tiles: down a band's rows, then on to the next activations.
    uint start = in_batch / (uint(SWIZZLE) * tiles_n) * SWIZZLE;
    uint rows = min(uint(SWIZZLE), tiles_m - start);
    in_batch -= start * tiles_n;
    first_m = (start + in_batch % rows) * TILE_M;
    first_n = in_batch / rows * TILE_N;
    tile_bias = p.bias;
#if SPLIT || FLAT
    if (tile > 0) return false;
    tile_a = p.a;
    tile_b = p.b;
    tile_d = p.d;
    tile_columns = 0;
#if RESIDUAL
    tile_residual = p.residual;
#endif
#else
    uint i2 = tile % p.batches[0], i3 = tile / p.batches[0];
    if (i3 >= p.batches[1]) return false;
    tile_a = batch_start(p.a, i2 / p.share[0], i3 / p.share[1], p.a_stride);
    tile_b = batch_start(p.b, i2, i3, p.b_stride);
    tile_d = batch_start(p.d, i2, i3, p.d_stride);
    tile_columns = (i3 * p.batches[0] + i2) * p.n;
#if RESIDUAL
    tile_residual = batch_start(p.residual, i2, i3, p.residual_stride);
#endif
#endif
#endif
    return true;
}

// Rows and columns past the end are the last ones again: they are computed and not stored, so that nothing outside of
// the operands is read.
uvec2 row_of_a(uint m) { return row_address(tile_a, min(m, p.m - 1), p.a_stride[0]); }

#if EXPERTS
uvec2 column_of(uvec2 base, uint pair, uint slots, uint stride[2]) {
    uint token = pair / p.used;
    uint slot = pair - token * p.used;
    return row_address(row_address(base, slots == 1 ? 0 : slot, stride[0]), token, stride[1]);
}
uint pair_at(uint n) { return U32(p.pairs).v[min(n, end_n - 1)]; }
#if SORTED
// pack_activations.comp has sorted them.
uvec2 column_of_b(uint n) { return row_address(p.b, min(n, end_n - 1), p.b_stride[0]); }
uint column_number(uint n) { return n; }
#elif SLOTTED
// pack_activations.comp has a factor for each pair.
uint column_number(uint n) { return pair_at(n); }
#elif PREPARED
uint column_number(uint n) {
    uint pair = pair_at(n);
    return p.b_slots == 1 ? pair / p.used : pair;
}
uvec2 column_of_b(uint n) { return row_address(p.b, column_number(n), p.b_stride[0]); }
#else
uvec2 column_of_b(uint n) { return column_of(p.b, pair_at(n), p.b_slots, p.b_stride); }
#endif
uvec2 column_of_d(uint n) { return column_of(p.d, pair_at(n), p.used, p.d_stride); }
uvec2 column_of_residual(uint n) { return column_of(p.residual, pair_at(n), p.used, p.residual_stride); }
#else
#if !FLAT
uvec2 column_of_b(uint n) { return row_address(tile_b, min(n, end_n - 1), p.b_stride[0]); }
#endif
uint column_number(uint n) { return tile_columns + n; }
uvec2 column_of_d(uint n) { return row_address(tile_d, min(n, end_n - 1), p.d_stride[0]); }
uvec2 column_of_residual(uint n) { return row_address(tile_residual, min(n, end_n - 1), p.residual_stride[0]); }
#endif

// What follows the product; m and n lie inside. For prepared activations: finish.glsl.
float finish(float sum, uint m, uint n) {
    sum *= p.scale;
#if BIAS
    sum += F32(tile_bias).v[m];
#endif
#if RESIDUAL
    sum += F32(column_of_residual(n)).v[m];
#endif
    return sum;
}

void put4_f32(uvec2 d, uint m, vec4 v) { F32x4(d).v[m / 4] = v; }
void put4_f16(uvec2 d, uint m, vec4 v) { F16x4(d).v[m / 4] = f16vec4(v); }

#if defined(PUT4_D) && !PREPARED
// The bias of four rows from m on; m lies inside.
vec4 bias_from(uint m) {
    vec4 bias = vec4(0);
#if BIAS
    [[unroll]] for (uint i = 0; i < 4; i++) bias[i] = F32(tile_bias).v[min(m + i, p.m - 1)];
#endif
    return bias;
}

// The sums of four rows of activation vector n from m on become results; m and n lie inside.
void put_four(vec4 sums, vec4 bias, uint m, uint n) {
    sums *= p.scale;
#if BIAS
    sums += bias;
#endif
#if RESIDUAL
    uvec2 residual = column_of_residual(n);
    [[unroll]] for (uint i = 0; i < 4; i++) if (m + i < p.m) sums[i] += F32(residual).v[m + i];
#endif
    uvec2 d = column_of_d(n);
#if VECTORS_D
    if (m + 4 <= p.m) {
        PUT4_D(d, m, sums);
        return;
    }
#endif
    [[unroll]] for (uint i = 0; i < 4; i++) if (m + i < p.m) STORE_D(d, m + i, sums[i]);
}
#endif
