//! Q8_1: 32 values in 36 bytes. f16 d @0, f16 s @2 (d times the sum of the codes), int8 @4[32]. For activations.
//! value = q * d

use super::blocks::{LARGEST_HALF, decode, encode, half_at, max_abs, put_half, put_scale};
use super::q8_0::code;

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 36], out: &mut [f32; 32]| {
        let d = half_at(block, 0);
        for (value, &q) in out.iter_mut().zip(&block[4..]) {
            *value = f32::from(q as i8) * d;
        }
    });
}

/// As Q8_0, plus the sum.
pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 32], _, block: &mut [u8; 36]| {
        let d = (max_abs(x) / 127.0).min(LARGEST_HALF);
        let inverse = put_scale(block, 0, d);
        let mut sum = 0;
        for (q, &value) in block[4..].iter_mut().zip(x) {
            let q8 = code(value * inverse);
            sum += i32::from(q8);
            *q = q8 as u8;
        }
        put_half(block, 2, d * sum as f32);
    });
}
