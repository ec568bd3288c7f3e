//! Q2_0: 64 values in 18 bytes. f16 d @0, two-bit codes @2[16] (element e at bit 2 (e % 4) of byte e / 4).
//! value = (code - 1) * d

use super::blocks::{decode, encode, half_at, max_abs, put_scale};
use super::search::within;

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 18], out: &mut [f32; 64]| {
        let d = half_at(block, 0);
        for (e, value) in out.iter_mut().enumerate() {
            *value = f32::from((block[2 + e / 4] >> (2 * (e % 4)) & 3) as i8 - 1) * d;
        }
    });
}

/// d is the largest magnitude: the format is for weights that are -1, 0, 1 times a scale, and keeps those exactly.
pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 64], _, block: &mut [u8; 18]| {
        let inverse = put_scale(block, 0, max_abs(x));
        for (byte, four) in block[2..].iter_mut().zip(x.as_chunks::<4>().0) {
            *byte = (0..4).fold(0, |bits, j| bits | ternary(four[j] * inverse) << (2 * j));
        }
    });
}

/// 0, 1, 2 for a level nearest to -1, 0, 1; halves away from zero.
#[inline(always)]
pub(super) fn ternary(level: f32) -> u8 {
    (within(level + 0.5f32.copysign(level), -1.0, 1.0) as i32 + 1) as u8
}
