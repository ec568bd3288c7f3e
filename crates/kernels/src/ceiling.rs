//! What the CPU can do at best, measured: how fast memory is read and how fast numbers are multiplied and added, by all threads.

use std::hint::black_box;
use std::time::Instant;

use fearless_simd::prelude::*;
use fearless_simd::{Simd, dispatch, f32x16};
use rayon::prelude::*;

use crate::simd::level;

/// Bytes that are read: more than caches hold.
const BYTES: usize = 256 << 20;
/// The fastest of this many runs counts.
const RUNS: usize = 4;
/// Sums of 16 numbers that one thread keeps at once: enough to fill the units while each waits for its turn, and few enough to
/// stay in registers.
const CHAINS: usize = 6;
const ROUNDS: usize = 2_000_000;

fn fastest(run: impl Fn()) -> f64 {
    let seconds = (0..RUNS).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    seconds.fold(f64::INFINITY, f64::min).max(1e-9)
}

/// Bytes a second that all threads read together.
pub fn read() -> f64 {
    let words = vec![1u64; BYTES / 8];
    let piece = words.len().div_ceil(rayon::current_num_threads() * 4);
    let sum = |piece: &[u64]| {
        let mut sums = [0u64; 16];
        for chunk in piece.as_chunks::<16>().0 {
            sums.iter_mut().zip(chunk).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
        }
        sums.iter().fold(0u64, |all, sum| all.wrapping_add(*sum))
    };
    let all = || words.par_chunks(piece).map(sum).reduce(|| 0, u64::wrapping_add);
    BYTES as f64
        / fastest(|| {
            black_box(all());
        })
}

/// F32 multiplications and additions a second of all threads together.
pub fn multiply_add() -> f64 {
    let threads = rayon::current_num_threads();
    let work = |seed: usize| dispatch!(level(), simd => chains(simd, black_box(seed as f32)));
    let all = || (0..threads).into_par_iter().map(work).sum::<f32>();
    2.0 * (16 * CHAINS * ROUNDS * threads) as f64
        / fastest(|| {
            black_box(all());
        })
}

/// Sums that depend on themselves alone, side by side.
#[inline(always)]
fn chains<S: Simd>(simd: S, summand: f32) -> f32 {
    let (factor, summand) = (f32x16::splat(simd, 0.999), f32x16::splat(simd, summand));
    let mut sums = [summand; CHAINS];
    for _ in 0..ROUNDS {
        sums.iter_mut().for_each(|sum| *sum = sum.mul_add(factor, summand));
    }
    sums.into_iter().fold(f32x16::splat(simd, 0.0), |all, sum| all + sum).as_slice().iter().sum()
}

#[cfg(test)]
mod tests {
    #[test]
    fn ceilings_are_what_machines_have() {
        let (read, multiply_add) = (super::read(), super::multiply_add());
        assert!((1e8..1e14).contains(&read), "{read}");
        assert!((1e8..1e16).contains(&multiply_add), "{multiply_add}");
    }
}
