// What the workgroup makes, kept until all of it is there, and then left in memory rounded (ROUNDING). It has MADE turns of AT_A_TIME
// neighbouring rows, which are whole groups of 32: one barrier at the end, and none between the turns.

#define AT_A_TIME (ROW_GROUPS * ROWS)
shared vec4 made[MADE * AT_A_TIME / 4];

// Result number i of the workgroup.
void keep_result(uint i, float x) { made[i / 4][i % 4] = x; }

// Every thread comes here once, behind the last row. What lies past the last row are whole groups.
void round_results(uint group) {
    barrier();
    uint t = gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID;
    for (uint i = t; i < MADE * AT_A_TIME / 4; i += WG) {
        uint turn = i / (AT_A_TIME / 4), row = (turn * gl_NumWorkGroups.x + group) * AT_A_TIME + i % (AT_A_TIME / 4) * 4;
        if (row >= p.m) continue;
#if ROUNDING_WEIGHT
        vec4 weight = F32x4(p.rounding_weight).v[row / 4];
#else
        const vec4 weight = vec4(1.0);
#endif
        put_rounded(p.rounding, p.m, row, made[i], weight);
    }
}
