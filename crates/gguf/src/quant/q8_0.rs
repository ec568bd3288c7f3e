//! Q8_0: 32 values in 34 bytes. f16 d @0, int8 @2[32].
//! value = q * d

use super::blocks::{decode, encode, half_at, max_abs, put_scale};
use super::search::within;

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 34], out: &mut [f32; 32]| {
        let d = half_at(block, 0);
        for (value, &q) in out.iter_mut().zip(&block[2..]) {
            *value = f32::from(q as i8) * d;
        }
    });
}

/// The largest magnitude becomes 127. Eight bits leave nothing for a search, so the importance changes nothing.
pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 32], _, block: &mut [u8; 34]| {
        let inverse = put_scale(block, 0, max_abs(x) / 127.0);
        for (q, &value) in block[2..].iter_mut().zip(x) {
            *q = code(value * inverse) as u8;
        }
    });
}

/// The nearest int8, halves away from zero.
#[inline(always)]
pub(super) fn code(level: f32) -> i8 {
    within(level + 0.5f32.copysign(level), -127.0, 127.0) as i32 as i8
}
