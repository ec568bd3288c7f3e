// The walk of elementwise kernels, one unit after the other: a unit is VEC elements of a row (4 or 1). `Walk` in Rust
// gives VEC, DENSE (no index decoding), WG, PER (units of a thread), VALUE (type of a unit), and for each operand X
// LOAD_X, STORE_X and SHIFT_X (log2 of its element size). The kernel defines `compute`; the result is operand D.
// A kernel that walks in its own way defines OWN_MAIN.

layout(local_size_x = WG) in;

// Element number i. The sum has 64 bits: indices of arrays are signed, so large tensors cannot be indexed directly.
uvec2 element(uvec2 base, uint i, uint shift) {
    uint carry;
    uint low = uaddCarry(base.x, i << shift, carry);
    return uvec2(low, base.y + (i >> (32 - shift)) + carry);
}

float fetch_f32(uvec2 a) { return F32(a).v[0]; }
float fetch_f16(uvec2 a) { return float(F16(a).v[0]); }
float fetch_bf16(uvec2 a) { return load_bf16(a, 0); }
float fetch_i32(uvec2 a) { return float(I32(a).v[0]); }
uint fetch_raw32(uvec2 a) { return U32(a).v[0]; }
uint fetch_raw16(uvec2 a) { return uint(U16(a).v[0]); }

vec4 fetch4_f32(uvec2 a) { return F32x4(a).v[0]; }
vec4 fetch4_f16(uvec2 a) { return vec4(F16x4(a).v[0]); }
vec4 fetch4_bf16(uvec2 a) {
    uvec2 u = U32x2(a).v[0];
    return uintBitsToFloat(uvec4(u.x << 16, u.x & 0xffff0000u, u.y << 16, u.y & 0xffff0000u));
}
vec4 fetch4_i32(uvec2 a) { return vec4(ivec4(U32x4(a).v[0])); }
uvec4 fetch4_raw32(uvec2 a) { return U32x4(a).v[0]; }
uvec2 fetch4_raw16(uvec2 a) { return U32x2(a).v[0]; }

// Saturates as Rust's `as` does; GLSL leaves values out of range open.
int whole(float x) {
    if (isnan(x)) return 0;
    return x >= 2147483648.0 ? 0x7fffffff : x < -2147483648.0 ? int(0x80000000u) : int(x);
}

void put_f32(uvec2 a, float x) { F32(a).v[0] = x; }
void put_f16(uvec2 a, float x) { F16(a).v[0] = float16_t(x); }
void put_bf16(uvec2 a, float x) { store_bf16(a, 0, x); }
void put_i32(uvec2 a, float x) { I32(a).v[0] = whole(x); }
void put_raw32(uvec2 a, uint x) { U32(a).v[0] = x; }
void put_raw16(uvec2 a, uint x) { U16(a).v[0] = uint16_t(x); }

void put4_f32(uvec2 a, vec4 x) { F32x4(a).v[0] = x; }
void put4_f16(uvec2 a, vec4 x) { F16x4(a).v[0] = f16vec4(x); }
void put4_bf16(uvec2 a, vec4 x) {
    U32x2(a).v[0] = uvec2(bf16_bits(x.x) | bf16_bits(x.y) << 16, bf16_bits(x.z) | bf16_bits(x.w) << 16);
}
void put4_i32(uvec2 a, vec4 x) { U32x4(a).v[0] = uvec4(ivec4(whole(x.x), whole(x.y), whole(x.z), whole(x.w))); }
void put4_raw32(uvec2 a, uvec4 x) { U32x4(a).v[0] = x; }
void put4_raw16(uvec2 a, uvec2 x) { U32x2(a).v[0] = x; }

// Applies a function of one or two floats to every element of a unit.
#if VEC == 4
#define EACH(F, X) vec4(F((X).x), F((X).y), F((X).z), F((X).w))
#define EACH2(F, X, Y) vec4(F((X).x, (Y).x), F((X).y, (Y).y), F((X).z, (Y).z), F((X).w, (Y).w))
#else
#define EACH(F, X) F(X)
#define EACH2(F, X, Y) F(X, Y)
#endif

#ifndef OWN_MAIN
// The value of a unit of the result, and the number of its first element.
VALUE compute(uint unit, out uint dst_at);

void main() {
    uint group = group_index();
    if (p.units == 0 || group > (p.units - 1) / (WG * PER)) return;
    uint first = group * (WG * PER);
    uint left = p.units - first;
    // All loads come before the first store: the compiler may not move them across, as operands may alias.
    VALUE value[PER];
    uint at[PER];
    [[unroll]] for (uint j = 0; j < PER; j++) {
        uint i = j * WG + gl_LocalInvocationID.x;
        if (i < left) value[j] = compute(first + i, at[j]);
    }
    [[unroll]] for (uint j = 0; j < PER; j++) {
        uint i = j * WG + gl_LocalInvocationID.x;
        if (i < left) STORE_D(element(p.dst, at[j], SHIFT_D), value[j]);
    }
}
#endif
