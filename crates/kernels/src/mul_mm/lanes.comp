// mul_mm on matrix units for few columns: d[m, n] = scale * sum_k a[k, m] * b[k, n] (+ bias) (+ residual)
// a: F16 or blocks of any format; b: 16-bit columns from columns.comp in the order of matrices (order.glsl); d: F32 or F16.
// Lanes decode weights in registers and write them to the components of matrices themselves: nothing goes through shared
// memory, and no subgroup waits for another before its sums are complete.
// A workgroup computes ROW_TILES x COLUMN_TILES matrices; its SHARE subgroups share the chunks of k, each one takes every SHARE-th,
// with AHEAD units of weights on their way. Their sums are added in order, through shared memory, at the end.
#version 450
#include "kiln.glsl"
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require

#include "mul_mm/order.glsl"
#define WG (SG * SHARE)
layout(local_size_x = WG) in;
#define TILE_M (MM * ROW_TILES)
#define TILE_N (MN * COLUMN_TILES)
#include "formats.glsl"
#include "mul_mm/place.glsl"
#define STORE_TENSOR 0
#include "mul_mm/finish.glsl"

shared vec4 subgroup_sums[SHARE * MM * MN / 4];

#define MATRIX_A coopmat<float16_t, gl_ScopeSubgroup, MM, MK, gl_MatrixUseA>
#define MATRIX_B coopmat<float16_t, gl_ScopeSubgroup, MK, MN, gl_MatrixUseB>
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
#define UNIT 16
struct Words { uvec4 w[2]; };
Words fetch(uvec2 row, uint e) { return Words(uvec4[2](U32x4(row).v[e / 8], U32x4(row).v[e / 8 + 1])); }
#endif
#define UNITS (PIECE / UNIT)
// Steps of a group: elements that are unfolded at once.
#define GROUP_STEPS (UNIT < 32 ? UNIT / 4 : 8)

#if A_BLOCKS
// value = (code - CENTRE) * scale + minimum. Codes become the mantissas of halves from 1024 on, which is exact. Where values
// have a minimum it is taken at the middle of the codes: there it is small, and its rounding with it.
#if A_SHIFTED
#define CENTRE A_MIDDLE
#elif A_PIECE && A_BIAS
#define CENTRE A_BIAS
#else
#define CENTRE 128
#define SIGNED 1
#endif
#if A_PARTS
// Scales that are whole numbers multiply codes without any rounding. A product with 1024 + code would leave what halves hold
// exactly, so 1024 and the middle of the codes are taken from it in the same instruction, as near to that as a half comes.
struct Group { uint codes[8]; f16vec2 scale, less, factor, least; };
Group unfold(Words x, uint e, uint j) {
    Group g;
    vec2 unused[2];
    A_UNFOLD(x, e, j, g.codes, unused[0], unused[1]);
    vec3 parts = A_PARTS_OF(x, e, j);
    float16_t less = float16_t(min(parts.x * float(1024 + CENTRE), 65504.0));
    g.scale = f16vec2(vec2(parts.x));
    g.less = f16vec2(-less);
    g.factor = f16vec2(vec2(parts.y));
    g.least = f16vec2(vec2((float(less) - parts.x * 1024.0) * parts.y + parts.z));
    return g;
}
f16vec2 values(uint pair, Group g) {
    f16vec2 h = unpackFloat2x16((pair & 0x00ff00ffu) | 0x64006400u);
    return fma(fma(h, g.scale, g.less), g.factor, g.least);
}
f16vec2[2] quad(Group g, uint s) { return f16vec2[2](values(g.codes[s], g), values(g.codes[s] >> 8, g)); }
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
        g.least[i] = f16vec2(vec2(A_SHIFTED != 0 ? s[i].y + float(CENTRE) * s[i].x : 0.0));
    }
    return g;
}
f16vec2 values(uint pair, f16vec2 scale, f16vec2 least) {
    f16vec2 v = unpackFloat2x16((pair & 0x00ff00ffu) | 0x64006400u) - f16vec2(float16_t(1024 + CENTRE));
#if A_SHIFTED
    return fma(v, scale, least);
#else
    return v * scale;
#endif
}
// The quad of step s of a group, as two pairs.
f16vec2[2] quad(Group g, uint s) {
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
f16vec2[2] quad(Group g, uint s) {
    uint low = g.w[s / 2][s % 2 * 2], high = g.w[s / 2][s % 2 * 2 + 1];
    return f16vec2[2](unpackFloat2x16((low & 0xffffu) | high << 16), unpackFloat2x16(low >> 16 | (high & 0xffff0000u)));
}
#endif

uint lane, chunks;
uvec2 rows[ROW_TILES][QUADS_OF_LANE];
// The first element of unit u of this subgroup for this lane; the last chunk may reach past the end, where the columns are zeros:
// any weights will do there.
uint element(uint u) {
    uint chunk = gl_SubgroupID + u / UNITS * SHARE;
    uint e = chunk * CHUNK + quad_of(lane) * PIECE + u % UNITS * UNIT;
    return e < p.k ? e : 0;
}
#define FETCH(INTO, U)                                                         \
    [[unroll]] for (uint i = 0; i < ROW_TILES; i++)                            \
        STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) INTO[i][h] = fetch(rows[i][h], element(U));

