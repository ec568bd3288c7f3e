//! Q5_1: 32 values in 24 bytes. f16 d @0, f16 m @2, fifth bits u32 @4 (bit e of element e), nibbles @8[16] as in Q4_1.
//! value = (nibble + 16 * bit) * d + m

use super::blocks::{decode, fifth_bits, half_at, put_nibbles, u32_at};
use super::eight::encode_lines;

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 24], out: &mut [f32; 32]| {
        let (d, m, high) = (half_at(block, 0), half_at(block, 2), u32_at(block, 4));
        for l in 0..16 {
            let low_code = u32::from(block[8 + l] & 15) | (high >> l & 1) << 4;
            let high_code = u32::from(block[8 + l] >> 4) | (high >> (l + 16) & 1) << 4;
            out[l] = low_code as f32 * d + m;
            out[l + 16] = high_code as f32 * d + m;
        }
    });
}

/// The codes span the range from the smallest to the largest value; with an importance the best line is searched.
pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode_lines(row, importance, out, 31.0, |codes, block: &mut [u8; 24]| {
        block[4..8].copy_from_slice(&fifth_bits(codes).to_le_bytes());
        put_nibbles(codes, &mut block[8..]);
    });
}
