//! What the super-blocks of 256 share when they are written: sub-blocks with their own scales, quantised in turn under
//! one f16 scale (and one f16 minimum). Where the bits go lives in the files of the formats.

use half::f16;

use super::blocks::{min_max, put_half, put_scale, saturate};
use super::search::{Line, Normalised, Trials, fit_line, fit_scale, mean_square, nearest, normalise, weigh, within};

/// Values in a super-block.
pub(super) const LEN: usize = 256;

/// A super-block of `value = d * scale * code - dmin * min`, with `SUBS` sub-blocks.
pub(super) struct Affine<const SUBS: usize> {
    pub(super) d: f16,
    pub(super) dmin: f16,
    pub(super) scales: [u8; SUBS],
    pub(super) mins: [u8; SUBS],
    pub(super) codes: [u8; LEN],
}

/// The ranges of an affine super-block.
pub(super) struct AffineShape {
    /// Largest code of a value.
    pub(super) top: f32,
    /// Largest code of a scale and of a minimum.
    pub(super) scale_top: f32,
    /// Trials per sub-block.
    pub(super) trials: Trials,
}

/// Fits a super-block of `SUBS` sub-blocks with `N` values each.
#[inline]
pub(super) fn fit_affine<const N: usize, const SUBS: usize>(
    values: &[f32; LEN],
    importance: Option<&[f32; LEN]>,
    shape: &AffineShape,
) -> Affine<SUBS> {
    let mut fit = Affine { d: f16::ZERO, dmin: f16::ZERO, scales: [0; SUBS], mins: [0; SUBS], codes: [0; LEN] };
    let Some(Normalised { x, unit }) = normalise(values) else { return fit };
    let spread = mean_square(&x);
    let subs = x.as_chunks::<N>().0;
    let mut lines = [Line { scale: 0.0, floor: 0.0 }; SUBS];
    for (j, sub) in subs.iter().enumerate() {
        let weights = match importance {
            Some(importance) => weigh(sub, &importance.as_chunks::<N>().0[j], spread),
            None => magnitude_weights(sub),
        };
        lines[j] = fit_line(sub, &weights, shape.top, 0.0, shape.trials);
    }
    let largest_scale = lines.iter().fold(0.0, |m: f32, line| m.max(line.scale));
    let largest_min = lines.iter().fold(0.0, |m: f32, line| m.max(-line.floor));
    fit.d = saturate(largest_scale / shape.scale_top * unit);
    fit.dmin = saturate(largest_min / shape.scale_top * unit);
    let (d, dmin) = (fit.d.to_f32() / unit, fit.dmin.to_f32() / unit);
    for (j, sub) in subs.iter().enumerate() {
        let scale = code_of(lines[j].scale, d, shape.scale_top);
        let min = code_of(-lines[j].floor, dmin, shape.scale_top);
        (fit.scales[j], fit.mins[j]) = (scale as u8, min as u8);
        if scale == 0.0 || d == 0.0 {
            continue;
        }
        let (inverse, offset) = (1.0 / (d * scale), dmin * min);
        for (code, &value) in fit.codes[j * N..(j + 1) * N].iter_mut().zip(sub) {
            *code = nearest(within((value + offset) * inverse, 0.0, shape.top)) as u8;
        }
    }
    fit
}

/// The weights without an importance: large values count more, but not alone.
#[inline]
fn magnitude_weights<const N: usize>(x: &[f32; N]) -> [f32; N] {
    let typical = mean_square(x).sqrt();
    // The little extra keeps the sums of a block of zeros away from 0 / 0.
    x.map(|value| typical + value.abs() + 1e-12)
}

/// The code of a scale in units of `d`.
#[inline]
fn code_of(scale: f32, d: f32, top: f32) -> f32 {
    if d == 0.0 { 0.0 } else { nearest(within(scale / d, 0.0, top)) }
}

/// A super-block of `value = d * scale * level`, with `SUBS` sub-blocks.
pub(super) struct Symmetric<const SUBS: usize> {
    pub(super) d: f16,
    pub(super) scales: [i8; SUBS],
    /// What each value is in units of its own scale, not yet rounded; within the range that can be rounded.
    pub(super) levels: [f32; LEN],
}

