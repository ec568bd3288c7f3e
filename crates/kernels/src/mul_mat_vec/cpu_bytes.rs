//! A few columns on machines whose widest instructions multiply bytes (AVX-512 with VNNI): a rounded element is two bytes,
//! 128 high + low, and an instruction adds sixty-four products of one of them and the bytes of a row.

use std::arch::x86_64::{
    __m512, __m512i, _mm512_add_epi32, _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_permutexvar_ps,
    _mm512_setzero_si512, _mm512_slli_epi32,
};

use fearless_simd::prelude::*;
use fearless_simd::{Avx512, f32x16, i8x64, i32x16, u8x64};

use super::cpu_codes::{BLOCK, BytePiece, Coder};
use super::cpu_nibbles::{Column, NibbleColumns};
use super::cpu_rows::Rows;

/// Elements that share a vector of scales.
const RUN: usize = 256;
/// Elements of one or more rows that become bytes at once, whole runs.
const LONG: usize = 4096;

/// Columns of two bytes for each element, filled up to whole runs with zeros, one after the other.
pub(super) struct ByteColumns {
    k: usize,
    /// Elements from column to column.
    padded: usize,
    highs: Vec<i8>,
    lows: Vec<i8>,
    /// A scale for each sixteen elements.
    scales: Vec<f32>,
    /// The sum of each sixteen rounded elements.
    wholes: Vec<f32>,
    /// The sum of each sixteen elements.
    sums: Vec<f32>,
    /// The same for rows of nibbles, which become bytes in registers.
    nibbles: NibbleColumns,
}

/// What a row has of some whole runs.
#[derive(Clone, Copy)]
struct Weights<'a> {
    codes: &'a [u8],
    scales: &'a [f32],
    offsets: &'a [f32],
    zero: f32,
}

impl ByteColumns {
    /// Of columns that are rounded: codes, a scale for each [`BLOCK`], the sum of each sixteen elements.
    pub(super) fn new(k: usize, codes: &[i16], scales: &[f32], sums: &[f32]) -> ByteColumns {
        let (n, padded) = (codes.len() / k, k.next_multiple_of(RUN));
        let sixteenths = || vec![0.0; n * padded / 16];
        let mut columns = ByteColumns {
            k,
            padded,
            highs: vec![0; n * padded],
            lows: vec![0; n * padded],
            scales: sixteenths(),
            wholes: sixteenths(),
            sums: sixteenths(),
            nibbles: NibbleColumns::default(),
        };
        for c in 0..n {
            let codes = &codes[c * k..][..k];
            let (highs, lows) = (&mut columns.highs[c * padded..], &mut columns.lows[c * padded..]);
            for ((code, high), low) in codes.iter().zip(highs).zip(lows) {
                let upper = (code + 64) >> 7;
                (*high, *low) = (upper as i8, (code - (upper << 7)) as i8);
            }
            let (at, count) = (c * padded / 16, k / 16);
            for (i, whole) in columns.wholes[at..][..count].iter_mut().enumerate() {
                *whole = codes[16 * i..][..16].iter().map(|code| i32::from(*code)).sum::<i32>() as f32;
                columns.scales[at + i] = scales[c * k / BLOCK + i / 2];
            }
            columns.sums[at..][..count].copy_from_slice(&sums[c * count..][..count]);
        }
        columns.nibbles = NibbleColumns::new(k, [&columns.highs, &columns.lows], padded, scales, sums);
        columns
    }

