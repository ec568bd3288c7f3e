// Floats to f16 as the host does it: to nearest, ties to even, subnormals kept, what is too large saturates. A driver's
// own conversion may round towards zero.
uint half_bits(float v) {
    uint u = floatBitsToUint(clamp(v, -65504.0, 65504.0));
    uint size = u & 0x7fffffffu;
    // Below 2^-14 an f16 counts in steps of 2^-24.
    uint small = uint(roundEven(uintBitsToFloat(size) * 16777216.0));
    uint normal = ((size + 0x0fffu + ((size >> 13) & 1u)) >> 13) - (112u << 10);
    return ((u >> 16) & 0x8000u) | (size < 0x38800000u ? small : normal);
}
