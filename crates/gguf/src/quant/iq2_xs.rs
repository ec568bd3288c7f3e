//! IQ2_XS: 256 values in 74 bytes. f16 d @0, u16 @2[32] (nine bits of grid index, seven of signs), scales @66[8]: a
//! nibble per 16 values. value = d * (0.5 + scale) / 4 * grid[index][j], with sign

use std::sync::OnceLock;

use super::blocks::{decode, encode, half_at, u16_at};
use super::codebook::{even_signs, iq2_xs};
use super::grid::{Fitted, Grid, Signs, fit, grid};
use super::iq2_xxs::{LEVELS, signed};

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    let grid = iq2_xs();
    decode(bytes, out, |block: &[u8; 74], out: &mut [f32; 256]| {
        let d = half_at(block, 0);
        for (i, eight) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let word = u16_at(block, 2 + 2 * i);
            let scale = block[66 + i / 4] >> (4 * (i / 2 % 2)) & 15;
            let scale = d * (0.5 + f32::from(scale)) * 0.25;
            signed(eight, scale, &grid[usize::from(word & 511)], even_signs(u32::from(word >> 9)));
        }
    });
}

pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    static GRID: OnceLock<Grid<8>> = OnceLock::new();
    let grid = grid(&GRID, iq2_xs(), &LEVELS);
    encode(row, importance, out, |x: &[f32; 256], importance, block: &mut [u8; 74]| {
        let Fitted { d, scales, entries, signs } = fit(grid, x, importance, 16, 0.125, Signs::Even);
        block[..2].copy_from_slice(&d.to_le_bytes());
        for i in 0..32 {
            let word = entries[i] | u16::from(signs[i] & 127) << 9;
            block[2 + 2 * i..4 + 2 * i].copy_from_slice(&word.to_le_bytes());
        }
        for i in 0..8 {
            block[66 + i] = scales[2 * i] | scales[2 * i + 1] << 4;
        }
    });
}
