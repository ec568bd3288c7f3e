// One workgroup of WG threads per row of ROW_LENGTH elements, p.cols floats unless the kernel says otherwise: which elements
// are this thread's, and room to keep them. COLS_BOUND (from Rust) is a power of two not below ROW_LENGTH. SHARE(i) runs its
// block for each element i of the thread; where a thread has few elements (HELD 1), held[k] is a register for the element of
// the round.
#ifndef ELEMENT
#define ELEMENT float
#define ROW_LENGTH p.cols
#endif
#define ROUNDS ((COLS_BOUND + WG - 1) / WG)
#if ROUNDS <= 16
#define HELD 1
#define SHARE(i) [[unroll]] for (uint k = 0, i = gl_LocalInvocationID.x; k < ROUNDS; k++, i += WG) if (i < ROW_LENGTH)
ELEMENT held[ROUNDS];
#else
#define HELD 0
#define SHARE(i) for (uint i = gl_LocalInvocationID.x; i < ROW_LENGTH; i += WG)
#endif
