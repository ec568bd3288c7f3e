// F16. load4 wants rows at multiples of 8 bytes.
void f16_init() {}
float f16_load(uvec2 row, uint e) { return float(F16(row).v[e]); }
vec4 f16_load4(uvec2 row, uint e) { return vec4(F16x4(row).v[e / 4]); }
