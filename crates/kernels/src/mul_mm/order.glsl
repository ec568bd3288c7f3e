// How lanes hold matrices of 16-bit floats whose components they write themselves; `MatrixOrder` has the words for it, and
// ORDER is its number. Matrices are MM x MN x MK in SG lanes.
//
// A product may take the elements of k in any order that both operands keep to. Here it is: pieces of 64 elements, as many
// side by side as a matrix has quads of elements, which together are a chunk; step s of a chunk takes elements 4 s, 4 s + 2,
// 4 s + 1 and 4 s + 3 of each piece, in this order, as the quad of that number. So a lane gets its weights from 64 elements
// that lie together in a row, and bytes of a word become pairs of 16-bit floats with one shift.
//
// A lane has to do with QUADS_OF_LANE quads of the left operand: quad_of(lane) of rows row_of(lane, h).
#if ORDER == 0
// Lane 4 g + q holds quad q of rows (columns) g and g + 8.
#define SG 32
#define MM 16
#define MN 16
#define MK 16
#define QUADS_OF_LANE 2
uint row_of(uint lane, uint h) { return lane / 4 + 8 * h; }
uint quad_of(uint lane) { return lane % 4; }
#define SET_QUAD(A, H, PAIRS)                                                  \
    A[4 * H] = PAIRS[0].x;                                                     \
    A[4 * H + 1] = PAIRS[0].y;                                                 \
    A[4 * H + 2] = PAIRS[1].x;                                                 \
    A[4 * H + 3] = PAIRS[1].y;
#else
// Lane 4 q + j holds element j of quad q of all rows (columns).
#define SG 8
#define MM 8
#define MN 8
#define MK 8
#define QUADS_OF_LANE 8
uint row_of(uint lane, uint h) { return h; }
uint quad_of(uint lane) { return lane / 4; }
#define SET_QUAD(A, H, PAIRS) A[H] = PAIRS[lane % 4 / 2][lane % 2];
#endif
#define QUADS (MK / 4)
#define PIECE 64
#define STEPS (PIECE / 4)
#define CHUNK (QUADS * PIECE)

// Prepared columns: for each chunk, tile of MN columns and step the eight components of each lane. Stores the quad that begins with
// element e (a multiple of 4) of a column.
void store_quad(uvec2 halves, uint column, uint e, uint column_tiles, vec4 v) {
    uint piece = e / PIECE, step = e % PIECE / 4, chunk = piece / QUADS, q = piece % QUADS, c = column % MN;
    uint at = ((chunk * column_tiles + column / MN) * STEPS + step) * SG;
#if ORDER == 0
    U32x2(halves).v[(at + c % 8 * 4 + q) * 2 + c / 8] = uvec2(packHalf2x16(v.xz), packHalf2x16(v.yw));
#else
    F16(halves).v[(at + 4 * q) * 8 + c] = float16_t(v.x);
    F16(halves).v[(at + 4 * q + 1) * 8 + c] = float16_t(v.z);
    F16(halves).v[(at + 4 * q + 2) * 8 + c] = float16_t(v.y);
    F16(halves).v[(at + 4 * q + 3) * 8 + c] = float16_t(v.w);
#endif
}
