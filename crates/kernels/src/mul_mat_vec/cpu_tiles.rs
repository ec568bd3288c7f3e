//! Interleaved rows times large N by products of tiles (AMX): sixteen activations and sixteen rows of bytes, thirty-two products in each
//! sum. A rounded element of an activation vector is two bytes, 128 high + low, so that there are two products for each block of the rows.

use bytemuck::{cast_slice, cast_slice_mut};
use fearless_simd::prelude::*;
use fearless_simd::{Avx512, Simd, dispatch, f32x16, i32x16};
use kiln_system::instructions::{SIDE, TileColumns, TileSums, Tiles};
use rayon::prelude::*;

use super::cpu_interleaved::{InterleavedRows, ROWS};
use super::cpu_interleaved_dots::Spread;
use super::cpu_ints::Ints;
use super::cpu_quants::BLOCK;
use crate::host::Spare;
use crate::simd::level;

/// Whether this machine goes this way.
pub(super) fn has_tiles() -> bool {
    level().as_avx512().is_some() && Tiles::are_there()
}

/// Bytes of a tile of activations, as the floats that have their bits.
const TILE: usize = SIDE * BLOCK / 4;

/// Rounded activations, sixteen at a time; what the last of them lack is zeros.
pub(super) struct TiledActivations {
    k: usize,
    /// Of each sixteen activations the high bytes of a block, then the low ones; of one block after the other.
    codes: Vec<f32>,
    /// For each block: scales of sixteen activations, and the sums of their elements.
    scales: Vec<f32>,
    sums: Vec<f32>,
    /// Activations that should be multiplied as floats: which sixteen, and which of these.
    unfit: Vec<[usize; 2]>,
}

impl TiledActivations {
    /// Activations of `k` elements, whole blocks: at most sixteen in each part. None where the machine has no tiles.
    pub(super) fn new(k: usize, columns: &[&[&[f32]]], spare: &mut Spare) -> Option<TiledActivations> {
        if !has_tiles() {
            return None;
        }
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
            dispatch!(level(), simd => split(simd, &ints, codes, scales, sums));
            ints.unfit.into_iter().map(move |c| [p, c]).collect::<Vec<_>>()
        });
        let unfit = unfit.flatten_iter().collect();
        Some(TiledActivations { k, codes, scales, sums, unfit })
    }

    /// Gives its memory back.
    pub(super) fn end(self, spare: &mut Spare) {
        [self.codes, self.scales, self.sums].into_iter().for_each(|vector| spare.give(vector));
    }

    /// Activations whose products should be made by floats, among those of the parts from `first` on.
    pub(super) fn unfit(&self, first: usize, n: usize) -> impl Iterator<Item = usize> {
        let own = self.unfit.iter().filter(move |[p, _]| (first..first + n.div_ceil(SIDE)).contains(p));
        own.map(move |[p, c]| (p - first) * SIDE + c)
    }

    /// Rows times the `n` activations of the parts from `first` on: `out` has one activation vector's results after the other.
    pub(super) fn dots(&self, first: usize, n: usize, rows: InterleavedRows<'_>, out: &mut [f32]) {
        let simd = level().as_avx512().expect("rows are interleaved where there is AVX-512");
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

/// Splits rounded activations into bytes, where tiles have them.
#[inline(always)]
fn split<S: Simd>(_: S, ints: &Ints, codes: &mut [f32], scales: &mut [f32], sums: &mut [f32]) {
    let blocks = ints.k / BLOCK;
    for (at, x) in ints.codes.chunks_exact(BLOCK).enumerate() {
        let (c, b) = (at / blocks, at % blocks);
        let tiles: &mut [u8] = cast_slice_mut(&mut codes[b * 2 * TILE..][..2 * TILE]);
        let (highs, lows) = tiles.split_at_mut(SIDE * BLOCK);
        let (highs, lows) = (&mut highs[c * BLOCK..][..BLOCK], &mut lows[c * BLOCK..][..BLOCK]);
        for ((x, high), low) in x.iter().zip(highs).zip(lows) {
            let above = (x + 64) >> 7;
            (*high, *low) = (above as u8, (x - (above << 7)) as u8);
        }
        scales[b * SIDE + c] = ints.scales[at];
        sums[b * SIDE + c] = ints.sums[2 * at] + ints.sums[2 * at + 1];
    }
}

/// Sixteen activations.
#[derive(Clone, Copy)]
struct Part<'a> {
    /// High bytes and low bytes of each block.
    codes: &'a [[TileColumns; 2]],
    scales: &'a [[f32; SIDE]],
    sums: &'a [[f32; SIDE]],
}

/// Sixteen rows times `used` of sixteen activations, whose results lie `stride` apart.
#[inline(never)]
fn meet(simd: Avx512, tiles: &Tiles, rows: &Spread, columns: Part<'_>, used: usize, out: &mut [f32], stride: usize) {
    simd.vectorize(
        #[inline(always)]
        || {
            let mut results = [f32x16::splat(simd, 0.0); SIDE];
            let mut sums = [[TileSums([[0; ROWS]; SIDE]); 2]; 2];
            let [even, odd] = &mut sums;
            let blocks = rows.codes.len();
            // Products of a block are made while those of the one before are stored and those of the one before that become floats:
            // each takes so long that the machine would stand still otherwise.
            multiply::<0>(tiles, rows, columns, 0);
            for b in (0..blocks).step_by(2) {
                multiply::<1>(tiles, rows, columns, b + 1);
                tiles.store::<0>(even);
                if b > 0 {
                    add(simd, odd, rows, columns, b - 1, &mut results);
                }
                multiply::<0>(tiles, rows, columns, b + 2);
                tiles.store::<1>(odd);
                add(simd, even, rows, columns, b, &mut results);
            }
            if blocks.is_multiple_of(2) {
                add(simd, odd, rows, columns, blocks - 1, &mut results);
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

/// Multiplies the tiles of a block, if there is such a block.
#[inline(always)]
fn multiply<const SET: usize>(tiles: &Tiles, rows: &Spread, columns: Part<'_>, block: usize) {
    if let (Some([highs, lows]), Some(codes)) = (columns.codes.get(block), rows.codes.get(block)) {
        tiles.multiply::<SET>([highs, lows], codes);
    }
}

/// Adds the sums of a block to the results, times scales of rows and columns.
#[inline(always)]
fn add(
    simd: Avx512,
    [highs, lows]: &[TileSums; 2],
    rows: &Spread,
    columns: Part<'_>,
    block: usize,
    results: &mut [f32x16<Avx512>; SIDE],
) {
    let (scales, x_scales) = (f32x16::load_array_ref(simd, &rows.scales[block]), &columns.scales[block]);
    for c in 0..SIDE {
        let high = i32x16::load_array_ref(simd, &highs.0[c]);
        let whole = (high << 7) + i32x16::load_array_ref(simd, &lows.0[c]);
        let whole: f32x16<Avx512> = whole.to_float();
        results[c] = whole.mul_add(scales * f32x16::splat(simd, x_scales[c]), results[c]);
    }
}
