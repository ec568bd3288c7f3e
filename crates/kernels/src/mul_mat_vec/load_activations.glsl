// The activations: as floats where they lie, or as integers of 8 or (WIDE) 16 bits with one factor for 32 elements, in shared
// memory (STAGED) or in memory in the form that `quantise.comp` tells. GIVEN: one activation vector of 16 bits that was rounded by who made
// it (`rounded.glsl`) is copied to shared memory.
// With NORM, `factor` of an activation vector becomes 1 / sqrt(mean + eps); the weight is multiplied into the elements.

#if !INT
#if NORM
float squares[COLS];
#endif

void start_columns(uvec2 b) {}
void start_row() {
#if NORM
    [[unroll]] for (uint c = 0; c < COLS; c++) squares[c] = 0;
#endif
}

#if SLICE > 1
vec4 column_quad(uint c, uint e) {
    vec4 x = B_LOAD4(columns[c], e);
#if SUMMED
    x *= SHARE_OF(e);
#endif
#if NORM
    squares[c] += dot(x, x);
#if NORM_WEIGHT
    x *= F32x4(p.norm_weight).v[e / 4];
#endif
#endif
    return x;
}
#else
float column_element(uint c, uint e) {
    float x = B_LOAD(columns[c], e);
#if SUMMED
    x *= SHARE_OF(e);
#endif
#if NORM
    squares[c] += x * x;
#if NORM_WEIGHT
    x *= F32(p.norm_weight).v[e];
#endif
#endif
    return x;
}
#endif

#if NORM
#if ROW_GROUP == WG
shared float square_sums[COLS][WG];
#endif
// Each team saw every element of the activations once for its rows.
void finish_columns() {
    [[unroll]] for (uint c = 0; c < COLS; c++) {
#if ROW_GROUP == WG
        uint t = gl_LocalInvocationID.x;
        // What the rows before left is read by now.
        barrier();
        square_sums[c][t] = squares[c];
        barrier();
        for (uint s = WG / 2; s > 0; s >>= 1) {
            if (t < s) square_sums[c][t] += square_sums[c][t + s];
            barrier();
        }
        float sum = square_sums[c][0];
#else
        float sum = add_up(squares[c]);
#endif
        factor[c] = p.scale * inversesqrt(sum / float(p.k) + p.eps);
    }
}
#else
void finish_columns() {
    [[unroll]] for (uint c = 0; c < COLS; c++) factor[c] = p.scale;
}
#endif

#elif STAGED
#include "mul_mat_vec/round32.glsl"
#extension GL_EXT_integer_dot_product : require
#if SHUFFLES
#extension GL_KHR_shader_subgroup_shuffle : require
#endif
#if (A_HAS_MIN || ZERO_POINT) && QUADS == 0
// Slices are whole groups: what a minimum, or what codes are too large by, is multiplied with is known beforehand.
#define GROUP_SUMS 1
#define SUM_QUADS (A_GROUP / 4)
#endif
#if WIDE
// 16 bits, in two bytes each: as good as floats, and still four products an instruction.
#define LEVELS 32512.0
#else
#define LEVELS 127.0
#endif

#if SLICED
// In the order in which a team's threads read them: what is at the same place of all their slices lies side by side, and
// from one place, or pass over the slices, to the next it is a fixed number of bytes.
#define PLACES (SLICE / 16)
#define PASSES ((K / SLICE + ROW_GROUP - 1) / ROW_GROUP)
shared uvec4 staged_codes[COLS * PASSES * (1 + WIDE) * PLACES * ROW_GROUP];
// Place i of 16 elements counted through the activation vector; those of the lower bytes follow those of the upper ones.
uint staged_place(uint c, uint i, uint lower) {
    uint s = i / PLACES;
    return ((c * PASSES + s / ROW_GROUP) * ((1 + WIDE) * PLACES) + lower * PLACES + i % PLACES) * ROW_GROUP + s % ROW_GROUP;
}
#if defined(GROUP_SUMS)
#define SLICE_FLOATS (GROUPS + RUNS)
#else
#define SLICE_FLOATS GROUPS
#endif
shared float staged_floats[COLS * PASSES * SLICE_FLOATS * ROW_GROUP];
uint staged_float(uint c, uint s, uint i) { return ((c * PASSES + s / ROW_GROUP) * SLICE_FLOATS + i) * ROW_GROUP + s % ROW_GROUP; }
void put_scale(uint c, uint group, float x) { staged_floats[staged_float(c, group / GROUPS, group % GROUPS)] = x; }
#if defined(GROUP_SUMS)
void put_sum(uint c, uint run, float x) { staged_floats[staged_float(c, run / RUNS, GROUPS + run % RUNS)] = x; }
#endif

