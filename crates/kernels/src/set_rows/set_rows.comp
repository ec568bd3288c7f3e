// set_rows: dst row ids(i1, i2 % n, i3 % m) of batch (i2, i3) = src row (i1, i2, i3), converted to dst's type.
// src: F32 or F16; ids: I32 or I64, their dimensions 1 and 2 repeat; dst: a plain float type or a simple block format.
// An id outside of dst is dropped, and what F16 cannot hold becomes its largest number. With IDS 0 every row goes to its own place: a copy, of infinities too.
// Each thread takes UNIT neighbouring elements of a row: 32 where dst has blocks, else 4 or 1.
#version 450
#include "kiln.glsl"

layout(local_size_x = WG) in;
#include "formats.glsl"
#if BLOCKS
#include "encode.glsl"
#endif

uvec2 row_of(uvec2 base, uvec3 at, uint stride[3]) {
    return row_address(row_address(row_address(base, at.x, stride[0]), at.y, stride[1]), at.z, stride[2]);
}

void put4_f32(uvec2 dst, uint e, vec4 v) { F32x4(dst).v[e / 4] = v; }
void put4_f16(uvec2 dst, uint e, vec4 v) { F16x4(dst).v[e / 4] = f16vec4(v); }
void put4_f16_saturated(uvec2 dst, uint e, vec4 v) { put4_f16(dst, e, within_half(v)); }
void put4_bf16(uvec2 dst, uint e, vec4 v) {
    U32x2(dst).v[e / 4] = uvec2(bf16_bits(v.x) | bf16_bits(v.y) << 16, bf16_bits(v.z) | bf16_bits(v.w) << 16);
}

void main() {
    uint unit = group_index() * WG + gl_LocalInvocationID.x;
    if (unit >= p.units) return;
    uint row = unit / p.row_units;
    uint e = (unit - row * p.row_units) * UNIT;
    uvec4 at = unravel(row, uint[4](p.shape[0], p.shape[1], p.shape[2], 1));
    uvec2 src = row_of(p.src, at.xyz, p.src_stride);
#if IDS
    uvec2 place = row_of(p.ids, uvec3(at.x, at.y % p.ids_shape[0], at.z % p.ids_shape[1]), p.ids_stride);
    uint id = U32(place).v[0];
#if IDS == 64
    if (U32(place).v[1] != 0) return;
#endif
    if (id >= p.dst_rows) return;
    at.x = id;
#endif
    uvec2 dst = row_of(p.dst, at.xyz, p.dst_stride);
#if BLOCKS
    [[unroll]] for (uint i = 0; i < 8; i++) {
#if FOURS
        vec4 v = S_LOAD4(src, e + 4 * i);
#else
        vec4 v = vec4(S_LOAD(src, e + 4 * i), S_LOAD(src, e + 4 * i + 1), S_LOAD(src, e + 4 * i + 2), S_LOAD(src, e + 4 * i + 3));
#endif
        [[unroll]] for (uint j = 0; j < 4; j++) block_x[4 * i + j] = v[j];
    }
    ENCODE(offset(dst, e / 32 * BLOCK_BYTES));
#elif FOURS
    PUT4_D(dst, e, S_LOAD4(src, e));
#else
    STORE_D(dst, e, S_LOAD(src, e));
#endif
}
