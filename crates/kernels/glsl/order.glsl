// The order of floats as an order of integers, given the bits of a float: NaN is below everything, -0 equals 0.
// Integers, because a driver may flush subnormal floats when it compares them.
uint order_key(uint bits) {
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
    if (bits == 0x80000000u) bits = 0;
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
