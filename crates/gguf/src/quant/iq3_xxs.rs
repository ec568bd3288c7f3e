//! IQ3_XXS: 256 values in 98 bytes. f16 d @0, grid indices @2[64], u32 @66[8]: four times seven sign bits and, on top,
//! four bits of scale per 32 values. value = d * (0.5 + scale) / 2 * grid[index][j], with sign

use super::blocks::{decode, half_at, u32_at};
use super::codebook::{even_signs, iq3_xxs};
use super::iq2_xxs::signed;

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