/// The ranges of a symmetric super-block.
pub(super) struct SymmetricShape {
    /// The end of the range of levels that reaches farther from zero.
    pub(super) reach: f32,
    /// Lowest code of a scale; the highest is one less in magnitude.
    pub(super) lowest_scale: f32,
    /// Trials per sub-block.
    pub(super) trials: Trials,
}

/// Fits a super-block of `SUBS` sub-blocks with `N` values each; `snap` rounds to the levels of the format.
#[inline]
pub(super) fn fit_symmetric<const N: usize, const SUBS: usize>(
    values: &[f32; LEN],
    importance: Option<&[f32; LEN]>,
    shape: &SymmetricShape,
    snap: impl Fn(f32) -> f32 + Copy,
) -> Symmetric<SUBS> {
    let mut fit = Symmetric { d: f16::ZERO, scales: [0; SUBS], levels: [0.0; LEN] };
    let Some(Normalised { x, unit }) = normalise(values) else { return fit };
    let spread = mean_square(&x);
    let subs = x.as_chunks::<N>().0;
    let mut scales = [0f32; SUBS];
    for (j, sub) in subs.iter().enumerate() {
        let weights = match importance {
            Some(importance) => weigh(sub, &importance.as_chunks::<N>().0[j], spread),
            None => sub.map(|value| value * value),
        };
        scales[j] = fit_scale(sub, &weights, shape.reach, shape.trials, snap);
    }
    let largest = scales.iter().fold(0.0, |m: f32, &scale| if scale.abs() > m.abs() { scale } else { m });
    fit.d = saturate(largest / shape.lowest_scale * unit);
    let d = fit.d.to_f32() / unit;
    if d == 0.0 {
        return fit;
    }
    for (j, sub) in subs.iter().enumerate() {
        let scale = nearest(within(scales[j] / d, shape.lowest_scale, -shape.lowest_scale - 1.0));
        fit.scales[j] = scale as i8;
        if scale == 0.0 {
            continue;
        }
        let inverse = 1.0 / (d * scale);
        for (level, &value) in fit.levels[j * N..(j + 1) * N].iter_mut().zip(sub) {
            *level = within(value * inverse, -1000.0, 1000.0);
        }
    }
    fit
}

/// A single block of `N` values with one scale, for the formats without super-blocks: the scale in the units of `values`.
#[inline]
pub(super) fn fit_block<const N: usize>(
    values: &[f32; N],
    importance: Option<&[f32; N]>,
    reach: f32,
    trials: Trials,
    snap: impl Fn(f32) -> f32,
) -> f32 {
    let Some(Normalised { x, unit }) = normalise(values) else { return 0.0 };
    let weights = match importance {
        Some(importance) => weigh(&x, importance, mean_square(&x)),
        None => x.map(|value| value * value),
    };
    fit_scale(&x, &weights, reach, trials, snap) * unit
}

/// The head (f16 scale, f16 floor) and the codes of a block of 32 with `value = code * d + m`, codes `0..=top`.
#[inline]
pub(super) fn put_line(x: &[f32; 32], importance: Option<&[f32; 32]>, top: f32, block: &mut [u8]) -> [u8; 32] {
    let (low, high) = min_max(x);
    let line = match (importance, normalise(x)) {
        (Some(importance), Some(Normalised { x, unit })) => {
            let weights = weigh(&x, importance, mean_square(&x));
            let trials = Trials { first: -0.9, step: 0.05, count: 37 };
            let line = fit_line(&x, &weights, top, f32::INFINITY, trials);
            Line { scale: line.scale * unit, floor: line.floor * unit }
        }
        // Divided before subtracting: the range of a block can be wider than f32.
        _ => Line { scale: high / top - low / top, floor: low },
    };
    let inverse = put_scale(block, 0, line.scale);
    let stored = put_half(block, 2, line.floor);
    // The codes count from the unrounded floor, which is the usual rule, except where f16 cannot hold it.
    let floor = if line.floor.abs() > 65504.0 { stored } else { line.floor };
    x.map(|value| within((value - floor) * inverse + 0.5, 0.0, top) as i32 as u8)
}
