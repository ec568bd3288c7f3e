// Where a team's slices are, and loading them PREFETCH passes ahead of their products.

// Elements of a pass: a slice of each thread. Where they are whole blocks, the addresses of rows go on from pass to pass,
// and the place of a thread's slice stays what it is.
#define PASS (ROW_GROUP * SLICE)
#if SUMMED
#define PASS_BYTES 0
#define PLACE_OF(pass, lane) slice_start(((pass) * ROW_GROUP + (lane)) % (SUMMAND / SLICE))
#elif A_BLOCKS
#if PASS % A_BLOCK == 0
#define PASS_BYTES (PASS / A_BLOCK * A_BLOCK_BYTES)
#define PLACE_OF(pass, lane) slice_start(lane)
#endif
#endif
#if RING && FULL && !A_BLOCKS && !SUMMED
#define PASS_BYTES (PASS * (A_TWO_BYTES == 1 ? 2 : 4))
#define PLACE_OF(pass, lane) slice_start(lane)
#elif RING && !FULL && !SUMMED
// Threads are held at slices of different passes.
#undef PASS_BYTES
#undef PLACE_OF
#endif
#ifndef PASS_BYTES
#define PASS_BYTES 0
#define PLACE_OF(pass, lane) slice_start((pass) * ROW_GROUP + (lane))
#endif

// Whether a thread has a slice in a pass. EVEN: each has one in every pass, and rounds are full, so that no branch keeps the
// compiler from asking for the activations of several slices at once. FULL: all threads have one in the same passes.
#if EVEN
#define INSIDE(pass) true
#elif FULL
#define INSIDE(pass) ((pass) * ROW_GROUP < n)
#else
#define INSIDE(pass) ((pass) * ROW_GROUP + lane < n)
#endif
// Rounds of a row: where they are known when compiled, and few, they are written out, and so are their addresses.
#if RING && INT && STAGED
#define ROUNDS_OF_ROW (((K / SLICE + ROW_GROUP - 1) / ROW_GROUP + PREFETCH - 1) / PREFETCH)
#if ROUNDS_OF_ROW <= 8
#define UNROLLED 1
#endif
#endif

// Where loading is: the unit, its rows and its next round of PREFETCH passes.
uint load_unit, load_round;
void load_from(uint unit) {
    load_unit = unit;
    load_round = 0;
    Place x = place_of(unit);
    uvec2 a = batch_a(x.a);
#if GATE
    uvec2 up = batch_a(p.up);
#endif
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        uint row = min(x.first + r, x.m - 1);
        rows[0][r] = row_address(a, row, p.a_stride);
#if GATE
        rows[1][r] = row_address(up, row, p.a_stride);
#endif
    }
}
// Loads slice f of the next round of every row.
void load_slices(uint f, uint lane, uint n, uint units) {
    uint pass = load_round * PREFETCH + f, ahead = f;
#if !RING
    if (load_unit >= units || !INSIDE(pass)) return;
#elif FULL && defined(UNROLLED)
    // Decided when compiled.
    if (!INSIDE(pass)) return;
#elif FULL && !EVEN
    pass = min(pass, n / ROW_GROUP - 1);
    ahead = pass - load_round * PREFETCH;
#elif !FULL
    // Counted from the row's first slice.
    lane = min(pass * ROW_GROUP + lane, n - 1);
    pass = 0;
#endif
    uint e = PLACE_OF(pass, lane);
#if SUMMED
    uint summand = summed_experts[(pass * ROW_GROUP + lane) / (SUMMAND / SLICE)];
    [[unroll]] for (uint r = 0; r < ROWS; r++) load_slice(row_address(rows[0][r], summand, p.a_expert), e, prefetch[f][0][r]);
#else
    [[unroll]] for (uint m = 0; m < MATS; m++)
        [[unroll]] for (uint r = 0; r < ROWS; r++) load_slice(offset(rows[m][r], ahead * PASS_BYTES), e, prefetch[f][m][r]);
#endif
}
// After all slices of a round: the next round, of the next unit at the end of one.
void next_round(uint rounds, uint units, uint stride) {
#if !RING
    if (load_unit >= units) return;
#endif
    load_round++;
    if (load_round < rounds) {
        [[unroll]] for (uint m = 0; m < MATS; m++)
            [[unroll]] for (uint r = 0; r < ROWS; r++) rows[m][r] = offset(rows[m][r], PREFETCH * PASS_BYTES);
    } else {
#if RING
        load_from(load_unit + stride < units ? load_unit + stride : load_unit);
#else
        if (load_unit + stride < units) load_from(load_unit + stride);
        else load_unit = units;
#endif
    }
}
