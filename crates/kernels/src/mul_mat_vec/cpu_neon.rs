//! Products of words on 64-bit ARM. Its vectors are short, and an instruction multiplies four words and adds the products to four
//! sums: products of a whole block are added up before they become floats.

use std::arch::aarch64::{
    float32x4_t, int16x8_t, int32x4_t, vaddq_s32, vcvtq_f32_s32, vdupq_n_f32, vdupq_n_s32, vfmaq_n_f32, vget_low_s16,
    vmlal_high_s16, vmlal_s16, vmulq_f32, vpaddq_s32, vreinterpretq_s16_s32,
};

use fearless_simd::prelude::*;
use fearless_simd::{Neon, f32x4, i16x8};

use super::cpu_ints::{DEPTH, Panel, Weights};
use super::cpu_quants::BLOCK;

#[inline(always)]
fn words(neon: Neon, x: &[i16; 8]) -> int16x8_t {
    i16x8::load_array_ref(neon, x).into()
}

#[inline(always)]
pub(super) fn floats(neon: Neon, x: &[f32]) -> float32x4_t {
    f32x4::load_array_ref(neon, x.first_chunk().expect("four floats")).into()
}

/// Puts four floats to the beginning of a slice.
#[inline(always)]
pub(super) fn store(neon: Neon, x: float32x4_t, to: &mut [f32]) {
    let x: f32x4<Neon> = x.simd_into(neon);
    x.store_array(to.first_chunk_mut().expect("four floats"));
}

/// Declares functions of a token that are an instruction or two each.
macro_rules! instructions {
    ($($(#[$meta:meta])* fn $name:ident($simd:ident $(, $arg:ident : $ty:ty)*) -> $result:ty { $($body:tt)* })*) => {
        $(
            fearless_simd::kernel!(
                $(#[$meta])*
                #[inline(always)]
                fn $name($simd: Neon $(, $arg: $ty)*) -> $result { $($body)* }
            );
        )*
    };
}

instructions! {
    fn none(neon) -> int32x4_t {
        vdupq_n_s32(0)
    }

    fn nothing(neon) -> float32x4_t {
        vdupq_n_f32(0.0)
    }

    /// Adds the products of the first four words.
    fn add_low(neon, sum: int32x4_t, a: int16x8_t, x: int16x8_t) -> int32x4_t {
        vmlal_s16(sum, vget_low_s16(a), vget_low_s16(x))
    }

    /// Adds the products of the last four words.
    fn add_high(neon, sum: int32x4_t, a: int16x8_t, x: int16x8_t) -> int32x4_t {
        vmlal_high_s16(sum, a, x)
    }

    /// Adds whole numbers times a factor to floats.
    fn add_scaled(neon, sum: float32x4_t, whole: int32x4_t, factor: f32) -> float32x4_t {
        vfmaq_n_f32(sum, vcvtq_f32_s32(whole), factor)
    }

    /// The same with a factor for each number besides.
    fn add_scaled_each(neon, sum: float32x4_t, whole: int32x4_t, factors: float32x4_t, factor: f32) -> float32x4_t {
        vfmaq_n_f32(sum, vmulq_f32(vcvtq_f32_s32(whole), factors), factor)
    }

    fn both(neon, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        vaddq_s32(a, b)
    }

    /// Sums of neighbours, of a and then of b.
    fn neighbours(neon, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        vpaddq_s32(a, b)
    }

    /// A pair of words, four times.
    fn pairs(neon, pair: i32) -> int16x8_t {
        vreinterpretq_s16_s32(vdupq_n_s32(pair))
    }
}

/// Adds the products of a piece to the first four of sixteen partial sums. The thirty-two products of a block fit 32 bits together.
#[inline(always)]
pub(super) fn add_dots(neon: Neon, a: &[i16], x: &[i16], scales: &[f32], x_scales: &[f32], sums: &mut [f32; 16]) {
    let mut sum = floats(neon, sums);
    let blocks = a.as_chunks::<BLOCK>().0.iter().zip(x.as_chunks::<BLOCK>().0);
    for ((a, x), (scale, x_scale)) in blocks.zip(scales.iter().zip(x_scales)) {
        // Two sums, so that one need not wait for the other.
        let (mut even, mut odd) = (none(neon), none(neon));
        for (a, x) in a.as_chunks::<8>().0.iter().zip(x.as_chunks::<8>().0) {
            let (a, x) = (words(neon, a), words(neon, x));
            even = add_low(neon, even, a, x);
            odd = add_high(neon, odd, a, x);
        }
        sum = add_scaled(neon, sum, both(neon, even, odd), scale * x_scale);
    }
    store(neon, sum, sums);
}

/// Rows times a panel of eight activations; results are added to those before if `add`.
#[inline(always)]
pub(super) fn meet(
    neon: Neon,
    rows: usize,
    a: Weights<'_>,
    x: Panel<'_>,
    (out, stride): (&mut [f32], usize),
    add: bool,
) {
    let mut row = 0;
    while row < rows {
        let a = Weights { codes: &a.codes[row * DEPTH / 2..], scales: &a.scales[row * 8..], ..a };
        let out = (&mut out[row * stride..], stride);
        row += match (rows - row, x.used > 4) {
            (4.., true) => tile::<4, 2>(neon, a, x, out, add),
            (4.., false) => tile::<4, 1>(neon, a, x, out, add),
            (_, true) => tile::<1, 2>(neon, a, x, out, add),
            (_, false) => tile::<1, 1>(neon, a, x, out, add),
        };
    }
}

/// `ROWS` rows times `WIDE` times four activations; gives the number of rows.
#[inline(always)]
fn tile<const ROWS: usize, const WIDE: usize>(
    neon: Neon,
    a: Weights<'_>,
    x: Panel<'_>,
    (out, stride): (&mut [f32], usize),
    add: bool,
) -> usize {
    let mut sums = [[nothing(neon); WIDE]; ROWS];
    if add {
        for (r, sums) in sums.iter_mut().enumerate() {
            for (w, sum) in sums.iter_mut().enumerate() {
                *sum = floats(neon, &out[r * stride + 4 * w..]);
            }
        }
    }
    let rows: [&[i32]; ROWS] = std::array::from_fn(|r| &a.codes[r * DEPTH / 2..][..a.depth * BLOCK / 2]);
    let (pairs_of_x, _) = x.codes[..2 * x.width * a.depth * BLOCK / 2].as_chunks::<16>();
    for block in 0..a.depth {
        // Products of the first elements of pairs and of the second ones; two activations in each sum.
        let mut whole = [[[none(neon); 2]; WIDE]; ROWS];
        for pair in block * BLOCK / 2..(block + 1) * BLOCK / 2 {
            let x = pairs_of_x[pair].as_chunks::<8>().0;
            for r in 0..ROWS {
                let a = pairs(neon, rows[r][pair]);
                for w in 0..WIDE {
                    let x = words(neon, &x[w]);
                    whole[r][w] = [add_low(neon, whole[r][w][0], a, x), add_high(neon, whole[r][w][1], a, x)];
                }
            }
        }
        let x_scales = &x.scales[block * x.width..][..4 * WIDE];
        for r in 0..ROWS {
            for w in 0..WIDE {
                let [low, high] = whole[r][w];
                let (whole, factors) = (neighbours(neon, low, high), floats(neon, &x_scales[4 * w..]));
                sums[r][w] = add_scaled_each(neon, sums[r][w], whole, factors, a.scales[r * 8 + block]);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (w, sum) in sums.iter().enumerate() {
            store(neon, *sum, &mut out[r * stride + 4 * w..]);
        }
    }
    ROWS
}
