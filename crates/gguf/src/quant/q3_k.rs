//! Q3_K: 256 values in 110 bytes, 16 sub-blocks of 16. High bits @0[32] (bit 4 n + g of byte l), two-bit codes @32[64]
//! as in Q2_K, six-bit scales @96[12], f16 d @108. Scale i: four bits at nibble i / 8 of byte 96 + i % 8, two bits at
//! bit 2 (i / 4) of byte 104 + i % 4. value = d * (scale - 32) * (low + 4 * high - 4)

use super::blocks::{decode, encode, half_at};
use super::q2_k::put_two_bits;
use super::search::{around, nearest, within};
use super::superblock::{Symmetric, SymmetricShape, fit_symmetric};

/// Trials for the value of largest magnitude of a sub-block.
const LEVELS: [f32; 19] = around(-4.0, 0.1);
const SHAPE: SymmetricShape = SymmetricShape { levels: &LEVELS, lowest_scale: -32.0, evenness: 0.5 };

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 110], out: &mut [f32; 256]| {
        let d = half_at(block, 108);
        for (i, sub) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let low = block[96 + i % 8] >> (4 * (i / 8)) & 15;
            let high = block[104 + i % 4] >> (2 * (i / 4)) & 3;
            let scale = d * f32::from((low | high << 4) as i8 - 32);
            let (at, plane) = (16 * (i % 2), i / 2);
            let low_bits = &block[32 + 32 * (i / 8) + at..];
            let high_bits = &block[at..];
            for (l, value) in sub.iter_mut().enumerate() {
                let code = (low_bits[l] >> (2 * (plane % 4)) & 3) | (high_bits[l] >> plane & 1) << 2;
                *value = scale * f32::from(code as i8 - 4);
            }
        }
    });
}

pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 256], importance, block: &mut [u8; 110]| {
        let snap = |level| within(nearest(level), -4.0, 3.0);
        let Symmetric { d, scales, levels } = fit_symmetric::<16, 16>(x, importance, &SHAPE, snap);
        let codes = levels.map(|level| (snap(level) + 4.0) as u8);
        for (l, byte) in block[..32].iter_mut().enumerate() {
            *byte = (0..8).fold(0, |bits, plane| bits | (codes[32 * plane + l] >> 2) << plane);
        }
        put_two_bits(&codes, &mut block[32..96]);
        block[96..108].fill(0);
        for (i, &scale) in scales.iter().enumerate() {
            let code = (scale + 32) as u8;
            block[96 + i % 8] |= (code & 15) << (4 * (i / 8));
            block[104 + i % 4] |= (code >> 4) << (2 * (i / 4));
        }
        block[108..110].copy_from_slice(&d.to_le_bytes());
    });
}
