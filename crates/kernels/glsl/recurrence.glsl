// Where the sequences of a recurrence, their chunks and their states lie. CHUNK, where it is defined, is the number of tokens of a
// chunk: every sequence is cut from its own start, so its neighbours do not change its result.
#include "quads.glsl"
#include "sequences.glsl"

#ifdef CHUNK
// The number of a sequence's first chunk. Sequences never share a number, and some numbers stand for no chunk: this
// way the place of a chunk in scratch memory follows from its sequence alone.
uint first_chunk(uint sequence) { return start_of(sequence) / CHUNK + sequence; }

// The sequence of a chunk.
uint chunk_sequence(uint chunk) {
    uint low = 0, high = p.sequences;
    while (high - low > 1) {
        uint middle = (low + high) / 2;
        if (first_chunk(middle) <= chunk) low = middle;
        else high = middle;
    }
    return low;
}

// The tokens [x, y) of a chunk of this sequence; none for numbers that stand for no chunk.
uvec2 chunk_tokens(uint chunk, uint sequence) {
    uint end = end_of(sequence);
    uint from = first_chunk(sequence);
    uint first = chunk < from ? end : min(start_of(sequence) + (chunk - from) * CHUNK, end);
    return uvec2(first, min(first + CHUNK, end));
}

uvec2 chunk_tokens(uint chunk) { return chunk_tokens(chunk, chunk_sequence(chunk)); }
#endif

// The address of the S elements of one head of one token.
uvec2 head_of(uvec2 base, uint token, uint head) {
    return offset(row_address(base, token, p.heads * S * 4), head * S * 4);
}

// The address of the S x S state of one head of one sequence; sequences lie `stride` elements apart.
uvec2 state_of(uvec2 base, uint sequence, uint stride, uint head) {
    return row_address(row_address(base, sequence, stride * 4), head, S * S * 4);
}

// Where the states of a sequence lie before its first token and after its last. With SLOTS, p.state_out holds the slot of each
// sequence among the p.out_stride states of p.state_in, which are updated in place; a sequence of padding has none.
#if SLOTS
bool has_state(uint sequence) { return U32(p.state_out).v[sequence] < p.out_stride; }
uvec2 state_before(uint sequence, uint head) { return state_of(p.state_in, U32(p.state_out).v[sequence], p.in_stride, head); }
uvec2 state_after(uint sequence, uint head) { return state_before(sequence, head); }
#else
bool has_state(uint sequence) { return true; }
uvec2 state_before(uint sequence, uint head) { return state_of(p.state_in, sequence, p.in_stride, head); }
uvec2 state_after(uint sequence, uint head) { return state_of(p.state_out, sequence, p.out_stride, head); }
#endif

// Four elements of a token's head, `nothing` for tokens past the end.
vec4 load4(uvec2 base, uint token, uint end, uint head, uint quad, float nothing) {
    return token < end ? F32x4(head_of(base, token, head)).v[quad] : vec4(nothing);
}
