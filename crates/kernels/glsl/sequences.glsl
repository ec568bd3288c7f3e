// Where sequences lie among tokens: p.starts holds the first token of each sequence and the end of the last one; where it is no
// address, all sequences have the same length. EQUAL, where it is defined, says that all sequences have the same length, and
// that there is no p.starts.

uint start_of(uint sequence) {
#ifndef EQUAL
    // Numbers that make no sense give a wrong result, never a wild address.
    if (p.starts != uvec2(0)) return min(uint(max(I32(p.starts).v[sequence], 0)), p.tokens);
#endif
    return p.tokens / p.sequences * sequence;
}

uint end_of(uint sequence) { return max(start_of(sequence + 1), start_of(sequence)); }

// The sequence of a token: that whose tokens begin at or before it. The token may lie behind its end, and belong to none.
uint sequence_of(uint token) {
    uint low = 0, high = p.sequences;
    while (high - low > 1) {
        uint middle = (low + high) / 2;
        if (start_of(middle) <= token) low = middle;
        else high = middle;
    }
    return low;
}
