//! Rows of nibbles on machines that multiply bytes (`cpu_bytes.rs`): four blocks at a time become bytes in a register and meet a
//! column there, without a way through memory. Formats of 32 elements in 16 bytes of nibbles, low ones first.

use std::arch::x86_64::{
    __m256i, __m512, __m512i, _mm512_add_epi32, _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_dpbusd_epi32,
    _mm512_fmadd_ps, _mm512_setzero_si512, _mm512_slli_epi32,
};

use fearless_simd::prelude::*;
use fearless_simd::{Avx512, f32x16, i8x64, u8x16, u8x32, u8x64, u64x4};
use kiln_gguf::TensorType;

use super::cpu_codes::{BLOCK, IQ4_RAISED};
use super::cpu_rows::Rows;

/// Elements of four blocks.
const RUN: usize = 4 * BLOCK;

/// A row times a column, which is whole runs: blocks that the row does not have are zeros of the column.
#[derive(Clone, Copy)]
pub(super) struct Direct {
    dot: fn(Avx512, &[u8], Column<'_>) -> f32,
}

/// The way of a type, where it is one of nibbles.
pub(super) fn direct(ty: TensorType) -> Option<Direct> {
    match ty {
        TensorType::Q4_0 => Some(Direct { dot: q4_0 }),
        TensorType::Q4_1 => Some(Direct { dot: q4_1 }),
        TensorType::IQ4_NL => Some(Direct { dot: iq4_nl }),
        _ => None,
    }
}

/// Columns in whole runs, one after the other. A run has the elements that meet low nibbles, then those that meet high ones.
#[derive(Default)]
pub(super) struct NibbleColumns {
    /// Runs of a column.
    runs: usize,
    highs: Vec<i8>,
    lows: Vec<i8>,
    /// Sixteen numbers for each run, four for each block: its scale four times; the sum of its rounded elements and three zeros; the
    /// sum of its elements and three zeros.
    scales: Vec<f32>,
    wholes: Vec<f32>,
    sums: Vec<f32>,
}

/// What a column has of some whole runs.
#[derive(Clone, Copy)]
pub(super) struct Column<'a> {
    pub highs: &'a [i8],
    pub lows: &'a [i8],
    pub scales: &'a [f32],
    pub wholes: &'a [f32],
    pub sums: &'a [f32],
}

impl NibbleColumns {
    /// Of columns in bytes, `padded` apart, with a scale for each block of `k` elements and the sum of each sixteen.
    pub(super) fn new(k: usize, bytes: [&[i8]; 2], padded: usize, scales: &[f32], sums: &[f32]) -> NibbleColumns {
        let (n, blocks) = (bytes[0].len() / padded, k / BLOCK);
        let runs = blocks.div_ceil(4);
        let turned = |bytes: &[i8]| {
            let mut out = vec![0; n * runs * RUN];
            for (column, out) in bytes.chunks_exact(padded).zip(out.chunks_exact_mut(runs * RUN)) {
                for (b, block) in column[..k].chunks_exact(BLOCK).enumerate() {
                    let at = b / 4 * RUN + b % 4 * 16;
                    out[at..][..16].copy_from_slice(&block[..16]);
                    out[at + RUN / 2..][..16].copy_from_slice(&block[16..]);
                }
            }
            out
        };
        let (highs, lows) = (turned(bytes[0]), turned(bytes[1]));
        let room = || vec![0.0; n * runs * 16];
        let mut columns = NibbleColumns { runs, highs, lows, scales: room(), wholes: room(), sums: room() };
        for i in 0..n * blocks {
            let (c, b) = (i / blocks, i % blocks);
            let at = c * runs * 16 + 4 * b;
            columns.scales[at..][..4].fill(scales[i]);
            let sum = |bytes: &[i8]| bytes[c * padded + b * BLOCK..][..BLOCK].iter().map(|x| i32::from(*x)).sum::<i32>();
            columns.wholes[at] = (128 * sum(bytes[0]) + sum(bytes[1])) as f32;
            columns.sums[at] = sums[2 * i] + sums[2 * i + 1];
        }
        columns
    }

    /// Rows times all `n` columns: the results of a row lie side by side.
    pub(super) fn dots(&self, avx512: Avx512, direct: Direct, rows: Rows<'_>, n: usize, out: &mut [f32]) {
        let bytes = self.runs * 4 * rows.ty.block_bytes();
        let mut last: Vec<u8>;
        for (i, out) in out.chunks_exact_mut(n).enumerate() {
            // What follows a row does no harm: the column has zeros there. Behind the last row there may be nothing.
            let row = match rows.bytes[i * rows.stride..].get(..bytes) {
                Some(row) => row,
                None => {
                    last = rows.row(i).to_vec();
                    last.resize(bytes, 0);
                    &last[..]
                }
            };
            for (c, out) in out.iter_mut().enumerate() {
                let (at, sixteenths) = (c * self.runs * RUN, c * self.runs * 16);
                let column = Column {
                    highs: &self.highs[at..][..self.runs * RUN],
                    lows: &self.lows[at..][..self.runs * RUN],
                    scales: &self.scales[sixteenths..][..self.runs * 16],
                    wholes: &self.wholes[sixteenths..][..self.runs * 16],
                    sums: &self.sums[sixteenths..][..self.runs * 16],
                };
                *out = (direct.dot)(avx512, row, column);
            }
        }
    }
}

