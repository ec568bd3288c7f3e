// mul_mm on matrix units for small N: d[m, n] = scale * sum_k a[k, m] * b[k, n] (+ bias) (+ residual)
// a: F16, BF16 or blocks of any format; b: 16-bit activations from pack_activations.comp in the order of matrices (order.glsl); d: F32 or F16.
// Lanes decode weights in registers and write them to the components of matrices themselves: nothing goes through shared
// memory, and no subgroup waits for another before its sums are complete. With EXPERTS, tiles of activations are those of a list.
// A workgroup computes ROW_TILES x COLUMN_TILES matrices. SPLIT_K subgroups share the chunks of k of a row of them, each one takes every
// SPLIT_K-th, with PREFETCH more units of weights on their way than it works on. Their sums are added in order, through shared memory, at the
// end. Rows of matrices have subgroups of their own, which find activations in the core's cache that others have just loaded.
// GATED: d = GATE(a b) * (up b). A workgroup goes through the rows of a, keeps their sums, then through those of up, whose first weights are on
// their way by then. EMIT_PACKED_B: d is left as matrix units take it besides (../packed_b.rs), with factors by the magnitudes of SCALE_HINTS tiles of
// an earlier step. Where a norm follows (SUMS), what is left was multiplied by its weights (EMIT_WEIGHT, which lie where up would), and the squares
// of d are added up. MAGNITUDE_PROBES: magnitudes of this many tiles, every PROBES_APART-th, are left for a later one.
#version 450
#if !EXPERTS
// The first weights are fetched before the kernel waits for what makes the activations.
#define GRID_WAIT_LATE 1
#endif
#include "kiln.glsl"
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#if !HALF
#extension GL_EXT_bfloat16 : require
#endif

#include "mul_mm/fragment_order.glsl"
#define WG (SG * SPLIT_K * ROW_TILES)
layout(local_size_x = WG) in;
#define TILE_M (MM * ROW_TILES)
#define TILE_N (MN * COLUMN_TILES)
#include "formats.glsl"
#include "mul_mm/place.glsl"
#define STORE_TENSOR 0
#if OVERFLOW
// The predicted scale was wrong: what is computed from here on is, too, and the caller has to know.
void overflow() { atomicOr(U32(p.overflow).v[0], 1u); }
// Whether one of these is beyond an f16, infinite or no number.
bool is_beyond(vec4 x) {
    return any(greaterThan(floatBitsToUint(x) & 0x7fffffffu, uvec4(floatBitsToUint(65504.0))));
}
#endif
#include "mul_mm/finish.glsl"

shared vec4 subgroup_sums[ROW_TILES * SPLIT_K * MM * MN / 4];
#if GATED
#include "activations.glsl"
shared vec4 gate_sums[COLUMN_TILES * MM * MN / 4];
#endif
#if EMIT_PACKED_B
shared float emit_inverse[TILE_N];
#endif
#if MAGNITUDE_PROBES
shared float magnitudes[MM * MN / 4];
#endif
#if SUMS && EMIT_PACKED_B
shared float squares[MM * MN / 4];
#endif

// Two elements of a matrix: halves, or bfloat16 beside such weights.
#if HALF
#define ELEMENT float16_t
#define Pair f16vec2
Pair pair_of(uint bits) { return unpackFloat2x16(bits); }
#else
#define ELEMENT bfloat16_t
#define Pair bf16vec2
Pair pair_of(uint bits) { return uintBitsToBFloat16EXT(unpack16(bits)); }
#endif
#define MATRIX_A coopmat<ELEMENT, gl_ScopeSubgroup, MM, MK, gl_MatrixUseA>
#define MATRIX_B coopmat<ELEMENT, gl_ScopeSubgroup, MK, MN, gl_MatrixUseB>
#define MATRIX_C coopmat<float, gl_ScopeSubgroup, MM, MN, gl_MatrixUseAccumulator>

