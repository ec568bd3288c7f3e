// What every kernel starts with: extensions, pointer types, element access, the place of the workgroup.
// Addresses are `uvec2` parameters; naming a pointer type makes them usable: F32(p.x).v[i].
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_shader_8bit_storage : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : enable
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : enable
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : enable
#extension GL_EXT_control_flow_attributes : enable
#extension GL_KHR_shader_subgroup_basic : enable

#ifdef DEPENDENT_LAUNCH
// Dispatches exchange data while they run: under the Vulkan memory model, what others may see must be named so.
#pragma use_vulkan_memory_model
#extension GL_KHR_memory_scope_semantics : require
#define MEMORY_MODEL 1
#define SEEN nonprivate
#else
#define SEEN
#endif
layout(buffer_reference, std430, buffer_reference_align = 4) SEEN buffer F32 { float v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) SEEN buffer F32x4 { vec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 2) SEEN buffer F16 { float16_t v[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) SEEN buffer F16x4 { f16vec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) SEEN buffer U32 { uint v[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) SEEN buffer U32x2 { uvec2 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) SEEN buffer U32x4 { uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) SEEN buffer I32 { int v[]; };
layout(buffer_reference, std430, buffer_reference_align = 2) SEEN buffer U16 { uint16_t v[]; };
layout(buffer_reference, std430, buffer_reference_align = 1) SEEN buffer U8 { uint8_t v[]; };
layout(buffer_reference, std430, buffer_reference_align = 1) SEEN buffer I8 { int8_t v[]; };

// The address `bytes` further on.
uvec2 offset(uvec2 address, uint bytes) {
    uint carry;
    uint low = uaddCarry(address.x, bytes, carry);
    return uvec2(low, address.y + carry);
}

// The address of row number `row` of rows that are `row_bytes` apart; the product may exceed 32 bits.
uvec2 row_address(uvec2 address, uint row, uint row_bytes) {
    uint high, low;
    umulExtended(row, row_bytes, high, low);
    uvec2 at = offset(address, low);
    return uvec2(at.x, at.y + high);
}

// Elements of plain types by index. Kernels name the pair for their operands with macros given from Rust.
float load_f32(uvec2 a, uint i) { return F32(a).v[i]; }
float load_f16(uvec2 a, uint i) { return float(F16(a).v[i]); }
float load_bf16(uvec2 a, uint i) { return uintBitsToFloat(uint(U16(a).v[i]) << 16); }
int load_i32(uvec2 a, uint i) { return I32(a).v[i]; }
void store_f32(uvec2 a, uint i, float x) { F32(a).v[i] = x; }
void store_f16(uvec2 a, uint i, float x) { F16(a).v[i] = float16_t(x); }
// The same for caches: what a half float cannot hold becomes the largest one, as in caches of blocks. A NaN stays one: it passes no comparison.
float within_half(float x) { return x > 65504.0 ? 65504.0 : x < -65504.0 ? -65504.0 : x; }
vec4 within_half(vec4 x) { return vec4(within_half(x.x), within_half(x.y), within_half(x.z), within_half(x.w)); }
void store_f16_saturated(uvec2 a, uint i, float x) { store_f16(a, i, within_half(x)); }
void store_i32(uvec2 a, uint i, int x) { I32(a).v[i] = x; }

// Round to nearest even; a NaN stays one.
uint bf16_bits(float x) {
    uint u = floatBitsToUint(x);
    return (u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 64u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}
void store_bf16(uvec2 a, uint i, float x) { U16(a).v[i] = uint16_t(bf16_bits(x)); }

// Number of this workgroup in a grid made by `grid()`: it may be past the last one, the kernel must leave then.
uint group_index() {
    return gl_WorkGroupID.x + gl_NumWorkGroups.x * (gl_WorkGroupID.y + gl_NumWorkGroups.y * gl_WorkGroupID.z);
}

// Index of flat element i in a tensor with these extents, dimension 0 fastest.
uvec4 unravel(uint i, uint shape[4]) {
    uvec4 at;
    at.x = i % shape[0]; i /= shape[0];
    at.y = i % shape[1]; i /= shape[1];
    at.z = i % shape[2];
    at.w = i / shape[2];
    return at;
}

uint ravel(uvec4 at, uint stride[4]) {
    return at.x * stride[0] + at.y * stride[1] + at.z * stride[2] + at.w * stride[3];
}

#include "params.glsl"
#include "dependent_launch.glsl"
