//! IQ1_M: 256 values in 56 bytes. Low bytes of the grid indices @0[32], a nibble per 8 values @32[16] (three upper bits
//! of the index, the sign of the shift), u16 @48[4]: four times three bits of scale, one per 16 values, and on top a
//! nibble of the f16 d, lowest first. value = d * (2 scale + 1) * (grid[index][j] + 1/8, or - 1/8 where the nibble's
//! top bit is set)

use half::f16;

use super::blocks::{decode, encode, u16_at};
use super::codebook::iq1;
use super::iq1_s::shifted;
use super::ternary_grid::{Fitted, Reach, fit};

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    let grid = iq1();
    decode(bytes, out, |block: &[u8; 56], out: &mut [f32; 256]| {
        let d = (0..4).fold(0, |bits, k| bits | (u16_at(block, 48 + 2 * k) >> 12) << (4 * k));
        let d = f16::from_bits(d).to_f32();
        for (i, eight) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let nibble = block[32 + i / 2] >> (4 * (i % 2)) & 15;
            let scale = u16_at(block, 48 + 2 * (i / 8)) >> (3 * (i / 2 % 4)) & 7;
            let index = usize::from(block[i]) | usize::from(nibble & 7) << 8;
            shifted(eight, d * f32::from(2 * scale + 1), &grid[index], nibble & 8 != 0);
        }
    });
}

pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 256], importance, block: &mut [u8; 56]| {
        let Fitted { d, scales, entries, down } = fit(x, importance, Reach { scale: 2, shift: 1 });
        block[32..48].fill(0);
        for (i, entry) in entries.iter().enumerate() {
            block[i] = *entry as u8;
            block[32 + i / 2] |= (((entry >> 8) as u8) | u8::from(down[i]) << 3) << (4 * (i % 2));
        }
        for k in 0..4 {
            let codes = (0..4).fold(0, |bits, j| bits | u16::from(scales[4 * k + j]) << (3 * j));
            let word = codes | (d.to_bits() >> (4 * k) & 15) << 12;
            block[48 + 2 * k..50 + 2 * k].copy_from_slice(&word.to_le_bytes());
        }
    });
}
