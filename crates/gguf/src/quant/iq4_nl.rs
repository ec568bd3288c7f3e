//! IQ4_NL: 32 values in 18 bytes. f16 d @0, nibbles @2[16] (element e low in byte e, e + 16 high): indices into a table
//! of sixteen values that lie denser around zero. value = d * table[nibble]

use super::blocks::{decode, half_at, put_half, put_nibbles};
use super::codebook::IQ4;
use super::eight::encode_scaled;
use super::search::around;

/// Trials for the value of largest magnitude: the end of the table that reaches farther, and the other one.
pub(super) const LEVELS: [f32; 20] = {
    let mut levels = [0.0; 20];
    let (near, far): ([f32; 15], [f32; 5]) = (around(IQ4[0] as f32, 1.0), around(IQ4[15] as f32, 4.0));
    levels.split_at_mut(15).0.copy_from_slice(&near);
    levels.split_at_mut(15).1.copy_from_slice(&far);
    levels
};

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 18], out: &mut [f32; 32]| {
        let d = half_at(block, 0);
        for l in 0..16 {
            out[l] = d * f32::from(IQ4[usize::from(block[2 + l] & 15)]);
            out[l + 16] = d * f32::from(IQ4[usize::from(block[2 + l] >> 4)]);
        }
    });
}

pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode_scaled(row, importance, out, &LEVELS, snap, |x, d, block: &mut [u8; 18]| {
        let d = put_half(block, 0, d);
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        put_nibbles(&x.map(|value| index(value * inverse)), &mut block[2..]);
    });
}

/// The value of the table nearest to `level`. Fifteen comparisons without a branch run four or eight at a time, which
/// a search by halves does not.
#[inline(always)]
pub(super) fn snap(level: f32) -> f32 {
    let mut value = f32::from(IQ4[0]);
    for k in 0..15 {
        let step = f32::from(IQ4[k + 1]) - f32::from(IQ4[k]);
        value += if level > middle(k) { step } else { 0.0 };
    }
    value
}

/// The index of the value of the table nearest to `level`.
#[inline(always)]
pub(super) fn index(level: f32) -> u8 {
    (0..15).map(|k| u8::from(level > middle(k))).sum()
}

/// Halfway between two neighbours of the table.
#[inline(always)]
fn middle(k: usize) -> f32 {
    (f32::from(IQ4[k]) + f32::from(IQ4[k + 1])) * 0.5
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapping_finds_the_nearest_value_of_the_table() {
        for tenth in -1500..1500 {
            let level = tenth as f32 / 10.0;
            let distance = |value: f32| (value - level).abs();
            let nearest = IQ4.iter().map(|&v| distance(f32::from(v))).fold(f32::MAX, f32::min);
            assert_eq!(distance(snap(level)), nearest, "{level}");
            assert_eq!(f32::from(IQ4[usize::from(index(level))]), snap(level));
        }
    }
}
