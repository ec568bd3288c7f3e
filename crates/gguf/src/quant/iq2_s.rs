//! IQ2_S: 256 values in 82 bytes. f16 d @0, low bytes of the grid indices @2[32], signs @34[32] (a bit per value),
//! upper two bits of the indices @66[8], scales @74[8]: a nibble per 16 values.
//! value = d * (0.5 + scale) / 4 * grid[index][j], with sign

use std::sync::OnceLock;

use super::blocks::{decode, encode, half_at};
use super::codebook::iq2_s;
use super::grid::{Fitted, Grid, Signs, fit, grid};
use super::iq2_xxs::{LEVELS, signed};

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    let grid = iq2_s();
    decode(bytes, out, |block: &[u8; 82], out: &mut [f32; 256]| {
        let d = half_at(block, 0);
        for (i, eight) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let high = usize::from(block[66 + i / 4] >> (2 * (i % 4)) & 3);
            let scale = block[74 + i / 4] >> (4 * (i / 2 % 2)) & 15;
            let scale = d * (0.5 + f32::from(scale)) * 0.25;
            signed(eight, scale, &grid[usize::from(block[2 + i]) | high << 8], block[34 + i]);
        }
    });
}

pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    static GRID: OnceLock<Grid<8>> = OnceLock::new();
    let grid = grid(&GRID, iq2_s(), &LEVELS);
    encode(row, importance, out, |x: &[f32; 256], importance, block: &mut [u8; 82]| {
        let Fitted { d, scales, entries, signs } = fit(grid, x, importance, 16, 0.125, Signs::Free);
        block[..2].copy_from_slice(&d.to_le_bytes());
        block[66..74].fill(0);
        for i in 0..32 {
            block[2 + i] = entries[i] as u8;
            block[34 + i] = signs[i];
            block[66 + i / 4] |= ((entries[i] >> 8) as u8) << (2 * (i % 4));
        }
        for i in 0..8 {
            block[74 + i] = scales[2 * i] | scales[2 * i + 1] << 4;
        }
    });
}
