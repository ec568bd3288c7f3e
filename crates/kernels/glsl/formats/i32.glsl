// I32, as floats. load4 wants rows at multiples of 16 bytes.
void i32_init() {}
float i32_load(uvec2 row, uint e) { return float(I32(row).v[e]); }
vec4 i32_load4(uvec2 row, uint e) { return vec4(ivec4(U32x4(row).v[e / 4])); }
