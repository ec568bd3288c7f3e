//! IQ4_XS: 256 values in 136 bytes, 8 sub-blocks of 32. f16 d @0, upper two bits of the scales u16 @2 (bits 2 i), lower
//! four @4[4] (nibble i % 2 of byte i / 2), nibbles @8[128], 16 bytes a sub-block as in IQ4_NL.
//! value = d * (scale - 32) * table[nibble]

use super::blocks::{decode, encode, half_at, put_nibbles, u16_at};
use super::codebook::IQ4;
use super::iq4_nl::{LEVELS, index, snap};
use super::superblock::{Symmetric, SymmetricShape, fit_symmetric};

const SHAPE: SymmetricShape = SymmetricShape { levels: &LEVELS, lowest_scale: -32.0, evenness: 0.5 };

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 136], out: &mut [f32; 256]| {
        let (d, high) = (half_at(block, 0), u16_at(block, 2));
        for (i, sub) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let low = block[4 + i / 2] >> (4 * (i % 2)) & 15;
            let scale = d * f32::from((low | ((high >> (2 * i) & 3) as u8) << 4) as i8 - 32);
            for l in 0..16 {
                let byte = block[8 + 16 * i + l];
                sub[l] = scale * f32::from(IQ4[usize::from(byte & 15)]);
                sub[l + 16] = scale * f32::from(IQ4[usize::from(byte >> 4)]);
            }
        }
    });
}

pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 256], importance, block: &mut [u8; 136]| {
        let Symmetric { d, scales, levels } = fit_symmetric::<32, 8>(x, importance, &SHAPE, snap);
        block[..8].fill(0);
        block[..2].copy_from_slice(&d.to_le_bytes());
        let mut high = 0u16;
        for (i, &scale) in scales.iter().enumerate() {
            let code = (scale + 32) as u8;
            block[4 + i / 2] |= (code & 15) << (4 * (i % 2));
            high |= u16::from(code >> 4) << (2 * i);
        }
        block[2..4].copy_from_slice(&high.to_le_bytes());
        for (sub, out) in levels.as_chunks::<32>().0.iter().zip(block[8..].as_chunks_mut::<16>().0) {
            put_nibbles(&sub.map(index), out);
        }
    });
}