// What is fetched at once of a row: UNIT elements, as their words lie where the format keeps loading and unfolding apart.
#if A_BLOCKS && A_PIECE
#define UNIT (32 * A_PIECE)
#define Words A_PIECE_TYPE
Words fetch(uvec2 row, uint e) { return A_FETCH(row, e); }
#elif A_BLOCKS
#define UNIT 32
struct Words { uint codes[8]; vec2 lo, hi; };
Words fetch(uvec2 row, uint e) {
    Words x;
    A_GROUP32(row, e, x.codes, x.lo, x.hi);
    return x;
}
#else
#define UNIT 32
// Sixteen bytes of PIECE elements, from four pieces.
struct Words { uvec4 w[4]; };
Words fetch(uvec2 row, uint e) {
    Words x;
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uint at = e + i * QUADS * PIECE;
        x.w[i] = U32x4(row).v[(at < p.k ? at : 0) / 8];
    }
    return x;
}
#endif
#define UNITS (4 * STEPS / UNIT)
// Steps of a group: elements that are unfolded at once.
#define GROUP_STEPS 8
// Steps whose activations are loaded at once.
#if COLUMN_TILES == 2 && SG == 32
#define COLUMNS_AT_ONCE 4
#else
#define COLUMNS_AT_ONCE 1
#endif
// Where the activations of a tile lie is known by an address for each tile, or by OFFSETS, which take fewer registers and more instructions.
#if OFFSETS
#define COLUMN(J, STEP) U32x4(p.b).v[columns[J] + of_unit + (STEP) * SG]
#else
#define COLUMN(J, STEP) U32x4(of_unit[J]).v[(STEP) * SG]
#endif
#define LOAD_COLUMNS(INTO, STEP)                                               \
    [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) loaded[INTO][j] = COLUMN(j, STEP);

// LOP3 takes one immediate; OR-ing `p.k >> 31` (always 0) hides the second constant, so that the compiler emits one instruction per pair.
uint exponents;
#define EXPONENTS(BITS) exponents = (BITS) | p.k >> 31;

#if A_BLOCKS
// value = (code - CENTRE) * scale + minimum. Codes become the mantissas of halves from 1024 on, which is exact. Where values
// have a minimum it is taken at the middle of the codes: there it is small, and its rounding with it.
#if A_HAS_MIN
#define CENTRE A_MIDDLE
#elif A_PIECE && A_BIAS
#define CENTRE A_BIAS
#else
#define CENTRE 128
#define SIGNED 1
#endif
#if A_PARTS
// Scales that are whole numbers multiply codes without any rounding, which leaves that of the value itself. Codes of four bits
// become the upper bits of mantissas: 16 + code and its product with a scale below 64 both fit a half. Those of five bits must
// lose the 1024 first.
struct Group { uint codes[8]; f16vec2 scale, less, factor, least; };
Group unfold(Words x, uint e, uint j) {
    Group g;
    vec4 parts = A_PARTS_OF(x, e, float(CENTRE));
    // Of both groups, a half each: all arithmetic in pairs.
    f16vec2 whole = unpackFloat2x16(packHalf2x16(parts.xy)), least = unpackFloat2x16(packHalf2x16(parts.zw));
    // As halves of their own: a compiler that sees less as a multiple of scale takes three instructions for a value instead of two.
    f16vec2 scale = CENTRE == 8 ? unpackFloat2x16(packHalf2x16(parts.xy * 16.0)) : whole, less = unpackFloat2x16(packHalf2x16(parts.xy * -24.0));
    g.scale = j == 0 ? scale.xx : scale.yy;
    g.less = j == 0 ? less.xx : less.yy;
    g.least = j == 0 ? least.xx : least.yy;
    g.factor = unpackFloat2x16(A_FACTOR(x)).xx;
#if CENTRE == 8
    [[unroll]] for (uint i = 0; i < 8; i++) g.codes[i] = A_NIBBLES(x, i);
#else
    vec2 unused[2];
    A_UNFOLD(x, e, j, g.codes, unused[0], unused[1]);
#endif
    return g;
}
#if CENTRE == 8
f16vec2 values(uint mantissas, Group g) {
    return fma(fma(unpackFloat2x16((mantissas & 0x03c003c0u) | exponents), g.scale, g.less), g.factor, g.least);
}
f16vec2[2] quad(Group g, uint j, uint s) {
    uint x = g.codes[s];
    return j == 0 ? f16vec2[2](values(x << 6, g), values(x >> 2, g)) : f16vec2[2](values(x << 2, g), values(x >> 6, g));
}
#else
f16vec2 values(uint pair, Group g) {
    f16vec2 code = unpackFloat2x16((pair & 0x00ff00ffu) | exponents) - f16vec2(float16_t(1024 + CENTRE));
    return fma(code * g.scale, g.factor, g.least);
}
f16vec2[2] quad(Group g, uint j, uint s) { return f16vec2[2](values(g.codes[s], g), values(g.codes[s] >> 8, g)); }
#endif
#else
struct Group { uint codes[8]; f16vec2 scale[2], least[2]; };
Group unfold(Words x, uint e, uint j) {
    Group g;
    vec2 s[2];
#if A_PIECE
    A_UNFOLD(x, e, j, g.codes, s[0], s[1]);
#else
    g.codes = x.codes;
    s[0] = x.lo;
    s[1] = x.hi;
#endif
    [[unroll]] for (uint i = 0; i < 2; i++) {
        g.scale[i] = f16vec2(vec2(s[i].x));
        g.least[i] = f16vec2(vec2(A_HAS_MIN != 0 ? s[i].y + float(CENTRE) * s[i].x : 0.0));
    }
    return g;
}
f16vec2 values(uint pair, f16vec2 scale, f16vec2 least) {
    f16vec2 v = unpackFloat2x16((pair & 0x00ff00ffu) | exponents) - f16vec2(float16_t(1024 + CENTRE));
#if A_HAS_MIN
    return fma(v, scale, least);
#else
    return v * scale;
#endif
}
// The quad of step s of a group, as two pairs.
f16vec2[2] quad(Group g, uint j, uint s) {
    uint code = g.codes[s];
#if SIGNED
    code ^= 0x80808080u;
#endif
    return f16vec2[2](values(code, g.scale[s / 4], g.least[s / 4]), values(code >> 8, g.scale[s / 4], g.least[s / 4]));
}
#endif
#else
#define Group Words
Group unfold(Words x, uint e, uint j) { return x; }
Pair[2] quad(Group g, uint j, uint s) {
    uint low = g.w[s / 2][s % 2 * 2], high = g.w[s / 2][s % 2 * 2 + 1];
    return Pair[2](pair_of((low & 0xffffu) | high << 16), pair_of(low >> 16 | (high & 0xffff0000u)));
}
#endif

