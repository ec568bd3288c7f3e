//! The searches for the scale of a block: try several inverse scales, round, fit the best scale to the rounded codes by
//! weighted least squares, keep the trial with the smallest weighted error. No format is known here.

use std::array;

use super::blocks::{LANES, max_abs, sum, total};

/// Adding and subtracting 1.5 * 2^23 leaves the nearest integer. It is plain SSE2, which a call of `round` is not.
const ROUNDER: f32 = 12_582_912.0;

/// The nearest integer (halves to even), for |value| below 2^22.
#[inline(always)]
pub(super) fn nearest(value: f32) -> f32 {
    (value + ROUNDER) - ROUNDER
}

/// `value` within `low..=high`; NaN becomes `low`. With constant ends it is two instructions and, unlike `f32::clamp`,
/// never a branch.
#[inline(always)]
pub(super) fn within(value: f32, low: f32, high: f32) -> f32 {
    value.max(low).min(high)
}

/// A block divided by a power of two, so that squares and sums of squares neither overflow nor vanish.
pub(super) struct Normalised<const N: usize> {
    /// The values over `unit`; the largest magnitude lies in 1..2, or a little beside at the ends of f32's range.
    pub(super) x: [f32; N],
    /// A power of two.
    pub(super) unit: f32,
}

/// Normalises a block whose values count as `limit` at most; None where all of them are zero (or NaN).
#[inline]
pub(super) fn normalise<const N: usize>(values: &[f32; N], limit: f32) -> Option<Normalised<N>> {
    let largest = max_abs(values).min(limit);
    if largest == 0.0 {
        return None;
    }
    let exponent = (largest.to_bits() >> 23).clamp(7, 247);
    let unit = f32::from_bits(exponent << 23);
    let inverse = f32::from_bits((254 - exponent) << 23);
    let mut x = [0f32; N];
    for (x, &value) in x.iter_mut().zip(values) {
        // The comparison is false for NaN, which thereby becomes zero.
        let magnitude = value.abs();
        let limited = if magnitude > limit { limit.copysign(value) } else { value };
        *x = if magnitude >= 0.0 { limited * inverse } else { 0.0 };
    }
    Some(Normalised { x, unit })
}

/// The weights of a block under an importance: an error in a large value counts somewhat more than in a small one.
/// `spread` is the mean square of the surroundings. A block without any importance is weighted evenly.
#[inline]
pub(super) fn weigh<const N: usize>(x: &[f32; N], importance: &[f32; N], spread: f32) -> [f32; N] {
    let largest = max_abs(importance);
    if !(largest > 0.0 && largest <= f32::MAX) {
        return [1.0; N];
    }
    let mut weights = [0f32; N];
    for i in 0..N {
        weights[i] = within(importance[i] / largest, 0.0, 1.0) * (spread + x[i] * x[i]).sqrt();
    }
    if sum(&weights) > 1e-20 { weights } else { [1.0; N] }
}

/// The mean square.
#[inline]
pub(super) fn mean_square<const N: usize>(x: &[f32; N]) -> f32 {
    let mut lanes = [0f32; LANES];
    for chunk in x.as_chunks::<LANES>().0 {
        for l in 0..LANES {
            lanes[l] += chunk[l] * chunk[l];
        }
    }
    total(&lanes) / N as f32
}

/// The weights of a block without an importance: an error in a large value counts more, and `evenness` says how much
/// all errors count the same.
#[inline]
pub(super) fn square_weights<const N: usize>(x: &[f32; N], evenness: f32) -> [f32; N] {
    let even = evenness * mean_square(x);
    x.map(|value| value * value + even)
}

/// Which inverse scales to try: `(levels + first + step * k) / range` for k in `0..count`.
#[derive(Clone, Copy)]
pub(super) struct Trials {
    /// Offset of the first trial, in levels.
    pub(super) first: f32,
    /// Distance of the trials, in levels.
    pub(super) step: f32,
    /// Number of trials.
    pub(super) count: u32,
}

/// The levels `end + (k - N / 2) * step`: trials for [`fit_scales`] around the end of a range of codes.
pub(super) const fn around<const N: usize>(end: f32, step: f32) -> [f32; N] {
    let mut levels = [0.0; N];
    let mut k = 0;
    while k < N {
        levels[k] = end + (k as f32 - (N / 2) as f32) * step;
        k += 1;
    }
    levels
}

