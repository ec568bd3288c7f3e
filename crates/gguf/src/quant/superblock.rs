//! What the super-blocks of 256 share when they are written: sub-blocks with their own scales, quantised in turn under
//! one f16 scale (and one f16 minimum). Where the bits go lives in the files of the formats.

use std::array;

use half::f16;

use super::blocks::{LANES, LARGEST_HALF, saturate};
use super::search::{
    Line, Normalised, Trials, Units, columns, fit_lines, fit_scales, mean_square, nearest, normalise, round_lines,
    square_weights, weigh, within,
};

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
    /// Constant part of the weight of an error; at 0 errors are weighted by magnitude alone.
    pub(super) evenness: f32,
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
    // The farthest that dmin reaches; beyond it the scales would not fit in f16.
    let limit = LARGEST_HALF * shape.scale_top;
    let Some(Normalised { x, unit }) = normalise(values, limit) else { return fit };
    let spread = mean_square(&x);
    let subs = x.as_chunks::<N>().0;
    let mut lines = [Line { scale: 0.0, floor: 0.0 }; SUBS];
    // Room for all weights: they are needed again when the scales are rounded.
    let mut weights = [[0f32; N]; SUBS];
    for (j, weights) in weights.iter_mut().enumerate() {
        *weights = match importance {
            Some(importance) => weigh(&subs[j], &importance.as_chunks::<N>().0[j], spread),
            None => magnitude_weights(&subs[j], shape.evenness),
        };
    }
    let (eights, weights) = (subs.as_chunks::<LANES>().0, weights.as_chunks::<LANES>().0);
    for (j, (x, weights)) in eights.iter().zip(weights).enumerate() {
        let fitted = fit_lines(&columns(x), &columns(weights), shape.top, 0.0, shape.trials);
        lines[j * LANES..(j + 1) * LANES].copy_from_slice(&fitted);
    }
    let largest_scale = lines.iter().fold(0.0, |m: f32, line| m.max(line.scale));
    let largest_min = lines.iter().fold(0.0, |m: f32, line| m.max(-line.floor));
    fit.d = saturate(largest_scale / shape.scale_top * unit);
    fit.dmin = saturate(largest_min / shape.scale_top * unit);
    let units = Units { scale: fit.d.to_f32() / unit, floor: fit.dmin.to_f32() / unit, top: shape.scale_top };
    for (j, (x, weights)) in eights.iter().zip(weights).enumerate() {
        let lines: &[Line; LANES] = &lines.as_chunks().0[j];
        let (scales, mins) = round_lines(&columns(x), &columns(weights), lines, shape.top, units);
        for lane in 0..LANES {
            (fit.scales[j * LANES + lane], fit.mins[j * LANES + lane]) = (scales[lane] as u8, mins[lane] as u8);
        }
    }
    for (j, sub) in subs.iter().enumerate() {
        let (scale, min) = (f32::from(fit.scales[j]) * units.scale, f32::from(fit.mins[j]) * units.floor);
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        for (code, &value) in fit.codes[j * N..(j + 1) * N].iter_mut().zip(sub) {
            *code = nearest(within((value + min) * inverse, 0.0, shape.top)) as u8;
        }
    }
    fit
}

/// The weights without an importance: large values count more, but not alone.
#[inline]
fn magnitude_weights<const N: usize>(x: &[f32; N], evenness: f32) -> [f32; N] {
    let typical = mean_square(x).sqrt() * evenness;
    // The little extra keeps the sums of a block of zeros away from 0 / 0.
    x.map(|value| typical + value.abs() + 1e-12)
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
    /// Where to try to put the value of largest magnitude of a sub-block.
    pub(super) levels: &'static [f32],
    /// Lowest code of a scale; the highest is one less in magnitude.
    pub(super) lowest_scale: f32,
    /// Constant part of the weight of an error; at 0 errors are weighted by the square of the value alone.
    pub(super) evenness: f32,
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
    // The farthest that d reaches.
    let limit = LARGEST_HALF * shape.lowest_scale * shape.levels[0];
    let Some(Normalised { x, unit }) = normalise(values, limit) else { return fit };
    let spread = mean_square(&x);
    let subs = x.as_chunks::<N>().0;
    let mut scales = [0f32; SUBS];
    for (j, eight) in subs.as_chunks::<LANES>().0.iter().enumerate() {
        let weights = array::from_fn(|lane| match importance {
            Some(importance) => weigh(&eight[lane], &importance.as_chunks::<N>().0[j * LANES + lane], spread),
            None => square_weights(&eight[lane], shape.evenness),
        });
        let fitted = fit_scales(&columns(eight), &columns(&weights), shape.levels, snap);
        scales[j * LANES..(j + 1) * LANES].copy_from_slice(&fitted);
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
