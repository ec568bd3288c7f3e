//! Q4_0: 32 values in 18 bytes. f16 d @0, nibbles @2[16] (element e in the low half of byte e, e + 16 in the high
//! half).
//! value = (nibble - 8) * d

use super::blocks::{decode, encode, extreme, half_at, put_nibbles, put_scale};
use super::eight::encode_scaled;
use super::search::{around, nearest, within};

/// Trials for the value of largest magnitude, when there is an importance.
const LEVELS: [f32; 19] = around(-8.0, 0.1);

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 18], out: &mut [f32; 32]| {
        let d = half_at(block, 0);
        for l in 0..16 {
            out[l] = f32::from((block[2 + l] & 15) as i8 - 8) * d;
            out[l + 16] = f32::from((block[2 + l] >> 4) as i8 - 8) * d;
        }
    });
}

/// The value of largest magnitude becomes -8; with an importance the best of several scales is taken.
pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    if importance.is_none() {
        return encode(row, None, out, |x: &[f32; 32], _, block: &mut [u8; 18]| put(x, extreme(x) / -8.0, block));
    }
    let snap = |level| within(nearest(level), -8.0, 7.0);
    encode_scaled(row, importance, out, &LEVELS, snap, put);
}

#[inline]
fn put(x: &[f32; 32], d: f32, block: &mut [u8; 18]) {
    let inverse = put_scale(block, 0, d);
    let codes = x.map(|value| within(value * inverse + 8.5, 0.0, 15.0) as i32 as u8);
    put_nibbles(&codes, &mut block[2..]);
}
