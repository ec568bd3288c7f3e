//! Q2_0: 64 values in 18 bytes. f16 d @0, two-bit codes @2[16] (element e at bit 2 (e % 4) of byte e / 4).
//! value = (code - 1) * d

use super::blocks::{LARGEST_HALF, decode, encode, half_at, max_abs, put_scale};
use super::search::{Normalised, mean_square, nearest, normalise, weigh, within};

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 18], out: &mut [f32; 64]| {
        let d = half_at(block, 0);
        for (e, value) in out.iter_mut().enumerate() {
            *value = f32::from((block[2 + e / 4] >> (2 * (e % 4)) & 3) as i8 - 1) * d;
        }
    });
}

/// Where the value of largest magnitude is put, in levels: beyond 2 it is cut.
const TRIALS: [f32; 15] = [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4, 2.6, 2.8, 3.0, 3.2, 3.4, 3.7, 4.0];

/// The best of several scales of either sign, fitted to its codes: levels reach to 2 on one side and to -1 on the other. Weights that
/// are -1, 0, 1 times a scale are kept exactly.
pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 64], importance, block: &mut [u8; 18]| {
        let fitted = normalise(x, 2.0 * LARGEST_HALF).map_or(0.0, |Normalised { x, unit }| {
            let weights = importance.map_or([1.0; 64], |importance| weigh(&x, importance, mean_square(&x)));
            fit(&x, &weights) * unit
        });
        let inverse = put_scale(block, 0, fitted);
        for (byte, four) in block[2..].iter_mut().zip(x.as_chunks::<4>().0) {
            *byte = (0..4).fold(0, |bits, j| bits | ((level(four[j] * inverse) + 1.0) as u8) << (2 * j));
        }
    });
}

fn level(value: f32) -> f32 {
    within(nearest(value), -1.0, 2.0)
}

/// The scale whose levels miss least by weight.
fn fit(x: &[f32; 64], weights: &[f32; 64]) -> f32 {
    let largest = max_abs(x);
    let (mut best, mut scale) = (0.0, largest);
    for trial in TRIALS.into_iter().flat_map(|trial| [trial, -trial]) {
        let inverse = trial / largest;
        let (mut xq, mut qq) = (0.0, 0.0);
        for (x, weight) in x.iter().zip(weights) {
            let q = level(x * inverse);
            xq += weight * x * q;
            qq += weight * q * q;
        }
        if qq > 0.0 && xq * xq / qq > best {
            (best, scale) = (xq * xq / qq, xq / qq);
        }
    }
    scale
}

/// 0, 1, 2 for a level nearest to -1, 0, 1; halves away from zero.
#[inline(always)]
pub(super) fn ternary(level: f32) -> u8 {
    (within(level + 0.5f32.copysign(level), -1.0, 1.0) as i32 + 1) as u8
}
