// The fifth bits of packed Q5_0 and Q5_1: of 32 elements, element e in bit e / 4 of byte e % 4. Nibbles are those of Q4_0.
#include "formats/codes.glsl"

// Codes of 32 elements, from nibbles and fifth bits.
void five_bits32(uvec4 q, uint high, out uint codes[8]) {
    nibbles32(q, codes);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        codes[i] |= (high << (4 - i)) & 0x10101010u;
        codes[4 + i] |= (high >> i) & 0x10101010u;
    }
}
// Codes of elements e .. e + 3 of 32, from the word that holds their nibbles.
uint five_bits4(uint q, uint high, uint e) {
    return ((q >> ((e & 16u) / 4)) & 0x0f0f0f0fu) | ((high >> ((e & 31u) / 4)) & 0x01010101u) << 4;
}
