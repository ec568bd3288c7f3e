// How lanes hold matrices of 16-bit floats whose components they write themselves; `MatrixOrder` has the words for it, and
// ORDER is its number. Matrices are MM x MN x MK in SG lanes.
//
// A product may take the elements of k in any order that both operands keep to. Here it is: pieces of PIECE elements, as many
// side by side as a matrix has quads of elements; step s of them takes elements 4 s, 4 s + 2, 4 s + 1 and 4 s + 3 of each
// piece, in this order, as the quad of that number. So a lane gets its weights from elements that lie together in a row, and
// bytes of a word become pairs of 16-bit floats with one shift. A chunk of k is STEPS steps.
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
#define STEPS 16
#define CHUNK (4 * STEPS * QUADS)

// Prepared columns: for each tile of MN columns, chunk and step the eight components of each lane. Chunks of a column are counted up to
// a multiple of 256 elements of k.
uint chunks_of(uint k) { return (k + 255) / 256 * (256 / CHUNK); }
// Stores the quad that begins with element e (a multiple of 4) of a column.
void store_quad(uvec2 halves, uint column, uint e, uint k, vec4 v) {
    uint piece = e / PIECE, q = piece % QUADS, c = column % MN, chunk = e / CHUNK;
    uint step = e % CHUNK / (QUADS * PIECE) * (PIECE / 4) + e % PIECE / 4;
    uint at = ((column / MN * chunks_of(k) + chunk) * STEPS + step) * SG;
#if ORDER == 0
    U32x2(halves).v[(at + c % 8 * 4 + q) * 2 + c / 8] = uvec2(packHalf2x16(v.xz), packHalf2x16(v.yw));
#else
    F16(halves).v[(at + 4 * q) * 8 + c] = float16_t(v.x);
    F16(halves).v[(at + 4 * q + 1) * 8 + c] = float16_t(v.z);
    F16(halves).v[(at + 4 * q + 2) * 8 + c] = float16_t(v.y);
    F16(halves).v[(at + 4 * q + 3) * 8 + c] = float16_t(v.w);
#endif
}
