// The sixteen values of IQ4_NL and IQ4_XS. The table in shared memory takes a byte of two nibbles at once: the value of
// the low one in bits 0 to 7, that of the high one in bits 16 to 23.
#include "formats/codes.glsl"

// -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
const uint iq4_values[4] = uint[4](0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u);
shared uint iq4_pairs[256];

void iq4_init() {
    for (uint i = gl_LocalInvocationIndex; i < 256; i += THREADS) {
        uint low = bitfieldExtract(iq4_values[(i & 15u) / 4], int(i & 3u) * 8, 8);
        uint high = bitfieldExtract(iq4_values[i / 64], int(i / 16 & 3u) * 8, 8);
        iq4_pairs[i] = low | high << 16;
    }
    barrier();
}
// The values of the low nibbles (x) and of the high nibbles (y) of four bytes.
uvec2 iq4_codes(uint q) {
    uint a = iq4_pairs[q & 255u] | iq4_pairs[(q >> 8) & 255u] << 8;
    uint b = iq4_pairs[(q >> 16) & 255u] | iq4_pairs[q >> 24] << 8;
    return uvec2((a & 0xffffu) | b << 16, a >> 16 | (b & 0xffff0000u));
}
