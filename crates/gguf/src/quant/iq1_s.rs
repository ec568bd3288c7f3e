//! IQ1_S: 256 values in 50 bytes. f16 d @0, low bytes of the grid indices @2[32], u16 @34[8] per 32 values: four times
//! three upper bits of the indices, three bits of scale, the sign of the shift.
//! value = d * (2 scale + 1) * (grid[index][j] + 1/8, or - 1/8 where the top bit is set)

use super::blocks::{decode, half_at, u16_at};
use super::codebook::iq1;

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    let grid = iq1();
    decode(bytes, out, |block: &[u8; 50], out: &mut [f32; 256]| {
        let d = half_at(block, 0);
        for (i, eight) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let high = u16_at(block, 34 + 2 * (i / 4));
            let index = usize::from(block[2 + i]) | usize::from(high >> (3 * (i % 4)) & 7) << 8;
            let scale = d * f32::from(2 * (high >> 12 & 7) + 1);
            shifted(eight, scale, &grid[index], high & 0x8000 != 0);
        }
    });
}

/// Writes `scale * (entry +- 1/8)`.
#[inline]
pub(super) fn shifted(out: &mut [f32; 8], scale: f32, entry: &[i8; 8], down: bool) {
    let shift = if down { -0.125 } else { 0.125 };
    for j in 0..8 {
        out[j] = scale * (f32::from(entry[j]) + shift);
    }
}
