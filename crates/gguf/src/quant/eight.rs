//! Searches for the formats whose blocks of 32 stand alone: eight neighbours of a row are fitted at once. The formula
//! of a value and the place of its bits live in the files of the formats.

use std::array;

use super::blocks::{LANES, LARGEST_HALF, encode, min_max, put_half, put_scale};
use super::search::{
    Columns, Line, Normalised, Trials, columns, fit_lines, fit_scales, mean_square, normalise, square_weights, weigh,
    within,
};

/// A block of 32 values.
type Block = [f32; 32];

/// Up to eight normalised blocks and their weights, as columns; missing blocks are zeros.
struct Eight {
    x: Columns<32>,
    weights: Columns<32>,
    units: [f32; LANES],
}

fn gather(blocks: &[Block], importance: Option<&[Block]>) -> Eight {
    let mut x = [[0f32; 32]; LANES];
    let mut weights = [[0f32; 32]; LANES];
    let mut units = [1f32; LANES];
    for (lane, block) in blocks.iter().enumerate() {
        let Some(block) = normalise(block, f32::MAX) else { continue };
        weights[lane] = match importance {
            Some(importance) => weigh(&block.x, &importance[lane], mean_square(&block.x)),
            None => square_weights(&block.x, 0.5),
        };
        Normalised { x: x[lane], unit: units[lane] } = block;
    }
    Eight { x: columns(&x), weights: columns(&weights), units }
}

/// Packs a row of `value = d * snap(level)`, with trials as in [`fit_scales`]: `put` gets the values of a block and its
/// best scale.
#[inline]
pub(super) fn encode_scaled<const BYTES: usize>(
    row: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
    levels: &[f32],
    snap: impl Fn(f32) -> f32,
    put: impl Fn(&Block, f32, &mut [u8; BYTES]),
) {
    let blocks = row.as_chunks().0;
    let importance = importance.map(|weights| weights.as_chunks().0);
    for (i, (blocks, out)) in blocks.chunks(LANES).zip(out.as_chunks_mut().0.chunks_mut(LANES)).enumerate() {
        let eight = gather(blocks, importance.map(|weights| &weights[i * LANES..]));
        let scales = fit_scales(&eight.x, &eight.weights, levels, &snap);
        for (lane, (block, out)) in blocks.iter().zip(out).enumerate() {
            put(block, scales[lane] * eight.units[lane], out);
        }
    }
}

/// Packs a row of `value = code * d + m` with codes `0..=top`: writes the f16 scale @0 and floor @2 of each block and
/// leaves the codes to `put`. The codes span the range of a block; with an importance the best line is searched.
#[inline]
pub(super) fn encode_lines<const BYTES: usize>(
    row: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
    top: f32,
    put: impl Fn(&[u8; 32], &mut [u8; BYTES]),
) {
    let Some(importance) = importance else {
        return encode(row, None, out, |x: &Block, _, block: &mut [u8; BYTES]| {
            let (low, high) = min_max(x);
            // Divided before subtracting: the range of a block can be wider than f32.
            put(&put_line(x, Line { scale: high / top - low / top, floor: low }, top, block), block);
        });
    };
    let (blocks, importance) = (row.as_chunks().0, importance.as_chunks().0);
    let trials = Trials { first: -0.9, step: 0.05, count: 37 };
    for (i, (blocks, out)) in blocks.chunks(LANES).zip(out.as_chunks_mut().0.chunks_mut(LANES)).enumerate() {
        let eight = gather(blocks, Some(&importance[i * LANES..]));
        let lines = fit_lines(&eight.x, &eight.weights, top, f32::MAX, trials);
        for (lane, (block, out)) in blocks.iter().zip(out).enumerate() {
            let (line, unit) = (lines[lane], eight.units[lane]);
            let line = Line { scale: line.scale * unit, floor: line.floor * unit };
            put(&put_line(block, line, top, out), out);
        }
    }
}

/// Writes the line and gives the codes of a block.
#[inline]
fn put_line(x: &Block, line: Line, top: f32, block: &mut [u8]) -> [u8; 32] {
    let inverse = put_scale(block, 0, line.scale);
    let stored = put_half(block, 2, line.floor);
    // The codes count from the unrounded floor, which is the usual rule, except where f16 cannot hold it.
    let floor = if line.floor.abs() > LARGEST_HALF { stored } else { line.floor };
    array::from_fn(|e| within((x[e] - floor) * inverse + 0.5, 0.0, top) as i32 as u8)
}
