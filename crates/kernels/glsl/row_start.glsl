// The address of row number `row` of 4-byte elements, counted over dimensions 1 to 3; strides are in elements.
uvec2 row_start(uvec2 base, uint row, uint outer[3], uint stride[4]) {
    uint i1 = row % outer[0];
    row /= outer[0];
    uint i2 = row % outer[1];
    uint i3 = row / outer[1];
    return row_address(base, i1 * stride[1] + i2 * stride[2] + i3 * stride[3], 4);
}
