// How lanes hold fragments of 16-bit floats whose components they write themselves; `FragmentLayout` has the words for it, and
// FRAGMENT_LAYOUT is its number. Matrices are MM x MN x MK in SG lanes.
//
// A lane has to do with QUADS_OF_LANE quads of the A fragment: quad_of(lane) of rows row_of(lane, h).
#if FRAGMENT_LAYOUT == 0
// Lane 4 g + q holds quad q of rows (columns) g and g + 8.
#define SG 32
#define MM 16
#define MN 16
#define MK 16
#define QUADS_OF_LANE 2
uint row_of(uint lane, uint h) { return lane / 4 + 8 * h; }
uint quad_of(uint lane) { return lane % 4; }
// The lane whose activations a lane loads if N is smaller than the matrix: results of padding are ignored, and loading another lane's
// activations costs no memory traffic.
uint lane_of_activations(uint lane, uint there) { return lane / 4 < there ? lane : lane % 4; }
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
uint lane_of_activations(uint lane, uint there) { return lane; }
#define SET_QUAD(A, H, PAIRS) A[H] = PAIRS[lane % 4 / 2][lane % 2];
#endif
