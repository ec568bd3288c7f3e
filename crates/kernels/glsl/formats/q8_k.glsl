// Q8_K: 256 values in 292 bytes. f32 d @0, int8 @4[256], int16 sums of 16 codes each @260[16]. d * q
#include "formats/codes.glsl"
#define Q8_K_GROUP 32
#define Q8_K_BLOCK 256
#define Q8_K_BLOCK_BYTES 292

void q8_k_init() {}
uvec2 q8_k_at(uvec2 row, uint e) { return offset(row, e / 256 * 292); }
uint q8_k_codes4(uvec2 row, uint e) { return U32(q8_k_at(row, e)).v[1 + (e & 255u) / 4]; }
vec2 q8_k_scale(uvec2 row, uint e) { return vec2(F32(q8_k_at(row, e)).v[0], 0.0); }
void q8_k_group32(uvec2 row, uint e, out uint codes[8], out vec2 lo, out vec2 hi) {
    uvec2 b = q8_k_at(row, e);
    [[unroll]] for (uint i = 0; i < 8; i++) codes[i] = U32(b).v[1 + (e & 255u) / 4 + i];
    lo = hi = vec2(F32(b).v[0], 0.0);
}
SCALED_VALUES(q8_k)
