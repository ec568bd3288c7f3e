// sample, first launch: bias, mask and penalties of CHUNK tokens of a row, and the best of them. A row that needs no cuts is
// drawn here: the best is that of the scores. Other rows leave their adjusted logits in scratch memory.
// logits: [vocab, rows]; recent: [window, rows]; bias: [biases, rows]; mask: bits [vocab / 32, rows]. One workgroup of WG threads
// for each chunk.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "sample/row.glsl"

#if WINDOW
// How often each token of the chunk is among the last ones.
shared uint counts[CHUNK];
#endif
#if BIAS
// The last entry of each token, counted from one.
shared uint entries[CHUNK];
#endif

void main() {
    uint row = group_index() / chunks_of_row(), chunk = group_index() % chunks_of_row();
    if (row >= p.rows) return;
    int position = I32(p.positions).v[row];
    if (position < 0) return;
    uint first = chunk * CHUNK, n = min(p.vocab - first, CHUNK), tid = gl_LocalInvocationID.x;
    Settings s = settings_of(row);
    uvec2 logits = row_address(p.logits, row, p.logits_stride * 4), scratch = scratch_of(row);

#if WINDOW || BIAS
    for (uint i = tid; i < CHUNK; i += WG) {
#if WINDOW
        counts[i] = 0;
#endif
#if BIAS
        entries[i] = 0;
#endif
    }
    barrier();
#endif
#if WINDOW
    float repetition = uintBitsToFloat(setting(row, 5)), inverse = uintBitsToFloat(setting(row, 6));
    float frequency = uintBitsToFloat(setting(row, 7)), presence = uintBitsToFloat(setting(row, 8));
    uint back = min(min(setting(row, 9), p.window), uint(position) + 1);
    for (uint i = tid; i < back; i += WG) {
        uint at = U32(p.recent).v[row * p.window + (uint(position) - i) % p.window] - first;
        if (at < n) atomicAdd(counts[at], 1);
    }
#endif
#if BIAS
    uint biases = min(setting(row, 12), p.biases);
    for (uint i = tid; i < biases; i += WG) {
        uint at = U32(p.bias_ids).v[row * p.biases + i] - first;
        if (at < n) atomicMax(entries[at], i + 1);
    }
#endif
#if MASK
    bool masked = setting(row, 13) != 0;
    uint mask_words = (p.vocab + 31) / 32;
#endif
    barrier();

    bool drawn = s.temperature > 0.0 && !s.cuts;
    uvec2 stream = stream_of(s.seed, uint(position));
    uvec2 best = NONE, largest = NONE;
    bool broken = false;
    for (uint i = tid; i < n; i += WG) {
        uint id = first + i;
        uint bits = U32(logits).v[id];
        uint raw_key = order_key(bits);
        broken = broken || raw_key == 0;
        if (better(uvec2(raw_key, id), largest)) largest = uvec2(raw_key, id);
        // Bits that nothing acts on stay what they are: a device may flush subnormal floats when it computes with them.
#if BIAS
        if (entries[i] > 0) {
            precise float sum = uintBitsToFloat(bits) + F32(p.bias_values).v[row * p.biases + entries[i] - 1];
            bits = floatBitsToUint(sum);
        }
#endif
#if MASK
        if (masked && (U32(p.mask).v[row * mask_words + id / 32] >> (id % 32) & 1) == 0) bits = 0xff800000u;
#endif
#if WINDOW
        if (counts[i] > 0) {
            float x = uintBitsToFloat(bits);
            precise float off = float(counts[i]) * frequency + presence;
            precise float scaled_x = x * (x > 0.0 ? inverse : repetition);
            precise float result = scaled_x - off;
            bits = floatBitsToUint(result);
        }
#endif
        uint key = order_key(bits);
        broken = broken || key == 0;
        if (s.cuts) U32(scratch).v[id] = bits;
        if (drawn && key > FORBIDDEN)
            key = order_key(floatBitsToUint(score_of(uintBitsToFloat(bits), s.temperature, gumbel_of(stream, id))));
        if (better(uvec2(key, id), best)) best = uvec2(key, id);
    }
    best = wg_best(best);
    uint any_broken = wg_best(uvec2(uint(broken), 0)).x;
    uvec2 words = chunk_words(scratch, chunk);
    if (tid == 0) {
        U32(words).v[0] = best.x;
        U32(words).v[1] = best.y;
        U32(words).v[5] = any_broken;
    }
#if LOGPROBS
    largest = wg_best(largest);
    float most = F32(logits).v[largest.y];
    float sum = 0;
    for (uint i = tid; i < n; i += WG) {
        float x = F32(logits).v[first + i];
        sum += exp(-below(order_key(floatBitsToUint(x)), largest.x, x, most));
    }
    sum = wg_sum(sum);
    if (tid == 0) {
        U32(words).v[2] = largest.x;
        U32(words).v[3] = largest.y;
        F32(words).v[4] = sum;
    }
#endif
}
