//! Q6_K: 256 values in 210 bytes, 16 sub-blocks of 16. Low nibbles @0[128], upper two bits @128[64], int8 scales
//! @192[16], f16 d @208. Element 128 n + 32 g + l: nibble g / 2 of byte 64 n + 32 (g % 2) + l, bits 2 g of byte 128 +
//! 32 n + l.
//! value = d * scale * (code - 32)

use super::blocks::{decode, encode, half_at};
use super::search::{around, nearest, within};
use super::superblock::{Symmetric, SymmetricShape, fit_symmetric};

/// Trials for the value of largest magnitude of a sub-block.
const LEVELS: [f32; 19] = around(-32.0, 0.1);
const SHAPE: SymmetricShape = SymmetricShape { levels: &LEVELS, lowest_scale: -128.0, evenness: 0.1 };

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 210], out: &mut [f32; 256]| {
        let d = half_at(block, 208);
        for (i, sub) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = d * f32::from(block[192 + i] as i8);
            let (n, g, at) = (i / 8, i / 2 % 4, 16 * (i % 2));
            let low = &block[64 * n + 32 * (g % 2) + at..][..16];
            let high = &block[128 + 32 * n + at..][..16];
            for (l, value) in sub.iter_mut().enumerate() {
                let code = (low[l] >> (4 * (g / 2)) & 15) | (high[l] >> (2 * g) & 3) << 4;
                *value = scale * f32::from(code as i8 - 32);
            }
        }
    });
}

pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 256], importance, block: &mut [u8; 210]| {
        let snap = |level| within(nearest(level), -32.0, 31.0);
        let Symmetric { d, scales, levels } = fit_symmetric::<16, 16>(x, importance, &SHAPE, snap);
        let codes = levels.map(|level| (snap(level) + 32.0) as u8);
        for (n, half) in codes.as_chunks::<128>().0.iter().enumerate() {
            for l in 0..64 {
                block[64 * n + l] = (half[l] & 15) | half[64 + l] << 4;
            }
            for l in 0..32 {
                block[128 + 32 * n + l] = (0..4).fold(0, |bits, g| bits | (half[32 * g + l] >> 4) << (2 * g));
            }
        }
        for (byte, scale) in block[192..208].iter_mut().zip(scales) {
            *byte = scale as u8;
        }
        block[208..210].copy_from_slice(&d.to_le_bytes());
    });
}
