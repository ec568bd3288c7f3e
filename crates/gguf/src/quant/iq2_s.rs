//! IQ2_S: 256 values in 82 bytes. f16 d @0, low bytes of the grid indices @2[32], signs @34[32] (a bit per value),
//! upper two bits of the indices @66[8], scales @74[8]: a nibble per 16 values.
//! value = d * (0.5 + scale) / 4 * grid[index][j], with sign

use super::blocks::{decode, half_at};
use super::codebook::iq2_s;
use super::iq2_xxs::signed;

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
