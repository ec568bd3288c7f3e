// F32. load4 wants rows at multiples of 16 bytes.
void f32_init() {}
float f32_load(uvec2 row, uint e) { return F32(row).v[e]; }
vec4 f32_load4(uvec2 row, uint e) { return F32x4(row).v[e / 4]; }
