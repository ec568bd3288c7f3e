//! Q5_0: 32 values in 22 bytes. f16 d @0, fifth bits u32 @2 (bit e of element e), nibbles @6[16] as in Q4_0.
//! value = (nibble + 16 * bit - 16) * d

use super::blocks::{decode, encode, extreme, fifth_bits, half_at, put_nibbles, put_scale, u32_at};
use super::eight::encode_scaled;
use super::search::{around, nearest, within};

/// Trials for the value of largest magnitude, when there is an importance.
const LEVELS: [f32; 19] = around(-16.0, 0.1);

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 22], out: &mut [f32; 32]| {
        let (d, high) = (half_at(block, 0), u32_at(block, 2));
        for l in 0..16 {
            let low_code = u32::from(block[6 + l] & 15) | (high >> l & 1) << 4;
            let high_code = u32::from(block[6 + l] >> 4) | (high >> (l + 16) & 1) << 4;
            out[l] = (low_code as i32 - 16) as f32 * d;
            out[l + 16] = (high_code as i32 - 16) as f32 * d;
        }
    });
}

/// The value of largest magnitude becomes -16; with an importance the best of several scales is taken.
pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    if importance.is_none() {
        return encode(row, None, out, |x: &[f32; 32], _, block: &mut [u8; 22]| put(x, extreme(x) / -16.0, block));
    }
    let snap = |level| within(nearest(level), -16.0, 15.0);
    encode_scaled(row, importance, out, &LEVELS, snap, put);
}

#[inline]
fn put(x: &[f32; 32], d: f32, block: &mut [u8; 22]) {
    let inverse = put_scale(block, 0, d);
    let codes = x.map(|value| within(value * inverse + 16.5, 0.0, 31.0) as i32 as u8);
    block[2..6].copy_from_slice(&fifth_bits(&codes).to_le_bytes());
    put_nibbles(&codes, &mut block[6..]);
}
