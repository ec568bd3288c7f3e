//! IQ2_XXS: 256 values in 66 bytes. f16 d @0, eight groups of two u32 @2: four grid indices of a byte each; four times
//! seven sign bits and, on top, four bits of scale. value = d * (0.5 + scale) / 4 * grid[index][j], with sign

use std::sync::OnceLock;

use super::blocks::{decode, encode, half_at, u32_at};
use super::codebook::{even_signs, iq2_xxs};
use super::grid::{Fitted, Grid, Signs, fit, grid};

/// The levels of all IQ2 formats.
pub(super) const LEVELS: [i8; 3] = [8, 25, 43];

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    let grid = iq2_xxs();
    decode(bytes, out, |block: &[u8; 66], out: &mut [f32; 256]| {
        let d = half_at(block, 0);
        for (i, group) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (indices, rest) = (2 + 8 * i, u32_at(block, 6 + 8 * i));
            let scale = d * (0.5 + (rest >> 28) as f32) * 0.25;
            for (g, eight) in group.as_chunks_mut().0.iter_mut().enumerate() {
                let entry = &grid[usize::from(block[indices + g])];
                signed(eight, scale, entry, even_signs(rest >> (7 * g)));
            }
        }
    });
}

pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    static GRID: OnceLock<Grid<8>> = OnceLock::new();
    let grid = grid(&GRID, iq2_xxs(), &LEVELS);
    encode(row, importance, out, |x: &[f32; 256], importance, block: &mut [u8; 66]| {
        let Fitted { d, scales, entries, signs } = fit(grid, x, importance, 32, 0.125, Signs::Even);
        block[..2].copy_from_slice(&d.to_le_bytes());
        for (i, group) in block[2..].as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let mut rest = u32::from(scales[i]) << 28;
            for g in 0..4 {
                group[g] = entries[4 * i + g] as u8;
                rest |= u32::from(signs[4 * i + g] & 127) << (7 * g);
            }
            group[4..].copy_from_slice(&rest.to_le_bytes());
        }
    });
}

/// Writes `scale * entry`, negated where the sign bit is set.
#[inline]
pub(super) fn signed<const N: usize>(out: &mut [f32; N], scale: f32, entry: &[i8; N], signs: u8) {
    for j in 0..N {
        let value = scale * f32::from(entry[j]);
        out[j] = if signs >> j & 1 == 1 { -value } else { value };
    }
}
