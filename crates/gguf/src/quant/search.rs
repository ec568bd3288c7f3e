//! The searches for the scale of a block: try several inverse scales, round, fit the best scale to the rounded codes by
//! weighted least squares, keep the trial with the smallest weighted error. No format is known here.

use super::blocks::{LANES, extreme, max_abs, min_max, sum, total};

/// Adding and subtracting 1.5 * 2^23 leaves the nearest integer. It is plain SSE2, which a call of `round` is not.
const ROUNDER: f32 = 12_582_912.0;

/// The nearest integer (halves to even), for |value| below 2^22.
#[inline(always)]
pub(super) fn nearest(value: f32) -> f32 {
    (value + ROUNDER) - ROUNDER
}

/// `value` within `low..=high`; NaN becomes `low`. It compiles to two instructions, unlike `f32::clamp`.
#[inline(always)]
pub(super) fn within(value: f32, low: f32, high: f32) -> f32 {
    let value = if value > low { value } else { low };
    if value < high { value } else { high }
}

/// A block divided by a power of two, so that squares and sums of squares neither overflow nor vanish.
pub(super) struct Normalised<const N: usize> {
    /// The values over `unit`; the largest magnitude lies in 1..2, or a little beside at the ends of f32's range.
    pub(super) x: [f32; N],
    /// A power of two.
    pub(super) unit: f32,
}

/// Normalises a block; None where all its values are zero (or NaN).
#[inline]
pub(super) fn normalise<const N: usize>(values: &[f32; N]) -> Option<Normalised<N>> {
    let largest = max_abs(values).min(f32::MAX);
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
        let finite = if magnitude > f32::MAX { f32::MAX.copysign(value) } else { value };
        *x = if magnitude >= 0.0 { finite * inverse } else { 0.0 };
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

/// `value = scale * code + floor`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    pub(super) scale: f32,
    pub(super) floor: f32,
}

/// Fits codes `0..=top` with a scale and a floor that is at most `highest_floor`. `x` must be normalised.
#[inline]
pub(super) fn fit_line<const N: usize>(
    x: &[f32; N],
    weights: &[f32; N],
    top: f32,
    highest_floor: f32,
    trials: Trials,
) -> Line {
    let (low, high) = min_max(x);
    let low = if low < highest_floor { low } else { highest_floor };
    if high <= low {
        return Line { scale: 0.0, floor: low };
    }
    let mut weighted = [0f32; N];
    let mut above = [0f32; N];
    for i in 0..N {
        weighted[i] = weights[i] * x[i];
        above[i] = x[i] - low;
    }
    let (w, wx) = (sum(weights), sum(&weighted));
    let mut best = Line { scale: (high - low) / top, floor: low };
    let mut best_gain = f32::NEG_INFINITY;
    for k in 0..trials.count {
        let inverse = (top + trials.first + trials.step * k as f32) / (high - low);
        let (wq, wqq, wxq) = code_sums(&above, weights, &weighted, inverse, top);
        let determinant = w * wqq - wq * wq;
        if determinant <= 0.0 {
            continue;
        }
        let mut line = Line { scale: (w * wxq - wx * wq) / determinant, floor: (wqq * wx - wq * wxq) / determinant };
        if line.floor > highest_floor {
            line = Line { scale: (wxq - highest_floor * wq) / wqq, floor: highest_floor };
        }
        // The weighted error is a constant less this gain, for any line: expand the square.
        let gain = 2.0 * (line.scale * wxq + line.floor * wx)
            - (line.scale * line.scale * wqq + 2.0 * line.scale * line.floor * wq + line.floor * line.floor * w);
        if gain > best_gain && line.scale > 0.0 {
            best_gain = gain;
            best = line;
        }
    }
    best
}

/// Sums of w q, w q q and w x q for the codes `q` that `inverse` leads to.
#[inline(always)]
fn code_sums<const N: usize>(
    above: &[f32; N],
    weights: &[f32; N],
    weighted: &[f32; N],
    inverse: f32,
    top: f32,
) -> (f32, f32, f32) {
    let (mut wq, mut wqq, mut wxq) = ([0f32; LANES], [0f32; LANES], [0f32; LANES]);
    for c in 0..N / LANES {
        for l in 0..LANES {
            let i = c * LANES + l;
            let level = above[i] * inverse;
            let q = nearest(if level < top { level } else { top });
            let weighted_code = weights[i] * q;
            wq[l] += weighted_code;
            wqq[l] += weighted_code * q;
            wxq[l] += weighted[i] * q;
        }
    }
    (total(&wq), total(&wqq), total(&wxq))
}

/// Fits `value = scale * snap(code)`, where the value of largest magnitude stands at about `reach` (the end of the code
/// range that reaches farther). Gives zero for a block of zeros. `x` must be normalised.
#[inline]
pub(super) fn fit_scale<const N: usize>(
    x: &[f32; N],
    weights: &[f32; N],
    reach: f32,
    trials: Trials,
    snap: impl Fn(f32) -> f32,
) -> f32 {
    let largest = extreme(x);
    // Below this the quotients overflow; the block is zero beside its neighbours, which share the unit.
    if largest.abs() < 1e-15 {
        return 0.0;
    }
    let (mut best, mut scale) = (0.0, 0.0);
    for k in 0..trials.count {
        let inverse = (reach + trials.first + trials.step * k as f32) / largest;
        let (mut wxq, mut wqq) = ([0f32; LANES], [0f32; LANES]);
        for c in 0..N / LANES {
            for l in 0..LANES {
                let i = c * LANES + l;
                let q = snap(x[i] * inverse);
                let weighted_code = weights[i] * q;
                wxq[l] += weighted_code * x[i];
                wqq[l] += weighted_code * q;
            }
        }
        let (wxq, wqq) = (total(&wxq), total(&wqq));
        if wqq > 0.0 && wxq * wxq > best * wqq {
            scale = wxq / wqq;
            best = wxq * scale;
        }
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normalising_is_exact_and_bounded_over_the_whole_range() {
        for largest in [1e-45, 1e-40, 1e-30, 0.3, 1.0, 7.5e4, 1e38, f32::MAX, f32::INFINITY] {
            let block = normalise(&[largest, -largest / 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, f32::NAN]).unwrap();
            assert!(block.x[0] > 1e-8 && block.x[0] < 512.0, "{largest}: {}", block.x[0]);
            assert_eq!(block.x[0] * block.unit, largest.min(f32::MAX));
            assert_eq!(block.x[7], 0.0);
        }
        assert!(normalise(&[0.0; 8]).is_none());
    }

    #[test]
    fn a_line_through_exact_codes_is_found() {
        let x: [f32; 32] = std::array::from_fn(|i| 0.1 * (i % 16) as f32 - 0.4);
        let line = fit_line(&x, &[1.0; 32], 15.0, 0.0, Trials { first: -1.0, step: 0.1, count: 21 });
        assert!((line.scale - 0.1).abs() < 1e-5 && (line.floor + 0.4).abs() < 1e-5, "{line:?}");
    }

    #[test]
    fn the_floor_stays_below_its_limit() {
        let x: [f32; 32] = std::array::from_fn(|i| 1.0 + 0.01 * i as f32);
        let line = fit_line(&x, &[1.0; 32], 15.0, 0.0, Trials { first: -1.0, step: 0.1, count: 21 });
        assert!(line.floor <= 0.0 && line.scale > 0.0);
    }
}