uint lane, units, number;
uvec2 rows[QUADS_OF_LANE];
uint chunk_of(uint u) { return number + u / UNITS * SPLIT_K; }
// The first element of unit u of this subgroup for this lane; the last chunk may reach past the end, where the activations are zeros:
// any weights will do there.
uint element(uint u) {
    uint e = chunk_of(u) * CHUNK + u % UNITS * (UNIT < PIECE ? UNIT : UNIT * QUADS) + quad_of(lane) * PIECE;
    return e < p.k ? e : 0;
}
// The same as unfold wants it. Formats with parts look at its place in a block of 256 alone, which is the same for every chunk; that, too,
// is fewer registers for some numbers of tiles, and slower for others.
#if A_PARTS && OFFSETS
uint unfolded(uint u) { return chunk_of(u) * CHUNK % 256 + u % UNITS * (UNIT * QUADS) + quad_of(lane) * PIECE; }
#else
uint unfolded(uint u) { return element(u); }
#endif
// Past the last unit of a come those of up; past the last of all that one again, which is not used.
#if GATED
uvec2 up_rows[QUADS_OF_LANE];
#define FETCH(INTO, U)                                                         \
    {                                                                          \
        bool of_up = which == 1 || (U) >= units;                               \
        uint unit = min(which == 0 && of_up ? (U) - units : (U), units - 1);   \
        STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++)                     \
            INTO[h] = fetch(of_up ? up_rows[h] : rows[h], element(unit));      \
    }
#else
#define FETCH(INTO, U)                                                         \
    STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) INTO[h] = fetch(rows[h], element(min(U, units - 1)));
#endif

#if EMIT_PACKED_B
// The factors of the results' activations: powers of two by the magnitudes of an earlier step, as `factor` of ../packed_b.rs has them.
void choose_factors() {
    for (uint i = gl_LocalInvocationID.x; i < TILE_N; i += WG) {
        uint n = min(first_n + i, end_n - 1);
        float sums[SCALE_HINTS], sum = 0, middle = 0;
        [[unroll]] for (uint s = 0; s < SCALE_HINTS; s++) {
            sums[s] = F32(p.scale_hint).v[s * p.n + n];
            sum += sums[s];
        }
        // The sum that as many are below as above: a tile with an element that is far larger than all others does not count.
        [[unroll]] for (uint s = 0; s < SCALE_HINTS; s++) {
            uint below = 0;
            [[unroll]] for (uint t = 0; t < SCALE_HINTS; t++) if (sums[t] < sums[s] || (sums[t] == sums[s] && t < s)) below++;
            if (below == (SCALE_HINTS - 1) / 2) middle = sums[s];
        }
        uint exponent = floatBitsToUint((middle > 0 ? middle : sum / float(SCALE_HINTS)) / float(SCALE_HINT_ROWS)) >> 23;
        if (exponent == 0 || exponent + EMIT_ABOVE > 253) exponent = 127 - EMIT_ABOVE;
        emit_inverse[i] = uintBitsToFloat((254 - EMIT_ABOVE - exponent) << 23);
        if (first_m == 0) F32(p.emit_factors).v[n] = uintBitsToFloat((exponent + EMIT_ABOVE) << 23);
    }
}
#endif

