// A round of coopmat.comp: tile k is fetched, the one PREFETCH rounds before it is multiplied, and the one after that is stored.
// Of what is on its way, tile k is number ON and the oldest number OLDEST; it is stored at STORED. Written out in main for each
// of two rounds, with numbers that the compiler knows: as a loop the driver kept them in memory.
{
#if PREFETCH == 1 && STAGES == 1
    // One condition for fetching and storing keeps registers few enough for two workgroups on a core.
    bool fetches = k < end_k, multiplies = k > begin_k, stores = fetches;
#else
    bool fetches = k < end_k, multiplies = k >= begin_k + PREFETCH * DEPTH && k < end_k + PREFETCH * DEPTH;
    bool stores = k >= begin_k + (PREFETCH - 1) * DEPTH && k - (PREFETCH - 1) * DEPTH < end_k;
#endif
    if (fetches) {
        [[unroll]] for (uint i = 0; i < PER_A; i++) {
            uint e = k + UNIT_A * place_a(t + i * WG);
#if A_BLOCKS
            // Rows are whole groups of 32: only a deeper tile may reach past the end.
            if ((DEPTH <= 32 || e < end_k) && (UNITS_A % WG == 0 || t + i * WG < UNITS_A)) {
#if ONE_GROUP
                A_GROUP32(row_a[i], e, group_codes[ON][i], group_scales[ON][i][0], group_scales[ON][i][1]);
#else
                pieces[ON][i] = A_FETCH(row_a[i], e);
#endif
            }
#else
            lines_a[ON][i] = eight(row_a[i], e, end_k);
#endif
        }
        [[unroll]] for (uint i = 0; i < PER_B; i++) {
            uint at = k / 8 + place_b(t + i * WG);
            // Activations are padded to 64 elements; what they have past end_k meets zeros.
            lines_b[ON][i] = DEPTH <= 64 || at < (p.k + 63) / 64 * 8 ? U32x4(row_b[i]).v[at] : uvec4(0);
        }
    }
    if (WORKS && multiplies) {
        uint from = (STAGES - 1) * BUFFER - STORED;
        uint from_a = from + warp_m * LINE, from_b = from + (TILE_M + warp_n) * LINE;
        STEP_LOOP for (uint e = 0; e < DEPTH; e += MK) {
            MATRIX_A a[ROWS];
            [[unroll]] for (uint i = 0; i < ROWS; i++)
                coopMatLoad(a[i], space, from_a + i * MM * LINE + e / 8, LINE, gl_CooperativeMatrixLayoutRowMajor);
            [[unroll]] for (uint j = 0; j < COLUMNS; j++) {
                MATRIX_B b;
                coopMatLoad(b, space, from_b + j * MN * LINE + e / 8, LINE, gl_CooperativeMatrixLayoutColumnMajor);
                [[unroll]] for (uint i = 0; i < ROWS; i++) sum[i][j] = coopMatMulAdd(a[i], b, sum[i][j]);
            }
        }
    }
#if STAGES == 1
    barrier();
#endif
    if (stores) {
        uint stored_k = k - (PREFETCH - 1) * DEPTH;
        [[unroll]] for (uint i = 0; i < PER_A; i++) {
            uint unit = t + i * WG, at = STORED + row_a_of(unit) * LINE + UNIT_A / 8 * place_a(unit);
            if (UNITS_A % WG == 0 || unit < UNITS_A) {
#if A_BLOCKS
                uint e = stored_k + UNIT_A * place_a(unit);
                [[unroll]] for (uint group = 0; group < UNIT_A / 32; group++) {
                    uint codes[8];
                    vec2 lo, hi;
#if ONE_GROUP
                    codes = group_codes[OLDEST][i];
                    lo = group_scales[OLDEST][i][0], hi = group_scales[OLDEST][i][1];
#else
                    A_UNFOLD(pieces[OLDEST][i], e, group, codes, lo, hi);
#endif
                    [[unroll]] for (uint j = 0; j < 4; j++) {
                        vec2 s = j < 2 ? lo : hi;
                        uvec4 eight = uvec4(values(codes[2 * j], s), values(codes[2 * j + 1], s));
                        space[at + 4 * group + j] = DEPTH <= 32 || e + 32 * group < end_k ? eight : uvec4(0);
                    }
                }
#else
                space[at] = lines_a[OLDEST][i];
#endif
            }
        }
        [[unroll]] for (uint i = 0; i < PER_B; i++) {
            uint unit = t + i * WG;
            if (UNITS_B % WG == 0 || unit < UNITS_B)
                space[STORED + (TILE_M + row_b_of(unit)) * LINE + place_b(unit)] = lines_b[OLDEST][i];
        }
    }
    barrier();
    k += DEPTH;
}
