//! IQ1_S: 256 values in 50 bytes. f16 d @0, low bytes of the grid indices @2[32], u16 @34[8] per 32 values: four times
//! three upper bits of the indices, three bits of scale, the sign of the shift.
//! value = d * (2 scale + 1) * (grid[index][j] + 1/8, or - 1/8 where the top bit is set)

use super::blocks::{decode, encode, half_at, u16_at};
use super::codebook::iq1;
use super::ternary_grid::{Fitted, Reach, fit};

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

pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 256], importance, block: &mut [u8; 50]| {
        let Fitted { d, scales, entries, down } = fit(x, importance, Reach { scale: 4, shift: 4 });
        block[..2].copy_from_slice(&d.to_le_bytes());
        for i in 0..8 {
            let mut high = u16::from(scales[i]) << 12 | u16::from(down[4 * i]) << 15;
            for g in 0..4 {
                let entry = entries[4 * i + g];
                block[2 + 4 * i + g] = entry as u8;
                high |= (entry >> 8) << (3 * g);
            }
            block[34 + 2 * i..36 + 2 * i].copy_from_slice(&high.to_le_bytes());
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
