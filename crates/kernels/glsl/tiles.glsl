// Products of square tiles of matrices in shared memory. A team of threads has a tile of MM x MM sums of f32: with MATRICES a team is a
// subgroup and the tile a cooperative matrix, whose operands are f16; else it is MM * MM / 16 threads with 4 x 4 sums each, and operands
// are f32. Operands are shared arrays of QUAD; AT and LINE, the distance of rows, count quads. TEAMS is the number of teams.
//
// TIMES             sum[i][j] += sum over k < K of a[i][k] b[k][j]
// TIMES_TRANSPOSED  sum[i][j] += sum over k < K of a[i][k] b[j][k]
// TRANSPOSED_TIMES  sum[i][j] += sum over k < K of a[k][i] b[k][j]
#if MATRICES
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_arithmetic : require

#define NUMBER float16_t
#define QUAD f16vec4
// Two more quads in each row keep rows in different banks.
#define LINE_OF(N) ((N) / 4 + 2)
#define TEAMS (WG / SG)
#define TILE coopmat<float, gl_ScopeSubgroup, MM, MM, gl_MatrixUseAccumulator>
#define TILE_OF_HALVES coopmat<float16_t, gl_ScopeSubgroup, MM, MM, gl_MatrixUseAccumulator>
#define TILE_LEFT coopmat<float16_t, gl_ScopeSubgroup, MM, MM, gl_MatrixUseA>
#define TILE_RIGHT coopmat<float16_t, gl_ScopeSubgroup, MM, MM, gl_MatrixUseB>
#define BY_ROWS gl_CooperativeMatrixLayoutRowMajor
#define BY_COLUMNS gl_CooperativeMatrixLayoutColumnMajor

uint thread_number() { return gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID; }
uint team_number() { return gl_SubgroupID; }

#define TILE_CLEAR(T) T = TILE(0.0);
#define TILE_SCALE(T, FACTOR) T = T * (FACTOR);
// By a factor for each column: quads of f32, the same in all MM rows.
#define TILE_SCALE_COLUMNS(T, FROM, AT, LINE)                                                   \
    {                                                                                           \
        TILE factors;                                                                           \
        coopMatLoad(factors, FROM, AT, LINE, BY_ROWS);                                          \
        T = T * factors;                                                                        \
    }
// From or to quads of f32, in shared memory or elsewhere.
#define TILE_LOAD(T, FROM, AT, LINE) coopMatLoad(T, FROM, AT, LINE, BY_ROWS);
#define TILE_STORE(T, TO, AT, LINE) coopMatStore(T, TO, AT, LINE, BY_ROWS);
// To an operand.
#define TILE_STORE_QUADS(T, TO, AT, LINE)                                                       \
    {                                                                                           \
        TILE_OF_HALVES halves = TILE_OF_HALVES(T);                                              \
        coopMatStore(halves, TO, AT, LINE, BY_ROWS);                                            \
    }
#define TILE_MOST(T, MOST) [[unroll]] for (uint i = 0; i < (T).length(); i++) MOST = max(MOST, abs((T)[i]));

#define TIMES(SUM, A, A_AT, A_LINE, B, B_AT, B_LINE, K)                                         \
    STEP_LOOP for (uint k = 0; k < (K); k += MM) {                                              \
        TILE_LEFT left;                                                                         \
        TILE_RIGHT right;                                                                       \
        coopMatLoad(left, A, (A_AT) + k / 4, A_LINE, BY_ROWS);                                  \
        coopMatLoad(right, B, (B_AT) + k * (B_LINE), B_LINE, BY_ROWS);                          \
        SUM = coopMatMulAdd(left, right, SUM);                                                  \
    }
#define TIMES_TRANSPOSED(SUM, A, A_AT, A_LINE, B, B_AT, B_LINE, K)                              \
    STEP_LOOP for (uint k = 0; k < (K); k += MM) {                                              \
        TILE_LEFT left;                                                                         \
        TILE_RIGHT right;                                                                       \
        coopMatLoad(left, A, (A_AT) + k / 4, A_LINE, BY_ROWS);                                  \
        coopMatLoad(right, B, (B_AT) + k / 4, B_LINE, BY_COLUMNS);                              \
        SUM = coopMatMulAdd(left, right, SUM);                                                  \
    }
#define TRANSPOSED_TIMES(SUM, A, A_AT, A_LINE, B, B_AT, B_LINE, K)                              \
    STEP_LOOP for (uint k = 0; k < (K); k += MM) {                                              \
        TILE_LEFT left;                                                                         \
        TILE_RIGHT right;                                                                       \
        coopMatLoad(left, A, (A_AT) + k * (A_LINE), A_LINE, BY_COLUMNS);                        \
        coopMatLoad(right, B, (B_AT) + k * (B_LINE), B_LINE, BY_ROWS);                          \
        SUM = coopMatMulAdd(left, right, SUM);                                                  \
    }
#else
#define NUMBER float
#define QUAD vec4
#define LINE_OF(N) ((N) / 4 + 1)
#define SIDE (MM / 4)
#define TEAMS (WG / (SIDE * SIDE))
#define TILE vec4[4]