// Four results of an activation vector from this row of the tile on, which are number `at` of their matrix, go where they are wanted.
#if GATED || EMIT_PACKED_B || MAGNITUDE_PROBES
void leave(uint at, uint row, uint column, vec4 x) {
    uint m = first_m + row;
    [[unroll]] for (uint i = 0; i < 4; i++) if (m + i >= p.m) x[i] = 0;
#if MAGNITUDE_PROBES
    magnitudes[at] = abs(x.x) + abs(x.y) + abs(x.z) + abs(x.w);
#endif
#if SUMS && EMIT_PACKED_B
    vec4 divided = x * emit_inverse[column];
    squares[at] = dot(divided, divided);
#endif
    if (m >= p.m || first_n + column >= end_n) return;
#if VECTORS_D
    if (m + 4 <= p.m)
        PUT4_D(column_d[column], m, x);
    else
#endif
        [[unroll]] for (uint i = 0; i < 4; i++) if (m + i < p.m) STORE_D(column_d[column], m + i, x[i]);
#if EMIT_PACKED_B
#if EMIT_WEIGHT
    x *= F32x4(p.up).v[m / 4];
#endif
    x *= emit_inverse[column];
    if (is_beyond(x)) overflow();
    store_quad(EMIT_PIECE, p.halves, first_n + column, p.n, m, p.m, clamp(x, -65504.0, 65504.0));
#endif
}

// What all tiles of rows together leave of the activations of a tile, behind a barrier. Every tile of activations has another before it leaves anything again.
void leave_sums(uint j) {
    uint c = gl_LocalInvocationID.x, n = first_n + j * MN + c, tile = first_m / TILE_M;
    if (c >= MN || n >= end_n) return;
#if MAGNITUDE_PROBES
    if (tile % PROBES_APART == 0) {
        float sum = 0;
        [[unroll]] for (uint i = 0; i < MM / 4; i++) sum += magnitudes[c * (MM / 4) + i];
        F32(p.magnitude_probe).v[tile / PROBES_APART * p.n + n] = sum;
    }
#endif
#if SUMS && EMIT_PACKED_B
    float sum = 0;
    [[unroll]] for (uint i = 0; i < MM / 4; i++) sum += squares[c * (MM / 4) + i];
    // A number that is no number fails every comparison.
    if (!(sum < MOST_SQUARES)) {
        overflow();
        sum = MOST_SQUARES;
    }
    // A 64-bit number with FRACTION bits behind the point: 28 in front of it, and 4 of the high word and 32 of the low one behind.
    float part = fract(sum) * 16.0;
    uint high = uint(sum) << 4 | uint(part), low = uint(fract(part) * 4294967296.0);
    if (sum > 0 && high == 0 && low == 0) low = 1;
    uint before = atomicAdd(U32(p.squares).v[n], low, gl_ScopeQueueFamily, 0, 0);
    high += uint(before > ~low);
    before = high > 0 ? atomicAdd(U32(p.squares).v[p.n + n], high, gl_ScopeQueueFamily, 0, 0) : 0;
    if (before > ~high) overflow();
#endif
#if SUMS
    // The sums of the next step.
    if (tile == 0) {
        U32(p.squares).v[2 * p.n + n] = 0;
        U32(p.squares).v[3 * p.n + n] = 0;
    }
#endif
}
#endif

void main() {
    A_INIT();
#if A_BLOCKS && A_PARTS && CENTRE == 8
    EXPONENTS(0x3c003c00u)
#else
    EXPONENTS(0x64006400u)
#endif
    if (!find_tile()) return;
    lane = gl_SubgroupInvocationID;
    number = gl_SubgroupID % SPLIT_K;
    uint first_row = gl_SubgroupID / SPLIT_K * MM;
    STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) rows[h] = row_of_a(first_m + first_row + row_of(lane, h));
#if GATED
    STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++)
        up_rows[h] = row_address(p.up, min(first_m + row_of(lane, h), p.m - 1), p.a_stride[0]);
    uint which = 0;
#endif
    uint chunks = (p.k + CHUNK - 1) / CHUNK;
    units = number < chunks ? (chunks - number + SPLIT_K - 1) / SPLIT_K * UNITS : 0;
    Words words[PREFETCH + 1][QUADS_OF_LANE];
    [[unroll]] for (uint u = 0; u < PREFETCH; u++) { FETCH(words[u], u) }
#if !EXPERTS
    grid_wait();
#endif
    prepare_finish();
