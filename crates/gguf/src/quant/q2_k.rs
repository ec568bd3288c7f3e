//! Q2_K: 256 values in 84 bytes, 16 sub-blocks of 16. Scales @0[16] (low nibble scale, high nibble minimum), two-bit
//! codes @16[64], f16 d @80, f16 dmin @82. Element 128 n + 32 g + l sits at bit 2 g of byte 16 + 32 n + l.
//! value = d * scale * code - dmin * min

use super::blocks::{decode, encode, half_at};
use super::search::Trials;
use super::superblock::{Affine, AffineShape, fit_affine};

const SHAPE: AffineShape =
    AffineShape { top: 3.0, scale_top: 15.0, evenness: 0.25, trials: Trials { first: -0.5, step: 0.1, count: 16 } };

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 84], out: &mut [f32; 256]| {
        let (d, dmin) = (half_at(block, 80), half_at(block, 82));
        for (i, sub) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = d * f32::from(block[i] & 15);
            let min = dmin * f32::from(block[i] >> 4);
            let (at, shift) = (16 + 32 * (i / 8) + 16 * (i % 2), 2 * (i / 2 % 4));
            for (value, byte) in sub.iter_mut().zip(&block[at..]) {
                *value = scale * f32::from(byte >> shift & 3) - min;
            }
        }
    });
}

pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 256], importance, block: &mut [u8; 84]| {
        let Affine { d, dmin, scales, mins, codes } = fit_affine::<16, 16>(x, importance, &SHAPE);
        for i in 0..16 {
            block[i] = scales[i] | mins[i] << 4;
        }
        put_two_bits(&codes, &mut block[16..80]);
        block[80..82].copy_from_slice(&d.to_le_bytes());
        block[82..84].copy_from_slice(&dmin.to_le_bytes());
    });
}

/// The lower two bits of every code: element 128 n + 32 g + l at bit 2 g of byte 32 n + l.
#[inline]
pub(super) fn put_two_bits(codes: &[u8; 256], out: &mut [u8]) {
    for (half, out) in codes.as_chunks::<128>().0.iter().zip(out.as_chunks_mut::<32>().0) {
        for (l, byte) in out.iter_mut().enumerate() {
            *byte = (0..4).fold(0, |bits, g| bits | (half[32 * g + l] & 3) << (2 * g));
        }
    }
}
