// Q6_Kx2: 512 values of Q6_K in 432 bytes, 12 of them unused.
#include "formats/q6_k_packed.glsl"
#define Q6_KX2_GROUP 16
#define Q6_KX2_BLOCK 512
#define Q6_KX2_BLOCK_BYTES 432

Q6_K_PACKED(q6_kx2, 2, 432)
