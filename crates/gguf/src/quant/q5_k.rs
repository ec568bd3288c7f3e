//! Q5_K: 256 values in 176 bytes, 8 sub-blocks of 32. Head @0[16] as in Q4_K, fifth bits @16[32] (bit i of byte l for
//! element 32 i + l), nibbles @48[128] as in Q4_K. value = d * scale * code - dmin * min

use super::blocks::{decode, encode, half_at};
use super::q4_k::{put_head, put_low_nibbles, scale_and_min, six_bits};
use super::search::Trials;
use super::superblock::{AffineShape, fit_affine};

const SHAPE: AffineShape =
    AffineShape { top: 31.0, scale_top: 63.0, evenness: 1.0, trials: Trials { first: -1.0, step: 0.1, count: 21 } };

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 176], out: &mut [f32; 256]| {
        let (d, dmin) = (half_at(block, 0), half_at(block, 2));
        let packed = six_bits(block);
        for (i, sub) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale, min) = scale_and_min(packed, i);
            let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
            let nibbles = &block[48 + 32 * (i / 2)..][..32];
            for (l, value) in sub.iter_mut().enumerate() {
                let code = (nibbles[l] >> (4 * (i % 2)) & 15) | (block[16 + l] >> i & 1) << 4;
                *value = scale * f32::from(code) - min;
            }
        }
    });
}

pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 256], importance, block: &mut [u8; 176]| {
        let fit = fit_affine::<32, 8>(x, importance, &SHAPE);
        put_head(&fit, block);
        for (l, byte) in block[16..48].iter_mut().enumerate() {
            *byte = (0..8).fold(0, |bits, i| bits | (fit.codes[32 * i + l] >> 4) << i);
        }
        put_low_nibbles(&fit.codes, &mut block[48..]);
    });
}