/// `value = scale * code + floor`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    pub(super) scale: f32,
    pub(super) floor: f32,
}

/// Eight blocks side by side: `columns[i][lane]` is value `i` of block `lane`. Every step of a search is the same for
/// all eight, so the compiler can put them in vectors, and no sum runs across a vector.
pub(super) type Columns<const N: usize> = [Lanes; N];

/// One number for each of eight blocks.
pub(super) type Lanes = [f32; LANES];

/// Eight blocks, one per lane.
#[inline]
pub(super) fn columns<const N: usize>(blocks: &[[f32; N]; LANES]) -> Columns<N> {
    let mut columns = [[0f32; LANES]; N];
    for (i, column) in columns.iter_mut().enumerate() {
        for lane in 0..LANES {
            column[lane] = blocks[lane][i];
        }
    }
    columns
}

/// Fits codes `0..=top` with a scale and a floor that is at most `highest_floor`, for eight blocks at once. `x` must be
/// normalised.
#[inline]
pub(super) fn fit_lines<const N: usize>(
    x: &Columns<N>,
    weights: &Columns<N>,
    top: f32,
    highest_floor: f32,
    trials: Trials,
) -> [Line; LANES] {
    let (mut low, mut high) = ([highest_floor; LANES], [f32::NEG_INFINITY; LANES]);
    let mut w = [0f32; LANES];
    for (x, weight) in x.iter().zip(weights) {
        for l in 0..LANES {
            low[l] = if x[l] < low[l] { x[l] } else { low[l] };
            high[l] = if x[l] > high[l] { x[l] } else { high[l] };
            w[l] += weight[l];
        }
    }
    // A block that is one value at its floor has no range: its scale stays zero.
    let range: Lanes = array::from_fn(|l| high[l] - low[l]);
    let per_level: Lanes = array::from_fn(|l| if range[l] > 1e-30 { 1.0 / range[l] } else { 0.0 });
    let mut scale: Lanes = array::from_fn(|l| if range[l] > 1e-30 { range[l] / top } else { 0.0 });
    let mut floor = low;
    let mut best = [f32::INFINITY; LANES];
    for k in 0..trials.count {
        let levels = top + trials.first + trials.step * k as f32;
        let inverse: Lanes = array::from_fn(|l| levels * per_level[l]);
        let CodeSums { wq, wqq, wr, wrq, wrr } = code_sums(x, weights, &low, &inverse, top);
        for l in 0..LANES {
            let step = range[l] / levels;
            let determinant = w[l] * wqq[l] - wq[l] * wq[l];
            // The line that fits the residuals best, in levels: it corrects a slope of 1 and an offset of 0.
            let slope = (w[l] * wrq[l] - wr[l] * wq[l]) / determinant;
            let offset = (wqq[l] * wr[l] - wq[l] * wrq[l]) / determinant;
            let limit = (highest_floor - low[l]) * inverse[l];
            let free = offset <= limit;
            let held_slope = (wrq[l] - limit * wq[l]) / wqq[l];
            let (a, b) = (if free { slope } else { held_slope }, if free { offset } else { limit });
            let error = a * a * wqq[l] + b * b * w[l] + 2.0 * (a * b * wq[l] - a * wrq[l] - b * wr[l]) + wrr[l];
            let error = error * step * step;
            // Where all codes are equal the quotients are infinite or NaN, and no comparison holds.
            let better = (error < best[l]) & (a > -1.0) & (determinant > 0.0);
            best[l] = if better { error } else { best[l] };
            scale[l] = if better { step + a * step } else { scale[l] };
            floor[l] = if better { low[l] + b * step } else { floor[l] };
        }
    }
    array::from_fn(|l| Line { scale: scale[l], floor: floor[l].min(highest_floor) })
}

/// Weighted sums over the codes q of a trial and the residuals r, what is left of each level after rounding. Residuals
/// are small, so no sum loses the error of a good fit in the size of the values.
struct CodeSums {
    wq: Lanes,
    wqq: Lanes,
    wr: Lanes,
    wrq: Lanes,
    wrr: Lanes,
}

