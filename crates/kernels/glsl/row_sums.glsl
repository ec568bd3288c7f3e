// Sums over a row of which each thread has its share (row_share.glsl), and the mean and deviation of it. The kernel says with
// ROW(i) what element i of the row is: a float, or four of them.

float all_of(float x) { return x; }
float all_of(vec4 x) { return (x.x + x.y) + (x.z + x.w); }

// Sum of x[i] - shift.
float row_sum(float shift) {
    ELEMENT sum = ELEMENT(0.0);
    SHARE(i) sum += ROW(i) - shift;
    return wg_sum(all_of(sum));
}

// Sum of (x[i] - shift)^2.
float row_sum_squares(float shift) {
    ELEMENT sum = ELEMENT(0.0);
    SHARE(i) {
        ELEMENT v = ROW(i) - shift;
        sum = fma(v, v, sum);
    }
    return wg_sum(all_of(sum));
}

// What brings a row of n floats to mean 0 and variance 1: ((x - shift) - rest) * scale. `rest` is what `shift` misses:
// subtracted on its own it keeps the digits that x - shift has won.
struct Standard {
    float shift, rest, scale;
};

// The mean in f32 is off by some ulps of itself, which is large beside a small deviation; so the deviations from it are
// summed too, and both mean and variance are corrected by that sum.
Standard row_standard(float n, float eps) {
    float mean = row_sum(0.0) / n;
    float rest = row_sum(mean) / n;
    float variance = max(row_sum_squares(mean) / n - rest * rest, 0.0);
    return Standard(mean, rest, inversesqrt(variance + eps));
}