uint thread_number() { return gl_LocalInvocationID.x; }
uint team_number() { return gl_LocalInvocationID.x / (SIDE * SIDE); }
// The first of a thread's four rows, and the quad of its columns.
uint tile_row() { return gl_LocalInvocationID.x / SIDE % SIDE * 4; }
uint tile_quad() { return gl_LocalInvocationID.x % SIDE; }

#define TILE_CLEAR(T) [[unroll]] for (uint i = 0; i < 4; i++) T[i] = vec4(0);
#define TILE_SCALE(T, FACTOR) [[unroll]] for (uint i = 0; i < 4; i++) T[i] *= FACTOR;
#define TILE_SCALE_COLUMNS(T, FROM, AT, LINE)                                                   \
    [[unroll]] for (uint i = 0; i < 4; i++) T[i] *= FROM[(AT) + tile_quad()];
#define TILE_LOAD(T, FROM, AT, LINE)                                                            \
    [[unroll]] for (uint i = 0; i < 4; i++) T[i] = FROM[(AT) + (tile_row() + i) * (LINE) + tile_quad()];
#define TILE_STORE(T, TO, AT, LINE)                                                             \
    [[unroll]] for (uint i = 0; i < 4; i++) TO[(AT) + (tile_row() + i) * (LINE) + tile_quad()] = T[i];
#define TILE_STORE_QUADS(T, TO, AT, LINE) TILE_STORE(T, TO, AT, LINE)

#define TIMES(SUM, A, A_AT, A_LINE, B, B_AT, B_LINE, K)                                         \
    for (uint k = 0; k < (K) / 4; k++) {                                                        \
        vec4 left[4], right[4];                                                                 \
        [[unroll]] for (uint i = 0; i < 4; i++) {                                               \
            left[i] = A[(A_AT) + (tile_row() + i) * (A_LINE) + k];                              \
            right[i] = B[(B_AT) + (4 * k + i) * (B_LINE) + tile_quad()];                        \
        }                                                                                       \
        [[unroll]] for (uint e = 0; e < 4; e++) {                                               \
            [[unroll]] for (uint i = 0; i < 4; i++) SUM[i] = fma(vec4(left[i][e]), right[e], SUM[i]); \
        }                                                                                       \
    }
#define TIMES_TRANSPOSED(SUM, A, A_AT, A_LINE, B, B_AT, B_LINE, K)                              \
    for (uint k = 0; k < (K) / 4; k++) {                                                        \
        vec4 left[4], right[4];                                                                 \
        [[unroll]] for (uint i = 0; i < 4; i++) {                                               \
            left[i] = A[(A_AT) + (tile_row() + i) * (A_LINE) + k];                              \
            right[i] = B[(B_AT) + (4 * tile_quad() + i) * (B_LINE) + k];                        \
        }                                                                                       \
        [[unroll]] for (uint e = 0; e < 4; e++) {                                               \
            vec4 column = vec4(right[0][e], right[1][e], right[2][e], right[3][e]);             \
            [[unroll]] for (uint i = 0; i < 4; i++) SUM[i] = fma(vec4(left[i][e]), column, SUM[i]); \
        }                                                                                       \
    }
#define TRANSPOSED_TIMES(SUM, A, A_AT, A_LINE, B, B_AT, B_LINE, K)                              \
    for (uint k = 0; k < (K); k++) {                                                            \
        vec4 left = A[(A_AT) + k * (A_LINE) + tile_row() / 4];                                  \
        vec4 right = B[(B_AT) + k * (B_LINE) + tile_quad()];                                    \
        [[unroll]] for (uint i = 0; i < 4; i++) SUM[i] = fma(vec4(left[i]), right, SUM[i]);     \
    }
#endif

// The block of row and of column of lower block number n of a matrix: 0, 0; 1, 0; 1, 1; 2, 0; ...
uvec2 lower_block(uint n) {
    uint row = 0;
    while (n > row) n -= ++row;
    return uvec2(row, n);
}

// Largest magnitudes of what becomes operands, as bits, and the powers of two that take them into the range of f16.
#define TOPS 4
shared uint tops[TOPS];

void raise_top(uint which, float most) {
#if MATRICES
    // Bits of numbers that are not negative are in the order of the numbers.
    uint bits = subgroupMax(floatBitsToUint(most));
    if (gl_SubgroupInvocationID == 0) atomicMax(tops[which], bits);
#endif
}

// The sum of the first `count` numbers of LENGTH in shared memory, in this order. All are read, so that no read waits for another.
#define SUM_OF_FIRST(SUM, FROM, LENGTH, COUNT)                                                  \
    {                                                                                           \
        precise float sum = 0;                                                                  \
        [[unroll]] for (uint i = 0; i < (LENGTH); i++) sum += i < (COUNT) ? FROM[i] : 0.0;      \
        SUM = sum;                                                                              \
    }

float largest(vec4 x) {
    x = abs(x);
    return max(max(x.x, x.y), max(x.z, x.w));
}

// The power of two that takes operands of 2^-30 to 2^33 below 2^exponent; its inverse is one as well. Operands of f32 stay as they are.
float scale_below(int exponent, uint which) {
#if MATRICES
    int e = clamp(int(tops[which] >> 23), 96, 160);
    return uintBitsToFloat(uint(126 + exponent + 127 - e) << 23);
#else
    return 1.0;
#endif
}
