// topk_moe: the router of a mixture of experts. Per token: gate = GATE(logits), the n_used experts with the largest
// gate + bias (ties: the lower number) in falling order, and their weights share(gates) * scale + shift.
// logits: F32 [experts, tokens]; bias (BIAS 1): F32 [experts]; ids: I32 [n_used, tokens]; weights: F32 [n_used, tokens].
// GROUPS > 0: only experts of the GROUPS_USED groups with the largest sums of their two best scores can be chosen.
// One workgroup of WG threads per token; its logits stay in registers, a maximum finds each expert. SOLO: LANES of them, a subgroup, do it
// without the others, with scores as integers in the same order, whose maximum many devices have an instruction for.
// ROUTER: the logits of one token are made here, a workgroup for each: logits[e] = scale * sum_k a[k, e] * b[k] (+ bias), b normed first with
// NORM. The last workgroup to finish chooses.
#version 450
#if ROUTER
#define GRID_WAIT_LATE 1
#endif
#include "kiln.glsl"
#if SOLO
#extension GL_KHR_shader_subgroup_arithmetic : require
#define ROUNDS ((COLS_BOUND + LANES - 1) / LANES)
#define LANE gl_SubgroupInvocationID
#define SHARE(i) [[unroll]] for (uint k = 0, i = LANE; k < ROUNDS; k++, i += LANES) if (i < p.cols)
float held[ROUNDS];
#define wg_max(x) subgroupMax(x)
#define wg_sum(x) subgroupAdd(x)
#define MEET() subgroupBarrier()
#else
#include "reduce.glsl"
#include "row_share.glsl"
#define LANE gl_LocalInvocationID.x
#define MEET() barrier()
#endif

layout(local_size_x = WG) in;

const float LOWEST = -3.402823466e38;
const uint UNUSED = 0xffffffffu;

#if GROUPS
shared float goodness[GROUPS];
#endif
#if ROUTER
#include "last_one.glsl"
layout(buffer_reference, std430, buffer_reference_align = 4) coherent buffer Logits { float v[]; };
#define LOGITS Logits
// Weights of a thread that are on their way while the column is still being made.
#define EARLY 4
#if SOLO
shared vec2 route_sums[WG];
#endif

void route() {
    uint expert = gl_WorkGroupID.x, t = gl_LocalInvocationID.x, quads = p.k / 4;
    F32x4 row = F32x4(row_address(p.a, expert, p.a_stride)), b = F32x4(p.b);
    vec4 early[EARLY];
    [[unroll]] for (uint i = 0; i < EARLY; i++) early[i] = t + i * WG < quads ? row.v[t + i * WG] : vec4(0);
    grid_wait();
    // The product, and the squares of the column.
    vec2 sums = vec2(0);
    for (uint first = 0; first < quads; first += EARLY * WG) {
        [[unroll]] for (uint i = 0; i < EARLY; i++) {
            uint at = first + t + i * WG;
            if (at >= quads) continue;
            vec4 x = b.v[at], w = first == 0 ? early[i] : row.v[at];
#if NORM
            sums.y += dot(x, x);
#if NORM_WEIGHT
            x *= F32x4(p.norm_weight).v[at];
#endif
#endif
            sums.x += dot(x, w);
        }
    }
#if SOLO
    sums = subgroupAdd(sums);
    if (subgroupElect()) route_sums[gl_SubgroupID] = sums;
    barrier();
    if (t > 0) return;
    sums = route_sums[0];
    for (uint i = 1; i < gl_NumSubgroups; i++) sums += route_sums[i];
#else
    sums = vec2(wg_sum(sums.x), wg_sum(sums.y));
    if (t > 0) return;
#endif
    float logit = sums.x * p.router_scale;
#if NORM
    logit *= inversesqrt(sums.y / float(p.k) + p.eps);
#endif
#if ROUTER_BIAS
    logit += F32(p.router_bias).v[expert];
#endif
    Logits(p.logits).v[expert] = logit;
}
#else
#define LOGITS F32
#endif

float softplus(float v) {
    float e = exp(-abs(v));
    // Where e is small, 1 + e has lost most of it.
    float log1p = e < 1e-2 ? e * (1.0 - e * (0.5 - e * (0.33333333 - e * 0.25))) : log(1.0 + e);
    return max(v, 0.0) + log1p;
}

float gate_of(float v) {
#if GATE == 1
    return 1.0 / (1.0 + exp(-v));
#elif GATE == 2
    return sqrt(softplus(v));
#else
    return v;
#endif
}

