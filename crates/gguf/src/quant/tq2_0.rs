//! TQ2_0: 256 values in 66 bytes. Two-bit codes @0[64], f16 d @64. Element 128 n + 32 g + l sits at bit 2 g of byte 32
//! n + l.
//! value = (code - 1) * d

use super::blocks::{decode, encode, half_at, max_abs, put_scale};
use super::q2_0::ternary;

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 66], out: &mut [f32; 256]| {
        let d = half_at(block, 64);
        for (i, run) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (n, shift) = (i / 4, 2 * (i % 4));
            for (value, &byte) in run.iter_mut().zip(&block[32 * n..]) {
                *value = f32::from((byte >> shift & 3) as i8 - 1) * d;
            }
        }
    });
}

/// d is the largest magnitude: the format is for weights that are -1, 0, 1 times a scale, and keeps those exactly.
pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 256], _, block: &mut [u8; 66]| {
        let inverse = put_scale(block, 64, max_abs(x));
        for (n, half) in x.as_chunks::<128>().0.iter().enumerate() {
            for l in 0..32 {
                block[32 * n + l] = (0..4).fold(0, |bits, g| bits | ternary(half[32 * g + l] * inverse) << (2 * g));
            }
        }
    });
}
