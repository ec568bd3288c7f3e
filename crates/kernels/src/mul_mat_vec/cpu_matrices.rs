//! Rows times panels on 64-bit ARM with i8mm: an instruction multiplies two rows of eight bytes with two activations of eight and adds to
//! four sums, of both activations for the first row, then for the second.

use std::arch::aarch64::{
    float32x4_t, vcombine_f32, vcvtq_f32_s32, vdup_n_f32, vdupq_n_f32, vdupq_n_s8, vdupq_n_s32, vfmaq_f32, vmmlaq_s32,
    vmulq_f32, vreinterpretq_f32_f64, vreinterpretq_f64_f32, vreinterpretq_s8_s64, vreinterpretq_s64_s8, vtrn1q_f64,
    vtrn1q_s64, vtrn2q_f64, vtrn2q_s64,
};
use std::array::from_fn;

use fearless_simd::Neon;
use multiversion::multiversion;
use multiversion::target::match_target;

use super::cpu_bytes::{Panel, Results, WIDTH, Weights, bytes, raised};
use super::cpu_ints::DEPTH;
use super::cpu_neon::{floats, store};
use super::cpu_quants::BLOCK;

/// Rows times a panel by small matrices.
#[multiversion(targets("aarch64+neon+i8mm"))]
pub(super) fn meet_by_matrices(a: Weights<'_>, x: Panel<'_>, results: Results<'_>) {
    match_target! {
        "aarch64+neon+i8mm" => match (a.two_scales, x.used > 4) {
            (false, false) => tiles::<2, false>(a, x, results),
            (false, true) => tiles::<4, false>(a, x, results),
            (true, false) => tiles::<2, true>(a, x, results),
            (true, true) => tiles::<4, true>(a, x, results),
        },
        _ => unreachable!("matrices are multiplied only where there are instructions for that: {} {} {}", a.two_scales, x.used, results.rows),
    }
}

#[inline]
#[target_feature(enable = "neon,i8mm")]
fn tiles<const COLS: usize, const TWO: bool>(a: Weights<'_>, x: Panel<'_>, results: Results<'_>) {
    let Results { out, stride, rows, add } = results;
    for row in (0..rows).step_by(4) {
        let a = Weights { codes: &a.codes[row * DEPTH..], scales: &a.scales[row * 16..], ..a };
        let results = Results { out: &mut out[row * stride..], stride, rows: rows - row, add };
        match rows - row {
            3.. => tile::<2, COLS, TWO>(a, x, results),
            _ => tile::<1, COLS, TWO>(a, x, results),
        }
    }
}

/// The first halves of two vectors, then the second ones.
#[inline]
#[target_feature(enable = "neon")]
fn across(a: float32x4_t, b: float32x4_t) -> [float32x4_t; 2] {
    let [a, b] = [vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)];
    [vreinterpretq_f32_f64(vtrn1q_f64(a, b)), vreinterpretq_f32_f64(vtrn2q_f64(a, b))]
}

/// `PAIRS` pairs of rows times `COLS` pairs of activations. A row that is not there is the one before it once more.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn tile<const PAIRS: usize, const COLS: usize, const TWO: bool>(a: Weights<'_>, x: Panel<'_>, results: Results<'_>) {
    let neon = Neon::assume_supported();
    let Results { out, stride, rows, add } = results;
    let pair: [[usize; 2]; PAIRS] = from_fn(|p| [2 * p, (2 * p + 1).min(rows - 1)]);
    let mut sums = [[vdupq_n_f32(0.0); COLS]; PAIRS];
    if add {
        for (pair, sums) in pair.iter().zip(&mut sums) {
            for (w, sums) in sums.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let first = floats(neon, &out[pair[0] * stride + 4 * w..]);
                *sums = across(first, floats(neon, &out[pair[1] * stride + 4 * w..]));
            }
        }
    }
    for (b, (block, x_scales)) in x.blocks.iter().zip(x.scales).enumerate() {
        // Eight codes of each of two rows, four times. Not by closures: such are not compiled into the function that has the instructions.
        let mut codes = [[vdupq_n_s8(0); 4]; PAIRS];
        for (codes, [first, second]) in codes.iter_mut().zip(pair) {
            let first = &a.codes[first * DEPTH + b * BLOCK..][..BLOCK];
            let second = &a.codes[second * DEPTH + b * BLOCK..][..BLOCK];
            for half in 0..2 {
                let first = vreinterpretq_s64_s8(bytes(neon, &first[16 * half..]));
                let second = vreinterpretq_s64_s8(bytes(neon, &second[16 * half..]));
                codes[2 * half] = vreinterpretq_s8_s64(vtrn1q_s64(first, second));
                codes[2 * half + 1] = vreinterpretq_s8_s64(vtrn2q_s64(first, second));
            }
        }
        let mut factors = [vdupq_n_f32(0.0); COLS];
        for (w, factors) in factors.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let scales = floats(neon, &x_scales[4 * w..]);
            *factors = across(scales, scales);
        }
        let mut whole = [[vdupq_n_s32(0); COLS]; PAIRS];
        // Adds the products of eight elements, the high or the low bytes.
        macro_rules! add_eight {
            ($part:literal, $eight:literal) => {
                for c in 0..COLS {
                    let x = bytes(neon, &block[(4 * $part + $eight) * 8 * WIDTH + 16 * c..]);
                    for p in 0..PAIRS {
                        whole[p][c] = vmmlaq_s32(whole[p][c], codes[p][$eight], x);
                    }
                }
            };
        }
        macro_rules! end {
            ($scale:literal) => {
                for p in 0..PAIRS {
                    let at = 2 * b + $scale;
                    let first = vdup_n_f32(a.scales[pair[p][0] * 16 + at]);
                    let scales = vcombine_f32(first, vdup_n_f32(a.scales[pair[p][1] * 16 + at]));
                    for c in 0..COLS {
                        let product = vmulq_f32(vcvtq_f32_s32(whole[p][c]), factors[c]);
                        sums[p][c] = vfmaq_f32(sums[p][c], product, scales);
                    }
                }
            };
        }
        if TWO {
            add_eight!(0, 0);
            add_eight!(0, 1);
            whole = raised(whole);
            add_eight!(1, 0);
            add_eight!(1, 1);
            end!(0);
            whole = [[vdupq_n_s32(0); COLS]; PAIRS];
            add_eight!(0, 2);
            add_eight!(0, 3);
            whole = raised(whole);
            add_eight!(1, 2);
            add_eight!(1, 3);
            end!(1);
        } else {
            add_eight!(0, 0);
            add_eight!(0, 1);
            add_eight!(0, 2);
            add_eight!(0, 3);
            whole = raised(whole);
            add_eight!(1, 0);
            add_eight!(1, 1);
            add_eight!(1, 2);
            add_eight!(1, 3);
            end!(0);
        }
    }
    for (pair, sums) in pair.iter().zip(&sums) {
        for (w, sums) in sums.as_chunks::<2>().0.iter().enumerate() {
            let both = across(sums[0], sums[1]);
            // The second row last: where it is not there, it is the first, and holds the same.
            store(neon, both[0], &mut out[pair[0] * stride + 4 * w..]);
            store(neon, both[1], &mut out[pair[1] * stride + 4 * w..]);
        }
    }
}
