//! `rms_norm` of single rows at the speed of the CPU, for operations that norm on their way.

use fearless_simd::{Simd, dispatch};

use crate::simd::level;

/// x / sqrt(mean(x^2) + eps) * weight, in place.
pub(crate) fn norm_row(row: &mut [f32], weight: Option<&[f32]>, eps: f32) {
    dispatch!(level(), simd => {
        let mean = squares(simd, row) / row.len() as f64;
        let factor = (1.0 / (mean + f64::from(eps)).sqrt()) as f32;
        match weight {
            Some(weight) => row.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * factor * w),
            None => row.iter_mut().for_each(|x| *x *= factor),
        }
    });
}

/// The sum of the squares.
#[inline(always)]
fn squares<S: Simd>(_: S, x: &[f32]) -> f64 {
    // Sums side by side need not wait for each other.
    let mut sums = [0.0; 16];
    let (sixteens, rest) = x.as_chunks::<16>();
    for x in sixteens {
        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += f64::from(*x) * f64::from(*x));
    }
    sums.iter().sum::<f64>() + rest.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>()
}
