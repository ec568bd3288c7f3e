// MXFP4x16: 512 values of MXFP4 in 272 bytes, nothing unused.
#include "formats/mxfp4_packed.glsl"
#define MXFP4X16_GROUP 32
#define MXFP4X16_BLOCK 512
#define MXFP4X16_BLOCK_BYTES 272

MXFP4_PACKED(mxfp4x16, 16, 272)
