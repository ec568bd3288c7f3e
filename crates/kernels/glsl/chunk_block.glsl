// The scratch memory of a chunk of wkv7, in floats: the transition S x S, the state S x S (key by value; what the chunk
// adds to it at first, what it was before the chunk later), the rows CHUNK x S that take it to y.
#define STATE_AT (S * S)
#define ROWS_AT (2 * S * S)
#define BLOCK (2 * S * S + CHUNK * S)

uvec2 chunk_block(uint chunk, uint head) { return row_address(p.scratch, chunk * p.heads + head, BLOCK * 4); }
