// Which query a workgroup serves, how many tokens it sees, and where they and their keys lie.

uint row_of_column(uint column) { return column / GROUPS; }

// Tokens that are there for a query; 0 where it stands for none.
uint seen_by(uint row) { return uint(max(I32(p.positions).v[row] + 1, 0)); }

uint sequence_of(uint row) {
#if SEQUENCES
    return uint(I32(p.sequences).v[row]);
#elif ONE_SEQUENCE
    return 0;
#else
    return row;
#endif
}

// Row number n of a sequence in a cache whose pages have this many rows.
uint cache_row(uint sequence, uint n, uint page) {
    return uint(I32(p.table).v[sequence * PAGES + n / page]) * page + n % page;
}
