// Q6_Kx1: 256 values of Q6_K in 224 bytes, 14 of them unused.
#include "formats/q6_k_packed.glsl"
#define Q6_KX1_GROUP 16
#define Q6_KX1_BLOCK 256
#define Q6_KX1_BLOCK_BYTES 224

Q6_K_PACKED(q6_kx1, 1, 224)