/// Bytes of four half floats, each half float four times.
const FOUR_TIMES: [u8; 32] = {
    let mut of = [0; 32];
    let mut i = 0;
    while i < 32 {
        of[i] = (i / 8 * 2 + i % 2) as u8;
        i += 1;
    }
    of
};

/// Declares the way of a format: bytes of a block, where its nibbles lie, what they stand for (all sixteen, raised by a number
/// that makes them positive, and that number), and whether a least value comes behind the scale.
macro_rules! nibbles {
    ($name:ident, $bytes:literal, $at:literal, $table:expr, $zero:literal, $least:literal) => {
        fearless_simd::kernel!(
            fn $name(avx512: Avx512, row: &[u8], x: Column<'_>) -> f32 {
                let table: Option<[u8; 16]> = $table;
                let table = u8x16::load_array(avx512, table.unwrap_or_default());
                let table = table.combine(table).combine(table.combine(table));
                let four_times = u8x32::load_array(avx512, FOUR_TIMES);
                let mut sum: __m512 = f32x16::splat(avx512, 0.0).into();
                let mut zeros = f32x16::splat(avx512, 0.0);
                let mut leasts = f32x16::splat(avx512, 0.0);
                let bytes = x.highs.as_chunks::<RUN>().0.iter().zip(x.lows.as_chunks::<RUN>().0);
                let factors = x.scales.as_chunks::<16>().0.iter().zip(x.wholes.as_chunks::<16>().0);
                let factors = factors.zip(x.sums.as_chunks::<16>().0);
                let blocks = row.as_chunks::<{ 4 * $bytes }>().0.iter();
                for ((blocks, (highs, lows)), ((scales, wholes), sums)) in blocks.zip(bytes).zip(factors) {
                    let mut parts = [u8x16::splat(avx512, 0); 4];
                    let (mut halves, mut least) = (0u64, 0u64);
                    for b in 0..4 {
                        let block = &blocks[$bytes * b..][..$bytes];
                        parts[b] = u8x16::from_slice(avx512, &block[$at..$at + 16]);
                        halves |= u64::from(u16::from_le_bytes([block[0], block[1]])) << (16 * b);
                        if $least {
                            least |= u64::from(u16::from_le_bytes([block[2], block[3]])) << (16 * b);
                        }
                    }
                    let nibbles = parts[0].combine(parts[1]).combine(parts[2].combine(parts[3]));
                    let (mut low, mut high): (u8x64<Avx512>, u8x64<Avx512>) = (nibbles & 15, nibbles >> 4);
                    if $zero == 128 {
                        low = table.swizzle_dyn_within_blocks(low);
                        high = table.swizzle_dyn_within_blocks(high);
                    }
                    let codes: [__m512i; 2] = [low.into(), high.into()];
                    let mut dots = [_mm512_setzero_si512(); 2];
                    for part in 0..2 {
                        let x_high: __m512i = i8x64::from_slice(avx512, &highs[64 * part..][..64]).into();
                        let x_low: __m512i = i8x64::from_slice(avx512, &lows[64 * part..][..64]).into();
                        dots[0] = _mm512_dpbusd_epi32(dots[0], codes[part], x_high);
                        dots[1] = _mm512_dpbusd_epi32(dots[1], codes[part], x_low);
                    }
                    let fours = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<7>(dots[0]), dots[1]));
                    let halves: u8x32<Avx512> = u64x4::splat(avx512, halves).bitcast();
                    let halves: __m256i = halves.swizzle_dyn_within_blocks(four_times).into();
                    let d: f32x16<Avx512> = _mm512_cvtph_ps(halves).simd_into(avx512);
                    let factors = d * f32x16::load_array_ref(avx512, scales);
                    sum = _mm512_fmadd_ps(fours, factors.into(), sum);
                    if $zero > 0 {
                        zeros = factors.mul_add(f32x16::load_array_ref(avx512, wholes), zeros);
                    }
                    if $least {
                        let least: u8x32<Avx512> = u64x4::splat(avx512, least).bitcast();
                        let least: __m256i = least.swizzle_dyn_within_blocks(four_times).into();
                        let least: f32x16<Avx512> = _mm512_cvtph_ps(least).simd_into(avx512);
                        leasts = least.mul_add(f32x16::load_array_ref(avx512, sums), leasts);
                    }
                }
                let sum: f32x16<Avx512> = sum.simd_into(avx512);
                (zeros.mul_add(f32x16::splat(avx512, -f32::from($zero as u8)), sum) + leasts).reduce_sum()
            }
        );
    };
}

nibbles!(q4_0, 18, 2, None, 8, false);
nibbles!(q4_1, 20, 4, None, 0, true);
nibbles!(iq4_nl, 18, 2, Some(IQ4_RAISED), 128, false);
