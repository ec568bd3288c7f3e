// list_blocks: of each row the cache rows of its blocks, then those of its last tokens, then zeros. A thread for each place of a list.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;

uint sequence_of(uint row) {
#if SEQUENCES
    return uint(I32(p.sequences).v[row]);
#elif ONE_SEQUENCE
    return 0;
#else
    return row;
#endif
}

// Where a token lies that would lie here without blocks; that of a block lies behind its last token.
uint shared_row(uint row) { return row / PAGE * (PAGE + SPARE) + row % PAGE + row % PAGE / BLOCK; }

void main() {
    uint at = group_index() * WG + gl_LocalInvocationID.x;
    uint row = at / ROOM, place = at % ROOM;
    if (row >= p.rows) return;
    uint seen = uint(max(I32(p.positions).v[row] + 1, 0)), table = sequence_of(row) * PAGES;
#if CHOSEN
    uint blocks = uint(I32(p.chosen_counts).v[row]) / BLOCK;
#else
    uint blocks = seen / BLOCK;
#endif
    uint last = min(seen, uint(WINDOW)), result = 0;
    if (place < blocks) {
#if CHOSEN
        result = shared_row(uint(I32(row_address(p.chosen, row, 4 * CHOSEN)).v[place * BLOCK + BLOCK - 1])) + 1;
#else
        uint token = place * BLOCK + BLOCK - 1;
        result = shared_row(uint(I32(p.table).v[table + token / PAGE]) * PAGE + token % PAGE) + 1;
#endif
    } else if (place < blocks + last) {
        uint token = seen - last + place - blocks;
        result = shared_row(uint(I32(p.table).v[table + token / PAGE]) * PAGE + token % PAGE);
    }
    I32(row_address(p.list, row, 4 * ROOM)).v[place] = int(result);
    if (place == 0) I32(p.counts).v[row] = int(blocks + last);
}