#if EMIT_PACKED_B
    choose_factors();
#endif
    // Where the activations of each tile begin for this lane.
    uint columns[COLUMN_TILES];
    [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) {
#if EXPERTS
        uint tile = tile_number * COLUMN_TILES + j, there = max(end_n, first_n + j * MN) - (first_n + j * MN);
#else
        uint tile = min(first_n / MN + j, (end_n - 1) / MN), there = end_n - tile * MN;
#endif
        columns[j] = tile * chunks_of(p.k) * STEPS * SG + lane_of_activations(lane, there);
    }
#if GATED
    [[dont_unroll]] for (; which < 2; which++) {
#endif
    MATRIX_C sum[COLUMN_TILES];
    [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) sum[j] = MATRIX_C(0.0);
    for (uint u = 0; u < units; u++) {
        FETCH(words[PREFETCH], u + PREFETCH)
#if OFFSETS
        uint of_unit = (chunk_of(u) * STEPS + u % UNITS * (UNIT / 4)) * SG;
#else
        uvec2 of_unit[COLUMN_TILES];
        [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++)
            of_unit[j] = row_address(p.b, columns[j] + (chunk_of(u) * STEPS + u % UNITS * (UNIT / 4)) * SG, 16);
#endif
        uvec4 loaded[COLUMNS_AT_ONCE][COLUMN_TILES];
        [[unroll]] for (uint g = 0; g < UNIT / (4 * GROUP_STEPS); g++) {
            Group groups[QUADS_OF_LANE];
            STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) groups[h] = unfold(words[0][h], unfolded(u), g);
            STEP_LOOP for (uint s = 0; s < GROUP_STEPS; s++) {
#if COLUMNS_AT_ONCE > 1
                if (s % COLUMNS_AT_ONCE == 0)
                    [[unroll]] for (uint t = 0; t < COLUMNS_AT_ONCE; t++) { LOAD_COLUMNS(t, g * GROUP_STEPS + s + t) }
#endif
                MATRIX_A a;
                STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) {
                    Pair pairs[2] = quad(groups[h], g, s);
                    SET_QUAD(a, h, pairs)
                }
#if COLUMNS_AT_ONCE == 1
                LOAD_COLUMNS(0, g * GROUP_STEPS + s)
#endif
                [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) {
                    MATRIX_B b;
                    [[unroll]] for (uint e = 0; e < 4; e++) {
                        Pair pair = pair_of(loaded[s % COLUMNS_AT_ONCE][j][e]);
                        b[2 * e] = pair.x;
                        b[2 * e + 1] = pair.y;
                    }
                    sum[j] = coopMatMulAdd(a, b, sum[j]);
                }
            }
        }
        [[unroll]] for (uint w = 0; w < PREFETCH; w++) words[w] = words[w + 1];
    }

    [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) {
        coopMatStore(sum[j], subgroup_sums, gl_SubgroupID * (MM * MN / 4), MM / 4, gl_CooperativeMatrixLayoutColumnMajor);
        barrier();
        for (uint at = gl_LocalInvocationID.x; at < ROW_TILES * MM * MN / 4; at += WG) {
            uint tile = at / (MM * MN / 4), in_tile = at % (MM * MN / 4), first = tile * SPLIT_K * (MM * MN / 4) + in_tile;
            uint row = tile * MM + in_tile % (MM / 4) * 4, column = j * MN + in_tile / (MM / 4);
            vec4 all = subgroup_sums[first];
            [[unroll]] for (uint w = 1; w < SPLIT_K; w++) all += subgroup_sums[w * (MM * MN / 4) + first];
#if GATED
            if (which == 0) {
                gate_sums[j * (MM * MN / 4) + at] = all;
                continue;
            }
            vec4 gate = gate_sums[j * (MM * MN / 4) + at] * column_scale[column];
            leave(at, row, column, vec4(GATE(gate.x), GATE(gate.y), GATE(gate.z), GATE(gate.w)) * (all * column_scale[column]));
#elif EMIT_PACKED_B || MAGNITUDE_PROBES
            // Padding past N repeats the last activations; its results are ignored.
            [[unroll]] for (uint i = 0; i < 4; i++) all[i] = first_m + row + i < p.m ? finish_at(all[i], row + i, column) : 0.0;
            leave(at, row, column, all);
#else
            if (first_m + row < p.m && first_n + column < end_n) put_four(all, row, column);
#endif
        }
        barrier();
#if GATED
        if (which == 1) leave_sums(j);
#elif EMIT_PACKED_B || MAGNITUDE_PROBES
        leave_sums(j);
#endif
    }
#if GATED
    }
#endif
}
