// In which order a subgroup goes through the tiles of keys, and which rows of its matrices each pass is for. Without TOGETHER a pass is a tile.
// With TOGETHER it is a tile of one sequence, or of several that see all of its keys and have them in the same rows of the cache.

#if TOGETHER > 1
struct Pass {
    uint tile;
    // Members of the group that the pass is for, and those that still have to go through the tile.
    uint bits, left;
    // The tile's first row of the cache, and what the first of the members sees.
    uint base, begin, end;
};
uint first_batch;
// Lane m has what member m sees and its row of the cache for the tile at hand and the one after that.
uint my_begin, my_end, my_base, my_next;
// What the members that the lane's rows belong to see.
uint member_of[QUADS_OF_LANE], row_begin[QUADS_OF_LANE], row_end[QUADS_OF_LANE];

uint base_of(uint tile) { return tile * MN < my_end ? cache_row(first_batch + lane, tile * MN) : 0xffffffffu; }

// All keys that any member sees.
uvec2 see(uint token, uint batch) {
    first_batch = batch;
    my_begin = my_end = 0;
    if (lane < TOGETHER && batch + lane < BATCH) {
        uvec2 seen = keys_of(token, batch + lane, length_of(batch + lane));
        my_begin = seen.x;
        my_end = max(seen.x, seen.y);
    }
    uint end = 0;
    [[unroll]] for (uint m = 0; m < TOGETHER; m++) end = max(end, subgroupShuffle(my_end, m));
    return uvec2(0, end);
}

void see_only(uvec2 run) {
    my_begin = max(my_begin, run.x);
    my_end = max(min(my_end, run.y), my_begin);
}

// The next pass through a tile, of some of the members that are left.
Pass pass_of(uint tile, uint left) {
    uint first = uint(findLSB(left));
    bool whole = my_begin <= tile * MN && (tile + 1) * MN <= my_end;
    uint base = subgroupShuffle(my_base, first);
    bool alone = subgroupShuffle(whole ? 1u : 0u, first) == 0u;
    bool with = lane == first || (!alone && whole && my_base == base);
    uint bits = subgroupBallot(with && lane < TOGETHER && (left >> lane & 1u) != 0u).x;
    return Pass(tile, bits, left & ~bits, base, subgroupShuffle(my_begin, first), subgroupShuffle(my_end, first));
}

uint seeing(uint tile) { return subgroupBallot(lane < TOGETHER && tile * MN < my_end && (tile + 1) * MN > my_begin).x; }

Pass none(uint tile) { return Pass(tile, 0, 0, 0, 0, 1); }

Pass first_pass(uint tile, uint tiles) {
    [[unroll]] for (uint r = 0; r < QUADS_OF_LANE; r++) {
        member_of[r] = min(row_of(lane, r) / ROWS, TOGETHER - 1);
        row_begin[r] = subgroupShuffle(my_begin, member_of[r]);
        row_end[r] = subgroupShuffle(my_end, member_of[r]);
    }
    my_base = base_of(tile);
    my_next = base_of(tile + SUBGROUPS);
    if (tile >= tiles) return none(tile);
    return pass_of(tile, seeing(tile));
}

Pass next_pass(Pass at, uint tiles) {
    if (at.left != 0) return pass_of(at.tile, at.left);
    uint tile = at.tile + SUBGROUPS;
    my_base = my_next;
    my_next = base_of(tile + SUBGROUPS);
    if (tile >= tiles) return none(tile);
    return pass_of(tile, seeing(tile));
}

uint batch_of(Pass at) { return first_batch + uint(findLSB(at.bits)); }
bool is_seen(Pass at, uint r, uint key) { return (at.bits >> member_of[r] & 1u) != 0u && key >= row_begin[r] && key < row_end[r]; }

#else
struct Pass { uint tile, base, begin, end; };
uint sequence, only_batch, seen_begin, seen_end;

uvec2 see(uint token, uint batch) {
    only_batch = batch;
    sequence = sequence_of(token, batch);
    uvec2 seen = keys_of(token, batch, length_of(sequence));
    seen_begin = seen.x;
    seen_end = seen.y;
    return seen;
}

void see_only(uvec2 run) {
    seen_begin = run.x;
    seen_end = run.y;
}

Pass pass_of(uint tile) { return Pass(tile, cache_row(sequence, tile * MN), seen_begin, seen_end); }
Pass first_pass(uint tile, uint tiles) {
    Pass none = Pass(tile, 0, 0, 1);
    if (tile < tiles) return pass_of(tile);
    return none;
}
Pass next_pass(Pass at, uint tiles) { return first_pass(at.tile + SUBGROUPS, tiles); }
uint batch_of(Pass at) { return only_batch; }
bool is_seen(Pass at, uint r, uint key) { return key >= at.begin && key < at.end; }
#endif
