//! IQ1_M: 256 values in 56 bytes. Low bytes of the grid indices @0[32], a nibble per 8 values @32[16] (three upper bits
//! of the index, the sign of the shift), u16 @48[4]: four times three bits of scale, one per 16 values, and on top a
//! nibble of the f16 d, lowest first. value = d * (2 scale + 1) * (grid[index][j] + 1/8, or - 1/8 where the nibble's
//! top bit is set)

use half::f16;

use super::blocks::{decode, u16_at};
use super::codebook::iq1;
use super::iq1_s::shifted;

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