// Of slice `lane + ROW_GROUP * pass`: elements 16 i .. 16 i + 15, the scale of a run, the sum of its codes.
uvec4 slice_codes16(uint c, uint pass, uint lane, uint i) {
    return staged_codes[(c * PASSES + pass) * ((1 + WIDE) * PLACES * ROW_GROUP) + lane + i * ROW_GROUP];
}
#if WIDE
uvec4 slice_low16(uint c, uint pass, uint lane, uint i) { return slice_codes16(c, pass, lane, PLACES + i); }
#endif
float slice_float(uint c, uint pass, uint lane, uint i) {
    return staged_floats[(c * PASSES + pass) * (SLICE_FLOATS * ROW_GROUP) + lane + i * ROW_GROUP];
}
#define slice_scale(c, pass, lane, run) slice_float(c, pass, lane, (run) / (RUNS / GROUPS))
#define slice_sum(c, pass, lane, run) slice_float(c, pass, lane, GROUPS + (run))

#else
// Codes by 16 elements. A thread's neighbour may read 16, 32 or 64 bytes further on: mixing higher bits of the place into
// the lowest three gives all of them different banks.
#define PLACES ((K / 16 + 7) / 8 * 8)
shared uvec4 staged_codes[COLS * PLACES * (1 + WIDE)];
uint staged_place(uint c, uint i, uint lower) { return (lower * COLS + c) * PLACES + (i ^ ((i >> 3) & 7u)); }
shared float staged_scales[COLS * (K / 32)];
void put_scale(uint c, uint group, float x) { staged_scales[c * (K / 32) + group] = x; }
uint column_codes(uint c, uint e) { return staged_codes[staged_place(c, e / 16, 0)][e / 4 % 4]; }
// Those of elements e .. e + 15.
uvec4 column_codes16(uint c, uint e) { return staged_codes[staged_place(c, e / 16, 0)]; }
#if WIDE
uint column_low(uint c, uint e) { return staged_codes[staged_place(c, e / 16, 1)][e / 4 % 4]; }
uvec4 column_low16(uint c, uint e) { return staged_codes[staged_place(c, e / 16, 1)]; }
#endif
float column_scale(uint c, uint e) { return staged_scales[c * (K / 32) + e / 32]; }
#if defined(GROUP_SUMS)
shared float staged_sums[COLS * (K / A_GROUP)];
void put_sum(uint c, uint run, float x) { staged_sums[c * (K / A_GROUP) + run] = x; }
float column_sum(uint c, uint e) { return staged_sums[c * (K / A_GROUP) + e / A_GROUP]; }
#endif
#endif

// Codes of two quads of a group, which are multiplied with `inverse`: the upper or only bytes, with WIDE the lower ones too, and
// the sum of the codes.
uvec2 rounded_quads(vec4 x[2], float inverse, out uvec2 low, out int ones) {
    uvec2 high;
    low = uvec2(0);
    ones = 0;
    [[unroll]] for (uint j = 0; j < 2; j++) {
#if WIDE
        uvec2 codes = rounded_pairs(x[j], inverse);
        low[j] = codes.y;
        ones += 256 * dotPacked4x8EXT(int(codes.x), 0x01010101) + dotPacked4x8EXT(int(codes.y), 0x01010101);
#else
        uvec2 codes = uvec2(rounded_bytes(x[j] * inverse), 0);
        ones += dotPacked4x8EXT(int(codes.x), 0x01010101);
#endif
        high[j] = codes.x;
    }
    return high;
}
// Puts the codes of elements 8 u .. 8 u + 7 down.
void put_quads(uint c, uint u, uvec2 high, uvec2 low) {
    [[unroll]] for (uint j = 0; j < 2; j++) {
        staged_codes[staged_place(c, u / 2, 0)][2 * (u % 2) + j] = high[j];
#if WIDE
        staged_codes[staged_place(c, u / 2, 1)][2 * (u % 2) + j] = low[j];
#endif
    }
}

#if NORM
#if SUBGROUPS
shared float square_sums[COLS][SUBGROUPS_MOST];
#else
shared float square_sums[1][WG];
#endif
#endif

