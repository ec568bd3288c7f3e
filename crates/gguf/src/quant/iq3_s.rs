//! IQ3_S: 256 values in 110 bytes. f16 d @0, low bytes of the grid indices @2[64], their ninth bits @66[8], signs
//! @74[32] (a bit per value), scales @106[4]: a nibble per 32 values. value = d * (1 + 2 scale) * grid[index][j], with
//! sign

use super::blocks::{decode, half_at};
use super::codebook::iq3_s;
use super::iq2_xxs::signed;

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
