// MXFP4x30: 960 values of MXFP4 in 512 bytes, 2 of them unused.
#include "formats/mxfp4_packed.glsl"
#define MXFP4X30_GROUP 32
#define MXFP4X30_BLOCK 960
#define MXFP4X30_BLOCK_BYTES 512

MXFP4_PACKED(mxfp4x30, 30, 512)