#if SHUFFLES
#define UNITS_OF_COLUMN (K / 8)
#define ROUNDS ((UNITS_OF_COLUMN + WG - 1) / WG)
#define AT_ONCE (ROUNDS > 4 ? 4 : ROUNDS)
#endif
#if GIVEN
// Four neighbours share 32 elements, eight codes each. Every workgroup begins elsewhere, as below.
void stage_column(uint c, uint t, inout float squares) {
    uint start = gl_WorkGroupID.x * 5u % (K / 32) * 4;
    for (uint turn = 0; turn < ROUNDS; turn += AT_ONCE) {
        uint first = t + turn * WG;
        uvec4 halves[AT_ONCE];
        float scales[AT_ONCE];
        uint places[AT_ONCE];
        [[unroll]] for (uint i = 0; i < AT_ONCE; i++) {
            uint u = first + i * WG + start;
            places[i] = u < UNITS_OF_COLUMN ? u : u - UNITS_OF_COLUMN;
            halves[i] = uvec4(0);
            scales[i] = 0;
            if (first + i * WG < UNITS_OF_COLUMN) {
                halves[i] = U32x4(columns[c]).v[places[i]];
                scales[i] = F32(columns[c]).v[ROUNDED_SCALE(K, places[i] / 4)];
            }
        }
        [[unroll]] for (uint i = 0; i < AT_ONCE; i++) {
            bool inside = first + i * WG < UNITS_OF_COLUMN;
            uint u = places[i];
            uvec2 a = bytes_of_halves(halves[i].xy), b = bytes_of_halves(halves[i].zw);
#if defined(GROUP_SUMS)
            int ones = 256 * (dotPacked4x8EXT(int(a.x), 0x01010101) + dotPacked4x8EXT(int(b.x), 0x01010101))
                + dotPacked4x8EXT(int(a.y), 0x01010101) + dotPacked4x8EXT(int(b.y), 0x01010101);
            [[unroll]] for (uint s = 1; s < SUM_QUADS / 2; s *= 2) ones += subgroupShuffleXor(ones, s);
            if (inside && u % (SUM_QUADS / 2) == 0) put_sum(c, u / (SUM_QUADS / 2), scales[i] * float(ones));
#endif
            if (inside && u % 4 == 0) put_scale(c, u / 4, scales[i]);
            if (inside) put_quads(c, u, uvec2(a.x, b.x), uvec2(a.y, b.y));
        }
    }
}
#elif SHUFFLES
// Four neighbours share 32 elements, two quads each. Up to eight loads are on their way at once, and no branch stands around an
// exchange, so that those of several units overlap. Every workgroup begins elsewhere: all of them asking for the same line of
// the cache at the same time would wait for each other. Not with NORM: squares are summed in the order of the threads, and
// their sum must have the same bits everywhere.
void stage_column(uint c, uint t, inout float squares) {
    // Groups of 32 elements stay together.
    uint start = NORM == 1 ? 0 : gl_WorkGroupID.x * 5u % (K / 32) * 4;
    for (uint turn = 0; turn < ROUNDS; turn += AT_ONCE) {
        uint first = t + turn * WG;
        vec4 x[AT_ONCE][2];
        uint places[AT_ONCE];
        [[unroll]] for (uint i = 0; i < AT_ONCE; i++) {
            uint u = first + i * WG + start;
            places[i] = u < UNITS_OF_COLUMN ? u : u - UNITS_OF_COLUMN;
            x[i][0] = x[i][1] = vec4(0);
            if (first + i * WG < UNITS_OF_COLUMN) {
                x[i][0] = column_values(columns[c], 2 * places[i], squares);
                x[i][1] = column_values(columns[c], 2 * places[i] + 1, squares);
            }
        }
        [[unroll]] for (uint i = 0; i < AT_ONCE; i++) {
            bool inside = first + i * WG < UNITS_OF_COLUMN;
            uint u = places[i];
            float most = max(most_of(x[i][0]), most_of(x[i][1]));
            [[unroll]] for (uint s = 1; s < 4; s *= 2) most = max(most, subgroupShuffleXor(most, s));
            float scale = most * (1.0 / LEVELS) * SHARE_OF(min(8 * u, uint(K - 1)));
            int ones;
            uvec2 low, high = rounded_quads(x[i], inverse_of(most, LEVELS), low, ones);
#if defined(GROUP_SUMS)
            [[unroll]] for (uint s = 1; s < SUM_QUADS / 2; s *= 2) ones += subgroupShuffleXor(ones, s);
            if (inside && u % (SUM_QUADS / 2) == 0) put_sum(c, u / (SUM_QUADS / 2), scale * float(ones));
#endif
            if (inside && u % 4 == 0) put_scale(c, u / 4, scale);
            if (inside) put_quads(c, u, high, low);
        }
    }
}
#else
// A thread for 32 elements.
void stage_column(uint c, uint t, inout float squares) {
    for (uint g = t; g < K / 32; g += WG) {
        vec4 x[8];
        float most = load32(columns[c], g, x, squares);
        float scale = most * (1.0 / LEVELS) * SHARE_OF(32 * g);
        put_scale(c, g, scale);
        int ones[4];
        [[unroll]] for (uint i = 0; i < 4; i++) {
            uvec2 low, high = rounded_quads(vec4[2](x[2 * i], x[2 * i + 1]), inverse_of(most, LEVELS), low, ones[i]);
            put_quads(c, 4 * g + i, high, low);
        }
#if defined(GROUP_SUMS)
        [[unroll]] for (uint i = 0; i < 4; i += SUM_QUADS / 2) {
            int all = 0;
            [[unroll]] for (uint j = i; j < i + SUM_QUADS / 2; j++) all += ones[j];
            put_sum(c, (4 * g + i) / (SUM_QUADS / 2), scale * float(all));
        }
#endif
    }
}
#endif

