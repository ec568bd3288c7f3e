//! IQ2_XXS: 256 values in 66 bytes. f16 d @0, eight groups of two u32 @2: four grid indices of a byte each; four times
//! seven sign bits and, on top, four bits of scale. value = d * (0.5 + scale) / 4 * grid[index][j], with sign

use super::blocks::{decode, half_at, u32_at};
use super::codebook::{even_signs, iq2_xxs};

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    let grid = iq2_xxs();
    decode(bytes, out, |block: &[u8; 66], out: &mut [f32; 256]| {
        let d = half_at(block, 0);
        for (i, group) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (indices, rest) = (2 + 8 * i, u32_at(block, 6 + 8 * i));
            let scale = d * (0.5 + (rest >> 28) as f32) * 0.25;
            for (g, eight) in group.as_chunks_mut().0.iter_mut().enumerate() {
                let entry = &grid[usize::from(block[indices + g])];
                signed(eight, scale, entry, even_signs(rest >> (7 * g)));
            }
        }
    });
}

/// Writes `scale * entry`, negated where the sign bit is set.
#[inline]
pub(super) fn signed<const N: usize>(out: &mut [f32; N], scale: f32, entry: &[i8; N], signs: u8) {
    for j in 0..N {
        let value = scale * f32::from(entry[j]);
        out[j] = if signs >> j & 1 == 1 { -value } else { value };
    }
}
