// Q6_Kx8: 2048 values of Q6_K in 1680 bytes, nothing unused.
#include "formats/q6_k_packed.glsl"
#define Q6_KX8_GROUP 16
#define Q6_KX8_BLOCK 2048
#define Q6_KX8_BLOCK_BYTES 1680

Q6_K_PACKED(q6_kx8, 8, 1680)
