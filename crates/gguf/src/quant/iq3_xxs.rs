//! IQ3_XXS: 256 values in 98 bytes. f16 d @0, grid indices @2[64], u32 @66[8]: four times seven sign bits and, on top,
//! four bits of scale per 32 values. value = d * (0.5 + scale) / 2 * grid[index][j], with sign

use std::sync::OnceLock;

use super::blocks::{decode, encode, half_at, u32_at};
use super::codebook::{even_signs, iq3_xxs};
use super::grid::{Fitted, Grid, Signs, fit, grid};
use super::iq2_xxs::signed;

const LEVELS: [i8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    let grid = iq3_xxs();
    decode(bytes, out, |block: &[u8; 98], out: &mut [f32; 256]| {
        let d = half_at(block, 0);
        for (i, four) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let rest = u32_at(block, 66 + 4 * (i / 8));
            let scale = d * (0.5 + (rest >> 28) as f32) * 0.5;
            let signs = even_signs(rest >> (7 * (i / 2 % 4))) >> (4 * (i % 2));
            signed(four, scale, &grid[usize::from(block[2 + i])], signs);
        }
    });
}

pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    static GRID: OnceLock<Grid<4>> = OnceLock::new();
    let grid = grid(&GRID, iq3_xxs(), &LEVELS);
    encode(row, importance, out, |x: &[f32; 256], importance, block: &mut [u8; 98]| {
        let Fitted { d, scales, entries, signs } = fit(grid, x, importance, 32, 0.25, Signs::Even);
        block[..2].copy_from_slice(&d.to_le_bytes());
        for i in 0..64 {
            block[2 + i] = entries[i] as u8;
        }
        for i in 0..8 {
            let bits = (0..4).fold(0, |bits, g| bits | u32::from(signs[4 * i + g] & 127) << (7 * g));
            let rest = bits | u32::from(scales[i]) << 28;
            block[66 + 4 * i..70 + 4 * i].copy_from_slice(&rest.to_le_bytes());
        }
    });
}
