//! Q4_K: 256 values in 144 bytes, 8 sub-blocks of 32. f16 d @0, f16 dmin @2, six-bit scales and minimums @4[12],
//! nibbles @16[128]: element 64 c + l in the low half of byte 16 + 32 c + l, element 64 c + 32 + l in the high half.
//! value = d * scale * code - dmin * min

use super::blocks::{decode, encode, half_at};
use super::search::Trials;
use super::superblock::{Affine, AffineShape, fit_affine};

const SHAPE: AffineShape =
    AffineShape { top: 15.0, scale_top: 63.0, evenness: 1.0, trials: Trials { first: -1.0, step: 0.1, count: 21 } };

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 144], out: &mut [f32; 256]| {
        let (d, dmin) = (half_at(block, 0), half_at(block, 2));
        let packed = six_bits(block);
        for (i, sub) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale, min) = scale_and_min(packed, i);
            let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
            for (value, byte) in sub.iter_mut().zip(&block[16 + 32 * (i / 2)..]) {
                *value = scale * f32::from(byte >> (4 * (i % 2)) & 15) - min;
            }
        }
    });
}

pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 256], importance, block: &mut [u8; 144]| {
        let fit = fit_affine::<32, 8>(x, importance, &SHAPE);
        put_head(&fit, block);
        put_low_nibbles(&fit.codes, &mut block[16..]);
    });
}

/// The twelve bytes of six-bit numbers in the head of a Q4_K or Q5_K block.
#[inline]
pub(super) fn six_bits(block: &[u8]) -> &[u8; 12] {
    block[4..].first_chunk().expect("a block should be longer than its head")
}

/// Scale and minimum of sub-block `i`. The first four have six bits of a byte each; the upper two bits of those bytes
/// are the upper bits of the last four, whose lower bits share a byte.
#[inline]
pub(super) fn scale_and_min(c: &[u8; 12], i: usize) -> (u8, u8) {
    if i < 4 {
        (c[i] & 63, c[i + 4] & 63)
    } else {
        ((c[i + 4] & 15) | (c[i - 4] >> 6) << 4, (c[i + 4] >> 4) | (c[i] >> 6) << 4)
    }
}

/// The first 16 bytes of a Q4_K or Q5_K block: d, dmin, scales and minimums.
#[inline]
pub(super) fn put_head(fit: &Affine<8>, block: &mut [u8]) {
    block[0..2].copy_from_slice(&fit.d.to_le_bytes());
    block[2..4].copy_from_slice(&fit.dmin.to_le_bytes());
    for i in 0..4 {
        block[4 + i] = fit.scales[i] | (fit.scales[i + 4] >> 4) << 6;
        block[8 + i] = fit.mins[i] | (fit.mins[i + 4] >> 4) << 6;
        block[12 + i] = (fit.scales[i + 4] & 15) | (fit.mins[i + 4] & 15) << 4;
    }
}

/// The lower four bits of every code.
#[inline]
pub(super) fn put_low_nibbles(codes: &[u8; 256], out: &mut [u8]) {
    for (pair, out) in codes.as_chunks::<64>().0.iter().zip(out.as_chunks_mut::<32>().0) {
        for (l, byte) in out.iter_mut().enumerate() {
            *byte = (pair[l] & 15) | pair[32 + l] << 4;
        }
    }
}