void main() {
#if ROUTER
    route();
    if (!is_last_of(p.counter, gl_NumWorkGroups.x)) return;
#if SOLO
    if (gl_SubgroupID > 0) return;
#endif
    const uint token = 0;
#else
    uint token = group_index();
    if (token >= p.tokens) return;
#endif
    uint logits0 = token * p.logits_stride;

    float top = LOWEST;
    SHARE(i) {
        held[k] = gate_of(LOGITS(p.logits).v[logits0 + i]);
        top = max(top, held[k]);
    }
#if GATE == 0
    top = wg_max(top);
    float sum = 0.0;
    SHARE(i) {
        held[k] = exp(held[k] - top);
        sum += held[k];
    }
    sum = wg_sum(sum);
    SHARE(i) held[k] /= sum;
#endif

    float score[ROUNDS];
    uint place[ROUNDS];
    SHARE(i) {
        float v = held[k];
#if BIAS
        v += F32(p.bias).v[i];
#endif
        // A score that is not a number comes last, so that there always is a winner.
        score[k] = v >= LOWEST ? v : LOWEST;
        place[k] = UNUSED;
    }
#if GROUPS
    // The two largest scores of each group; of equal ones the lower number counts as the largest.
    for (uint g = 0; g < GROUPS; g++) {
        uint start = g * (p.cols / GROUPS), end = start + p.cols / GROUPS;
        float best = LOWEST;
        SHARE(i) if (i >= start && i < end) best = max(best, score[k]);
        best = wg_max(best);
        float first = 1e9;
        SHARE(i) if (i >= start && i < end && score[k] == best) first = min(first, float(i));
        uint winner = uint(-wg_max(-first));
        float second = LOWEST;
        SHARE(i) if (i >= start && i < end && i != winner) second = max(second, score[k]);
        second = wg_max(second);
        if (LANE == 0) goodness[g] = best + second;
    }
    MEET();
    SHARE(i) {
        uint group = i / (p.cols / GROUPS), before = 0;
        for (uint g = 0; g < GROUPS; g++)
            before += uint(goodness[g] > goodness[group] || (goodness[g] == goodness[group] && g < group));
        if (before >= GROUPS_USED) score[k] = LOWEST;
    }
#endif
#if SOLO
    // Zero is less than any score.
    uint key[ROUNDS];
    SHARE(i) {
        uint bits = floatBitsToUint(score[k]);
        key[k] = bits ^ (bits >> 31 == 1 ? 0xffffffffu : 0x80000000u);
    }
    for (uint n = 0; n < p.n_used; n++) {
        uint best = 0, first = UNUSED;
        SHARE(i) best = max(best, key[k]);
        best = subgroupMax(best);
        // Of equal ones the lowest number wins.
        SHARE(i) if (key[k] == best) first = min(first, i);
        first = subgroupMin(first);
        SHARE(i) if (i == first) {
            place[k] = n;
            key[k] = 0;
        }
    }
#else
    for (uint n = 0; n < p.n_used; n++) {
        float best = uintBitsToFloat(0xff800000u);
        SHARE(i) if (place[k] == UNUSED) best = max(best, score[k]);
        best = wg_max(best);
        // The lowest number wins; experts are few enough for floats to count them.
        float first = 1e9;
        SHARE(i) if (place[k] == UNUSED && score[k] == best) first = min(first, float(i));
        uint winner = uint(-wg_max(-first));
        SHARE(i) if (i == winner) place[k] = n;
    }
#endif

    float factor = p.scale;
#if SHARES == 1
    float total = 0.0;
    SHARE(i) if (place[k] != UNUSED) total += held[k];
    factor /= clamp(wg_sum(total), p.least_sum, p.most_sum);
#elif SHARES == 2
    float highest = LOWEST, total = 0.0;
    SHARE(i) if (place[k] != UNUSED) highest = max(highest, held[k]);
    highest = wg_max(highest);
    SHARE(i) if (place[k] != UNUSED) {
        held[k] = exp(held[k] - highest);
        total += held[k];
    }
    factor /= wg_sum(total);
#endif
    SHARE(i) if (place[k] != UNUSED) {
        I32(p.ids).v[token * p.ids_stride + place[k]] = int(i);
        F32(p.weights).v[token * p.weights_stride + place[k]] = held[k] * factor + p.shift;
    }
}
