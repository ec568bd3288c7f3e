//! IQ3_S: 256 values in 110 bytes. f16 d @0, low bytes of the grid indices @2[64], their ninth bits @66[8], signs
//! @74[32] (a bit per value), scales @106[4]: a nibble per 32 values. value = d * (1 + 2 scale) * grid[index][j], with
//! sign

use std::sync::OnceLock;

use super::blocks::{decode, encode, half_at};
use super::codebook::iq3_s;
use super::grid::{Fitted, Grid, Signs, fit, grid};
use super::iq2_xxs::signed;

const LEVELS: [i8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    let grid = iq3_s();
    decode(bytes, out, |block: &[u8; 110], out: &mut [f32; 256]| {
        let d = half_at(block, 0);
        for (i, four) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let high = usize::from(block[66 + i / 8] >> (i % 8) & 1);
            let scale = block[106 + i / 16] >> (4 * (i / 8 % 2)) & 15;
            let scale = d * f32::from(1 + 2 * scale);
            let signs = block[74 + i / 2] >> (4 * (i % 2));
            signed(four, scale, &grid[usize::from(block[2 + i]) | high << 8], signs);
        }
    });
}

pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    static GRID: OnceLock<Grid<4>> = OnceLock::new();
    let grid = grid(&GRID, iq3_s(), &LEVELS);
    encode(row, importance, out, |x: &[f32; 256], importance, block: &mut [u8; 110]| {
        let Fitted { d, scales, entries, signs } = fit(grid, x, importance, 32, 1.0, Signs::Free);
        block[..2].copy_from_slice(&d.to_le_bytes());
        block[66..74].fill(0);
        for i in 0..64 {
            block[2 + i] = entries[i] as u8;
            block[66 + i / 8] |= ((entries[i] >> 8) as u8) << (i % 8);
        }
        block[74..106].copy_from_slice(&signs);
        for i in 0..4 {
            block[106 + i] = scales[2 * i] | scales[2 * i + 1] << 4;
        }
    });
}
