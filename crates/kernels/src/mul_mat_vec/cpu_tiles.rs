//! Woven rows times many columns by products of tiles (AMX): sixteen columns and sixteen rows of bytes, thirty-two products in each
//! sum. A rounded element of a column is two bytes, 128 high + low, so that there are two products for each block of the rows.

use bytemuck::{cast_slice, cast_slice_mut};
use fearless_simd::prelude::*;
use fearless_simd::{Avx512, f32x16, i32x16};
use kiln_system::instructions::{SIDE, TileColumns, TileSums, Tiles};
use rayon::prelude::*;

use super::cpu_codes::BLOCK;
use super::cpu_ints::Ints;
use super::cpu_woven::{ROWS, Spread, WovenRows};
use crate::host::Spare;
use crate::simd::level;

/// Whether this machine goes this way.
pub(super) fn has_tiles() -> bool {
    level().as_avx512().is_some() && Tiles::are_there()
}

/// Bytes of a tile of columns, as the floats that have their bits.
const TILE: usize = SIDE * BLOCK / 4;

/// Rounded columns, sixteen at a time; what the last of them lack is zeros.
pub(super) struct TiledColumns {
    k: usize,
    /// Of each sixteen columns the high bytes of a block, then the low ones; of one block after the other.
    codes: Vec<f32>,
    /// For each block: scales of sixteen columns, and the sums of their elements.
    scales: Vec<f32>,
    sums: Vec<f32>,
    /// Columns that should be multiplied as floats: which sixteen, and which of these.
    unfit: Vec<[usize; 2]>,
}

impl TiledColumns {
    /// Columns of `k` elements, whole blocks: at most sixteen in each part.
    pub(super) fn new(k: usize, columns: &[&[&[f32]]], spare: &mut Spare) -> TiledColumns {
        let blocks = k / BLOCK;
        let mut room = |each: usize| spare.take(columns.len() * blocks * each);
        let (mut codes, mut scales, mut sums) = (room(2 * TILE), room(SIDE), room(SIDE));
        let parts = codes.par_chunks_mut(blocks * 2 * TILE).zip(scales.par_chunks_mut(blocks * SIDE));
        let parts = parts.zip(sums.par_chunks_mut(blocks * SIDE)).zip(columns.par_iter()).enumerate();
        let unfit = parts.map(|(p, (((codes, scales), sums), columns))| {
            codes.fill(0.0);
            scales.fill(0.0);
            sums.fill(0.0);
            let ints = Ints::new(k, columns.iter().copied());
            for c in 0..columns.len() {
                for b in 0..blocks {
                    let at = c * blocks + b;
                    let tiles: &mut [u8] = cast_slice_mut(&mut codes[b * 2 * TILE..][..2 * TILE]);
                    let (highs, lows) = tiles.split_at_mut(SIDE * BLOCK);
                    let (highs, lows) = (&mut highs[c * BLOCK..][..BLOCK], &mut lows[c * BLOCK..][..BLOCK]);
                    for ((x, high), low) in ints.codes[at * BLOCK..][..BLOCK].iter().zip(highs).zip(lows) {
                        let above = (x + 64) >> 7;
                        (*high, *low) = (above as u8, (x - (above << 7)) as u8);
                    }
                    scales[b * SIDE + c] = ints.scales[at];
                    sums[b * SIDE + c] = ints.sums[2 * at] + ints.sums[2 * at + 1];
                }
            }
            ints.unfit.into_iter().map(move |c| [p, c]).collect::<Vec<_>>()
        });
        let unfit = unfit.flatten_iter().collect();
        TiledColumns { k, codes, scales, sums, unfit }
    }

    /// Gives its memory back.
    pub(super) fn end(self, spare: &mut Spare) {
        [self.codes, self.scales, self.sums].into_iter().for_each(|vector| spare.give(vector));
    }

