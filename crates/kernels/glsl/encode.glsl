// 32 floats to a block of a simple format, by the host's rules without an importance, except that IQ4_NL refines one
// guess of the scale instead of searching. The kernel fills `block_x` and calls one of the encode_ functions.
// Products and sums that decide a code are `precise`, so that devices agree but for their division.
#include "half_bits.glsl"

float block_x[32];

// Writes the scale at 16-bit word 0 and gives the factor that turns values into codes. It belongs to the unrounded
// scale, except where f16 cannot hold it: one too large saturates, and one that vanishes makes all codes zero.
float put_scale(uvec2 b, float d) {
    uint bits = half_bits(d);
    U16(b).v[0] = uint16_t(bits);
    if ((bits & 0x7fffu) == 0) return 0.0;
    return 1.0 / clamp(d, -65504.0, 65504.0);
}

float block_max_abs() {
    float most = 0.0;
    [[unroll]] for (uint i = 0; i < 32; i++) most = max(most, abs(block_x[i]));
    return most;
}

vec2 block_min_max() {
    vec2 ends = vec2(block_x[0]);
    [[unroll]] for (uint i = 1; i < 32; i++) ends = vec2(min(ends.x, block_x[i]), max(ends.y, block_x[i]));
    return ends;
}

// The value with the largest magnitude, the first one of a tie.
float block_extreme() {
    float most = block_x[0];
    [[unroll]] for (uint i = 1; i < 32; i++) most = abs(block_x[i]) > abs(most) ? block_x[i] : most;
    return most;
}

// floor(x * inverse + shift) within 0 .. top.
uint code_of(float x, float inverse, float shift, float top) {
    precise float product = x * inverse;
    precise float level = product + shift;
    return uint(min(max(level, 0.0), top));
}

// Nibbles of codes at 16-bit word `at`, element e low in byte e, e + 16 high; gives the fifth bits.
uint put_codes(uvec2 b, uint at, float inverse, float less, float shift, float top) {
    uint fifth = 0;
    [[unroll]] for (uint i = 0; i < 8; i++) {
        uint word = 0;
        [[unroll]] for (uint j = 0; j < 2; j++) {
            uint e = 2 * i + j;
            precise float lower = block_x[e] - less, upper = block_x[e + 16] - less;
            uint low = code_of(lower, inverse, shift, top), high = code_of(upper, inverse, shift, top);
            word |= ((low & 15u) | (high & 15u) << 4) << (8 * j);
            fifth |= (low >> 4) << e | (high >> 4) << (e + 16);
        }
        U16(b).v[at + i] = uint16_t(word);
    }
    return fifth;
}

void encode_q8_0(uvec2 b) {
    float inverse = put_scale(b, block_max_abs() / 127.0);
    [[unroll]] for (uint i = 0; i < 16; i++) {
        uint word = 0;
        [[unroll]] for (uint j = 0; j < 2; j++) {
            precise float product = block_x[2 * i + j] * inverse;
            precise float level = product + (product < 0.0 ? -0.5 : 0.5);
            word |= (uint(int(clamp(level, -127.0, 127.0))) & 255u) << (8 * j);
        }
        U16(b).v[1 + i] = uint16_t(word);
    }
}

void encode_q4_0(uvec2 b) {
    float inverse = put_scale(b, block_extreme() / -8.0);
    put_codes(b, 1, inverse, 0.0, 8.5, 15.0);
}

void encode_q5_0(uvec2 b) {
    float inverse = put_scale(b, block_extreme() / -16.0);
    uint fifth = put_codes(b, 3, inverse, 0.0, 16.5, 31.0);
    U16(b).v[1] = uint16_t(fifth & 0xffffu);
    U16(b).v[2] = uint16_t(fifth >> 16);
}

// Scale and floor of a format whose codes 0 .. top span the range of the block; gives the fifth bits.
uint put_line(uvec2 b, uint at, float top) {
    vec2 ends = block_min_max();
    precise float scale = ends.y / top - ends.x / top;
    float inverse = put_scale(b, scale);
    U16(b).v[1] = uint16_t(half_bits(ends.x));
    return put_codes(b, at, inverse, clamp(ends.x, -65504.0, 65504.0), 0.5, top);
}

void encode_q4_1(uvec2 b) { put_line(b, 2, 15.0); }

void encode_q5_1(uvec2 b) {
    uint fifth = put_line(b, 4, 31.0);
    U16(b).v[2] = uint16_t(fifth & 0xffffu);
    U16(b).v[3] = uint16_t(fifth >> 16);
}

// The index of the value of the table of IQ4_NL nearest to `level`: how many of the middles lie below.
uint iq4_nearest(float level) {
    const float middles[15] = float[15](-115.5, -93.5, -74.0, -57.0, -42.0, -28.5, -16.0, -4.5, 7.0, 19.0, 31.5, 45.5,
                                        61.0, 79.0, 101.0);
    uint index = 0;
    [[unroll]] for (uint k = 0; k < 15; k++) index += level > middles[k] ? 1u : 0u;
    return index;
}

// The nearest value of the table itself.
float iq4_snap(float level) {
    const float middles[15] = float[15](-115.5, -93.5, -74.0, -57.0, -42.0, -28.5, -16.0, -4.5, 7.0, 19.0, 31.5, 45.5,
                                        61.0, 79.0, 101.0);
    const float steps[15] = float[15](23.0, 21.0, 18.0, 16.0, 14.0, 13.0, 12.0, 11.0, 12.0, 12.0, 13.0, 15.0, 16.0,
                                      20.0, 24.0);
    float value = -127.0;
    [[unroll]] for (uint k = 0; k < 15; k++) value += level > middles[k] ? steps[k] : 0.0;
    return value;
}

// The extreme becomes -127; the scale is then fitted to those codes with squares as weights, and the codes to it.
void encode_iq4_nl(uvec2 b) {
    float extreme = block_extreme();
    // In units of the extreme no square overflows or vanishes.
    float per_unit = abs(extreme) > 1e-30 ? 1.0 / extreme : 0.0;
    float wxq = 0.0, wqq = 0.0;
    [[unroll]] for (uint i = 0; i < 32; i++) {
        float x = block_x[i] * per_unit;
        float q = iq4_snap(x * -127.0);
        wxq += x * x * q * x;
        wqq += x * x * q * q;
    }
    float d = wqq > 0.0 ? wxq / wqq * extreme : 0.0;
    uint bits = half_bits(d);
    U16(b).v[0] = uint16_t(bits);
    float inverse = (bits & 0x7fffu) == 0 ? 0.0 : 1.0 / unpackHalf2x16(bits).x;
    [[unroll]] for (uint i = 0; i < 8; i++) {
        uint word = 0;
        [[unroll]] for (uint j = 0; j < 2; j++) {
            uint e = 2 * i + j;
            word |= (iq4_nearest(block_x[e] * inverse) | iq4_nearest(block_x[e + 16] * inverse) << 4) << (8 * j);
        }
        U16(b).v[1 + i] = uint16_t(word);
    }
}