    /// `count` elements of column `c`, from `start` on.
    fn column(&self, c: usize, start: usize, count: usize) -> Column<'_> {
        let at = c * self.padded + start;
        Column {
            highs: &self.highs[at..][..count],
            lows: &self.lows[at..][..count],
            scales: &self.scales[at / 16..][..count / 16],
            wholes: &self.wholes[at / 16..][..count / 16],
            sums: &self.sums[at / 16..][..count / 16],
        }
    }

    /// Rows times all columns: the results of a row lie side by side.
    pub(super) fn dots(&self, avx512: Avx512, coder: Coder, rows: Rows<'_>, out: &mut [f32]) {
        let (k, n) = (self.k, self.highs.len() / self.padded);
        if let Some(direct) = coder.direct {
            return self.nibbles.dots(avx512, direct, rows, n, out);
        }
        // The last row may be read a run further, where the column has zeros.
        let mut codes = [0; LONG + RUN];
        let (mut scales, mut offsets) = ([0.0; (LONG + RUN) / 16], [0.0; (LONG + RUN) / 16]);
        // Short rows that lie side by side become bytes together.
        let most = if rows.stride == rows.row_bytes { (LONG / k).max(1) } else { 1 };
        let mut sums = vec![[0.0; 16]; most * n];
        for (chunk, out) in out.chunks_mut(most * n).enumerate() {
            let count = out.len() / n;
            sums.fill([0.0; 16]);
            for start in (0..k).step_by(LONG) {
                let depth = LONG.min(k - start);
                let bytes = rows.pieces(chunk * most, count, start, depth);
                (coder.fill_bytes)(
                    bytes,
                    BytePiece {
                        codes: &mut codes[..count * depth],
                        scales: &mut scales[..count * depth / 16],
                        offsets: &mut offsets[..count * depth / 16],
                    },
                );
                let padded = depth.next_multiple_of(RUN);
                for (i, sums) in sums.iter_mut().take(count * n).enumerate() {
                    let from = i / n * depth;
                    let offsets = if coder.offsets > 0 { &offsets[from / 16..][..padded / 16] } else { &[] };
                    let weights = Weights {
                        codes: &codes[from..][..padded],
                        scales: &scales[from / 16..][..padded / 16],
                        offsets,
                        zero: f32::from(coder.zero),
                    };
                    add_dots(avx512, weights, self.column(i % n, start, padded), sums);
                }
            }
            for (out, sums) in out.iter_mut().zip(&sums) {
                *out = avx512.vectorize(
                    #[inline(always)]
                    || f32x16::load_array_ref(avx512, sums).reduce_sum(),
                );
            }
        }
    }
}

/// Which scale each sum of four products has, for each quarter of a run.
const SCALE_OF: [[i32; 16]; 4] = {
    let mut of = [[0; 16]; 4];
    let mut i = 0;
    while i < 64 {
        of[i / 16][i % 16] = i as i32 / 4;
        i += 1;
    }
    of
};

fearless_simd::kernel!(
    /// Adds the products of a row and a column to sixteen partial sums.
    fn add_dots(avx512: Avx512, a: Weights<'_>, x: Column<'_>, sums: &mut [f32; 16]) {
        let mut both: [__m512; 2] = [f32x16::load_array_ref(avx512, sums).into(), f32x16::splat(avx512, 0.0).into()];
        let mut zeros = f32x16::splat(avx512, 0.0);
        for run in 0..a.codes.len() / RUN {
            let x_scales = f32x16::from_slice(avx512, &x.scales[16 * run..][..16]);
            let scales = f32x16::from_slice(avx512, &a.scales[16 * run..][..16]) * x_scales;
            zeros = scales.mul_add(f32x16::from_slice(avx512, &x.wholes[16 * run..][..16]), zeros);
            let scales: __m512 = scales.into();
            let codes = &a.codes[RUN * run..][..RUN];
            let (highs, lows) = (&x.highs[RUN * run..][..RUN], &x.lows[RUN * run..][..RUN]);
            for quarter in 0..4 {
                let codes: __m512i = u8x64::from_slice(avx512, &codes[64 * quarter..][..64]).into();
                let high: __m512i = i8x64::from_slice(avx512, &highs[64 * quarter..][..64]).into();
                let low: __m512i = i8x64::from_slice(avx512, &lows[64 * quarter..][..64]).into();
                let high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, high);
                let low = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, low);
                let fours = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<7>(high), low));
                let which: __m512i = i32x16::load_array(avx512, SCALE_OF[quarter]).into();
                both[quarter % 2] = _mm512_fmadd_ps(fours, _mm512_permutexvar_ps(which, scales), both[quarter % 2]);
            }
        }
        let (first, second): (f32x16<Avx512>, f32x16<Avx512>) = (both[0].simd_into(avx512), both[1].simd_into(avx512));
        let mut sum = zeros.mul_add(f32x16::splat(avx512, -a.zero), first + second);
        for (a, x) in a.offsets.as_chunks::<16>().0.iter().zip(x.sums.as_chunks::<16>().0) {
            sum = f32x16::load_array_ref(avx512, a).mul_add(f32x16::load_array_ref(avx512, x), sum);
        }
        sum.store_array(sums);
    }
);