    /// Columns whose products should be made by floats, among those of the parts from `first` on.
    pub(super) fn unfit(&self, first: usize, n: usize) -> impl Iterator<Item = usize> {
        let own = self.unfit.iter().filter(move |[p, _]| (first..first + n.div_ceil(SIDE)).contains(p));
        own.map(move |[p, c]| (p - first) * SIDE + c)
    }

    /// Rows times the `n` columns of the parts from `first` on: `out` has one column's results after the other.
    pub(super) fn dots(&self, first: usize, n: usize, rows: WovenRows<'_>, out: &mut [f32]) {
        let simd = level().as_avx512().expect("rows are woven where there is AVX-512");
        let (blocks, count) = (self.k / BLOCK, out.len() / n);
        let offsets = if rows.has_offsets() { blocks } else { 0 };
        let mut spread = Spread {
            codes: vec![[0; ROWS * BLOCK]; blocks],
            scales: vec![[0.0; ROWS]; blocks],
            offsets: vec![[0.0; ROWS]; offsets],
        };
        let done = Tiles::with(|tiles| {
            for i in 0..count / ROWS {
                rows.spread(simd, i, &mut spread);
                for (p, c) in (0..n).step_by(SIDE).enumerate() {
                    let part = (first + p) * blocks;
                    let columns = Part {
                        codes: cast_slice(&self.codes[part * 2 * TILE..][..blocks * 2 * TILE]),
                        scales: self.scales[part * SIDE..][..blocks * SIDE].as_chunks().0,
                        sums: self.sums[part * SIDE..][..blocks * SIDE].as_chunks().0,
                    };
                    let out = &mut out[c * count + i * ROWS..];
                    meet(simd, tiles, &spread, columns, (n - c).min(SIDE), out, count);
                }
            }
        });
        assert!(done.is_some(), "this way is gone where there are tiles");
    }
}

/// Sixteen columns.
#[derive(Clone, Copy)]
struct Part<'a> {
    /// High bytes and low bytes of each block.
    codes: &'a [[TileColumns; 2]],
    scales: &'a [[f32; SIDE]],
    sums: &'a [[f32; SIDE]],
}

/// Sixteen rows times `used` of sixteen columns, whose results lie `stride` apart.
#[inline(never)]
fn meet(
    simd: Avx512,
    tiles: &Tiles,
    rows: &Spread,
    columns: Part<'_>,
    used: usize,
    out: &mut [f32],
    stride: usize,
) {
    simd.vectorize(
        #[inline(always)]
        || {
            let mut results = [f32x16::splat(simd, 0.0); SIDE];
            // Products of a block are made while those of the one before become floats.
            let mut sums = [[TileSums([[0; ROWS]; SIDE]); 2]; 2];
            let blocks = rows.codes.len();
            let [highs, lows] = &columns.codes[0];
            tiles.multiply([highs, lows], &rows.codes[0], &mut sums[0]);
            for b in 0..blocks {
                if let (Some([highs, lows]), Some(codes)) = (columns.codes.get(b + 1), rows.codes.get(b + 1)) {
                    tiles.multiply([highs, lows], codes, &mut sums[(b + 1) % 2]);
                }
                let [highs, lows] = &sums[b % 2];
                let (scales, x_scales) = (f32x16::load_array_ref(simd, &rows.scales[b]), &columns.scales[b]);
                for c in 0..SIDE {
                    let high = i32x16::load_array_ref(simd, &highs.0[c]);
                    let whole = (high << 7) + i32x16::load_array_ref(simd, &lows.0[c]);
                    let whole: f32x16<Avx512> = whole.to_float();
                    results[c] = whole.mul_add(scales * f32x16::splat(simd, x_scales[c]), results[c]);
                }
            }
            for (offsets, sums) in rows.offsets.iter().zip(columns.sums) {
                let offsets = f32x16::load_array_ref(simd, offsets);
                for c in 0..SIDE {
                    results[c] = offsets.mul_add(f32x16::splat(simd, sums[c]), results[c]);
                }
            }
            for (c, result) in results.iter().enumerate().take(used) {
                result.store_slice(&mut out[c * stride..][..ROWS]);
            }
        },
    );
}
