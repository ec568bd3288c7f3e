//! IQ2_XS: 256 values in 74 bytes. f16 d @0, u16 @2[32] (nine bits of grid index, seven of signs), scales @66[8]: a
//! nibble per 16 values. value = d * (0.5 + scale) / 4 * grid[index][j], with sign

use super::blocks::{decode, half_at, u16_at};
use super::codebook::{even_signs, iq2_xs};
use super::iq2_xxs::signed;

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
