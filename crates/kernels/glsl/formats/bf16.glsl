// BF16, the upper half of an F32. load4 wants rows at multiples of 8 bytes.
void bf16_init() {}
float bf16_load(uvec2 row, uint e) { return load_bf16(row, e); }
vec4 bf16_load4(uvec2 row, uint e) {
    uvec2 u = U32x2(row).v[e / 4];
    return uintBitsToFloat(uvec4(u.x << 16, u.x & 0xffff0000u, u.y << 16, u.y & 0xffff0000u));
}