#[inline(always)]
fn code_sums<const N: usize>(x: &Columns<N>, weights: &Columns<N>, low: &Lanes, inverse: &Lanes, top: f32) -> CodeSums {
    let zero = [0f32; LANES];
    let mut sums = CodeSums { wq: zero, wqq: zero, wr: zero, wrq: zero, wrr: zero };
    for (x, weight) in x.iter().zip(weights) {
        let level: Lanes = array::from_fn(|l| (x[l] - low[l]) * inverse[l]);
        let q: Lanes = array::from_fn(|l| nearest(level[l]).min(top));
        let r: Lanes = array::from_fn(|l| level[l] - q[l]);
        let weighted_code: Lanes = array::from_fn(|l| weight[l] * q[l]);
        let weighted_rest: Lanes = array::from_fn(|l| weight[l] * r[l]);
        add(&mut sums.wq, &weighted_code);
        add(&mut sums.wqq, &array::from_fn(|l| weighted_code[l] * q[l]));
        add(&mut sums.wr, &weighted_rest);
        add(&mut sums.wrq, &array::from_fn(|l| weighted_rest[l] * q[l]));
        add(&mut sums.wrr, &array::from_fn(|l| weighted_rest[l] * r[l]));
    }
    sums
}

#[inline(always)]
fn add(sums: &mut Lanes, terms: &Lanes) {
    for l in 0..LANES {
        sums[l] += terms[l];
    }
}

/// The units that the scales and floors of a super-block are stored in.
#[derive(Clone, Copy)]
pub(super) struct Units {
    /// What the code 1 of a scale stands for.
    pub(super) scale: f32,
    /// What the code 1 of a floor stands for, negated.
    pub(super) floor: f32,
    /// The largest code of both.
    pub(super) top: f32,
}

/// Rounds lines to `units`: the two neighbours of the nearest scale are tried as well, each with the floor that suits
/// it, and the smallest weighted error wins. Gives the codes of the scales and of the negated floors.
#[inline]
pub(super) fn round_lines<const N: usize>(
    x: &Columns<N>,
    weights: &Columns<N>,
    lines: &[Line; LANES],
    top: f32,
    units: Units,
) -> (Lanes, Lanes) {
    let per_scale = if units.scale > 0.0 { 1.0 / units.scale } else { 0.0 };
    let per_floor = if units.floor > 0.0 { 1.0 / units.floor } else { 0.0 };
    let mut w = [0f32; LANES];
    weights.iter().for_each(|weight| add(&mut w, weight));
    let nearest_scale: Lanes = array::from_fn(|l| nearest(within(lines[l].scale * per_scale, 0.0, units.top)));
    let nearest_floor: Lanes = array::from_fn(|l| nearest(within(-lines[l].floor * per_floor, 0.0, units.top)));
    let (mut best, mut scale, mut floor) = ([f32::INFINITY; LANES], nearest_scale, nearest_floor);
    for delta in [-1.0, 0.0, 1.0] {
        let code: Lanes = array::from_fn(|l| within(nearest_scale[l] + delta, 0.0, units.top));
        let slope: Lanes = array::from_fn(|l| code[l] * units.scale);
        let inverse: Lanes = array::from_fn(|l| if slope[l] > 0.0 { 1.0 / slope[l] } else { 0.0 });
        let start: Lanes = array::from_fn(|l| lines[l].floor);
        let (missed, _) = misses(x, weights, &start, &slope, &inverse, top);
        // What is missed on the average is what the floor has to move by.
        let moved: Lanes = array::from_fn(|l| (start[l] + missed[l] / w[l]) * -per_floor);
        let floor_code: Lanes = array::from_fn(|l| nearest(within(moved[l], 0.0, units.top)));
        let stored: Lanes = array::from_fn(|l| -floor_code[l] * units.floor);
        let (_, error) = misses(x, weights, &stored, &slope, &inverse, top);
        for l in 0..LANES {
            let better = error[l] < best[l];
            best[l] = if better { error[l] } else { best[l] };
            scale[l] = if better { code[l] } else { scale[l] };
            floor[l] = if better { floor_code[l] } else { floor[l] };
        }
    }
    (scale, floor)
}

