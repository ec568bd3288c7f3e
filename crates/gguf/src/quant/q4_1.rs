//! Q4_1: 32 values in 20 bytes. f16 d @0, f16 m @2, nibbles @4[16] (element e low in byte e, e + 16 high).
//! value = nibble * d + m

use super::blocks::{decode, half_at, put_nibbles};
use super::eight::encode_lines;

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 20], out: &mut [f32; 32]| {
        let (d, m) = (half_at(block, 0), half_at(block, 2));
        for l in 0..16 {
            out[l] = f32::from(block[4 + l] & 15) * d + m;
            out[l + 16] = f32::from(block[4 + l] >> 4) * d + m;
        }
    });
}

/// The codes span the range from the smallest to the largest value; with an importance the best line is searched.
pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode_lines(row, importance, out, 15.0, |codes, block: &mut [u8; 20]| put_nibbles(codes, &mut block[4..]));
}