void start_columns(uvec2 b) {
#if SHUFFLES
    // Neighbours in the subgroup, whatever their place in the workgroup.
    uint t = gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID;
#else
    uint t = gl_LocalInvocationID.x;
#endif
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        float squares = 0;
#if GIVEN && NORM
        // One subgroup adds up what the groups of the activation vector have.
        if (gl_SubgroupID == 0)
            for (uint g = gl_SubgroupInvocationID; g < K / 32; g += gl_SubgroupSize)
                squares += F32(columns[c]).v[ROUNDED_SQUARES(K, g)];
#endif
        stage_column(c, t, squares);
        factor[c] = p.scale;
#if NORM && SUBGROUPS
        squares = subgroupAdd(squares);
        if (subgroupElect()) square_sums[c][gl_SubgroupID] = squares;
#elif NORM
        square_sums[0][t] = squares;
        barrier();
        for (uint s = WG / 2; s > 0; s >>= 1) {
            if (t < s) square_sums[0][t] += square_sums[0][t + s];
            barrier();
        }
        factor[c] *= inversesqrt(square_sums[0][0] / float(K) + p.eps);
        barrier();
#endif
    }
    barrier();
#if NORM && SUBGROUPS
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        float sum = square_sums[c][0];
#if !GIVEN
        for (uint s = 1; s < gl_NumSubgroups; s++) sum += square_sums[c][s];
#endif
        factor[c] *= inversesqrt(sum / float(K) + p.eps);
    }
#endif
}
void start_row() {}
void finish_columns() {}

#else
#extension GL_EXT_integer_dot_product : require
void start_columns(uvec2 b) {}
void start_row() {}
void finish_columns() {
    [[unroll]] for (uint c = 0; c < COLS; c++) {
#if NORM
        factor[c] = p.scale * F32(p.norm_factors).v[first_column + c];
#else
        factor[c] = p.scale;
#endif
    }
}
#if WIDE
uint column_codes(uint c, uint e) { return U32(columns[c]).v[e / 128 * 68 + 4 + (e & 127u) / 4]; }
uvec4 column_codes16(uint c, uint e) { return U32x4(columns[c]).v[e / 128 * 17 + 1 + (e & 127u) / 16]; }
uint column_low(uint c, uint e) { return U32(columns[c]).v[e / 128 * 68 + 36 + (e & 127u) / 4]; }
uvec4 column_low16(uint c, uint e) { return U32x4(columns[c]).v[e / 128 * 17 + 9 + (e & 127u) / 16]; }
float column_scale(uint c, uint e) { return F32(columns[c]).v[e / 128 * 68 + (e & 127u) / 32]; }
#else
uint column_codes(uint c, uint e) { return U32(columns[c]).v[e / 128 * 36 + 4 + (e & 127u) / 4]; }
uvec4 column_codes16(uint c, uint e) { return U32x4(columns[c]).v[e / 128 * 9 + 1 + (e & 127u) / 16]; }
float column_scale(uint c, uint e) { return F32(columns[c]).v[e / 128 * 36 + (e & 127u) / 32]; }
#endif
#endif