/// Weighted sums of what a line misses and of its square.
#[inline(always)]
fn misses<const N: usize>(
    x: &Columns<N>,
    weights: &Columns<N>,
    floor: &Lanes,
    slope: &Lanes,
    inverse: &Lanes,
    top: f32,
) -> (Lanes, Lanes) {
    let (mut missed, mut squared) = ([0f32; LANES], [0f32; LANES]);
    for (x, weight) in x.iter().zip(weights) {
        let above: Lanes = array::from_fn(|l| x[l] - floor[l]);
        let q: Lanes = array::from_fn(|l| nearest(within(above[l] * inverse[l], 0.0, top)));
        let miss: Lanes = array::from_fn(|l| above[l] - slope[l] * q[l]);
        let weighted: Lanes = array::from_fn(|l| weight[l] * miss[l]);
        add(&mut missed, &weighted);
        add(&mut squared, &array::from_fn(|l| weighted[l] * miss[l]));
    }
    (missed, squared)
}

/// Fits `value = scale * snap(level)` for eight blocks at once, trying to put the value of largest magnitude at each of
/// `levels`. Gives zero for a block of zeros. `x` must be normalised.
#[inline]
pub(super) fn fit_scales<const N: usize>(
    x: &Columns<N>,
    weights: &Columns<N>,
    levels: &[f32],
    snap: impl Fn(f32) -> f32,
) -> Lanes {
    let mut largest = [0f32; LANES];
    for x in x {
        for l in 0..LANES {
            largest[l] = if x[l].abs() > largest[l].abs() { x[l] } else { largest[l] };
        }
    }
    // Below this the quotients overflow; the block is zero beside its neighbours, which share the unit.
    let per_level: Lanes = array::from_fn(|l| if largest[l].abs() > 1e-15 { 1.0 / largest[l] } else { 0.0 });
    let (mut best, mut scale) = ([0f32; LANES], [0f32; LANES]);
    for level in levels {
        let inverse: Lanes = array::from_fn(|l| level * per_level[l]);
        let (mut wxq, mut wqq) = ([0f32; LANES], [0f32; LANES]);
        for (x, weight) in x.iter().zip(weights) {
            let q: Lanes = array::from_fn(|l| snap(x[l] * inverse[l]));
            let weighted: Lanes = array::from_fn(|l| weight[l] * q[l]);
            add(&mut wxq, &array::from_fn(|l| weighted[l] * x[l]));
            add(&mut wqq, &array::from_fn(|l| weighted[l] * q[l]));
        }
        for l in 0..LANES {
            let fitted = wxq[l] / wqq[l];
            // NaN (all codes zero) is not greater.
            let better = wxq[l] * fitted > best[l];
            best[l] = if better { wxq[l] * fitted } else { best[l] };
            scale[l] = if better { fitted } else { scale[l] };
        }
    }
    array::from_fn(|l| if per_level[l] == 0.0 { 0.0 } else { scale[l] })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRIALS: Trials = Trials { first: -1.0, step: 0.1, count: 21 };

    #[test]
    fn normalising_is_exact_and_bounded_over_the_whole_range() {
        for largest in [1e-45, 1e-40, 1e-30, 0.3, 1.0, 7.5e4, 1e38, f32::MAX, f32::INFINITY] {
            let block = normalise(&[largest, -largest / 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, f32::NAN], f32::MAX).unwrap();
            assert!(block.x[0] > 1e-9 && block.x[0] < 512.0, "{largest}: {}", block.x[0]);
            assert_eq!(block.x[0] * block.unit, largest.min(f32::MAX));
            assert_eq!(block.x[7], 0.0);
        }
        assert!(normalise(&[0.0; 8], f32::MAX).is_none());
    }

    #[test]
    fn a_line_through_exact_codes_is_found() {
        let x: [f32; 32] = std::array::from_fn(|i| 0.1 * (i % 16) as f32 - 0.4);
        let [line, ..] = fit_lines(&columns(&[x; 8]), &[[1.0; 8]; 32], 15.0, 0.0, TRIALS);
        assert!((line.scale - 0.1).abs() < 1e-5 && (line.floor + 0.4).abs() < 1e-5, "{line:?}");
    }

    #[test]
    fn the_floor_stays_below_its_limit() {
        let x: [f32; 32] = std::array::from_fn(|i| 1.0 + 0.01 * i as f32);
        let [line, ..] = fit_lines(&columns(&[x; 8]), &[[1.0; 8]; 32], 15.0, 0.0, TRIALS);
        assert!(line.floor <= 0.0 && line.scale > 0.0);
    }
}