void main() {
    A_INIT();
    if (!find_tile()) return;
    prepare_finish();
    lane = gl_SubgroupInvocationID;
    chunks = (p.k + CHUNK - 1) / CHUNK;
    [[unroll]] for (uint i = 0; i < ROW_TILES; i++)
        STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) rows[i][h] = row_of_a(first_m + i * MM + row_of(lane, h));
    uint column_tiles = (p.n + MN - 1) / MN;
    uint units = gl_SubgroupID < chunks ? (chunks - gl_SubgroupID + SHARE - 1) / SHARE * UNITS : 0;
    MATRIX_C sum[ROW_TILES][COLUMN_TILES];
    [[unroll]] for (uint i = 0; i < ROW_TILES; i++)
        [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) sum[i][j] = MATRIX_C(0.0);

    Words words[AHEAD][ROW_TILES][QUADS_OF_LANE];
    [[unroll]] for (uint u = 0; u < AHEAD; u++)
        if (u < units) { FETCH(words[u], u) }
    for (uint first = 0; first < units; first += AHEAD) {
        [[unroll]] for (uint slot = 0; slot < AHEAD; slot++) {
            uint u = first + slot;
            if (u >= units) break;
            uint chunk = gl_SubgroupID + u / UNITS * SHARE;
            [[unroll]] for (uint g = 0; g < UNIT / (4 * GROUP_STEPS); g++) {
                Group groups[ROW_TILES][QUADS_OF_LANE];
                [[unroll]] for (uint i = 0; i < ROW_TILES; i++)
                    STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) groups[i][h] = unfold(words[slot][i][h], element(u), g);
                STEP_LOOP for (uint s = 0; s < GROUP_STEPS; s++) {
                    MATRIX_A a[ROW_TILES];
                    [[unroll]] for (uint i = 0; i < ROW_TILES; i++) {
                        STEP_LOOP for (uint h = 0; h < QUADS_OF_LANE; h++) {
                            f16vec2 pairs[2] = quad(groups[i][h], s);
                            SET_QUAD(a[i], h, pairs)
                        }
                    }
                    [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) {
                        uint tile = chunk * column_tiles + min(first_n / MN + j, column_tiles - 1);
                        uvec4 both = U32x4(p.b).v[(tile * STEPS + u % UNITS * (UNIT / 4) + g * GROUP_STEPS + s) * SG + lane];
                        MATRIX_B b;
                        [[unroll]] for (uint e = 0; e < 4; e++) {
                            f16vec2 pair = unpackFloat2x16(both[e]);
                            b[2 * e] = pair.x;
                            b[2 * e + 1] = pair.y;
                        }
                        [[unroll]] for (uint i = 0; i < ROW_TILES; i++) sum[i][j] = coopMatMulAdd(a[i], b, sum[i][j]);
                    }
                }
            }
            if (u + AHEAD < units) { FETCH(words[slot], u + AHEAD) }
        }
    }

    [[unroll]] for (uint i = 0; i < ROW_TILES; i++) {
        [[unroll]] for (uint j = 0; j < COLUMN_TILES; j++) {
            coopMatStore(sum[i][j], subgroup_sums, gl_SubgroupID * (MM * MN / 4), MM / 4, gl_CooperativeMatrixLayoutColumnMajor);
            barrier();
            for (uint at = gl_LocalInvocationID.x; at < MM * MN / 4; at += WG) {
                uint row = i * MM + at % (MM / 4) * 4, column = j * MN + at / (MM / 4);
                vec4 all = subgroup_sums[at];
                [[unroll]] for (uint w = 1; w < SHARE; w++) all += subgroup_sums[w * (MM * MN / 4) + at];
                if (first_m + row < p.m && first_n + column < end_n) put_four(all, row, column);
            }
            barrier();
        }
    }
}
