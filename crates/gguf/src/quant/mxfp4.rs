//! MXFP4: 32 values in 17 bytes. Exponent @0 (a power of two, biased by 127), 4-bit floats @1[16] (element e low in
//! byte e, e + 16 high). value = table[nibble] * 2^(exponent - 128), where the table holds the floats doubled

use super::blocks::{LANES, decode, encode, max_abs, put_nibbles, total};
use super::codebook::E2M1_DOUBLED;
use super::search::{mean_square, normalise, weigh};

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 17], out: &mut [f32; 32]| {
        let d = half_power(block[0]);
        for l in 0..16 {
            out[l] = d * f32::from(E2M1_DOUBLED[usize::from(block[1 + l] & 15)]);
            out[l + 16] = d * f32::from(E2M1_DOUBLED[usize::from(block[1 + l] >> 4)]);
        }
    });
}

/// The largest magnitude lies between 4 and 8 times the scale; above 6 it is cut off, so the next larger scale is tried
/// as well and the smaller squared error wins.
pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 32], importance, block: &mut [u8; 17]| {
        let largest = max_abs(x).min(f32::MAX);
        // The exponent of f32 is biased by 127 too. The largest power whose floats all stay finite is 2^125.
        let exponent = ((largest.to_bits() >> 23) as u8).saturating_sub(2).min(252);
        let weights = match (importance, normalise(x, f32::MAX)) {
            (Some(importance), Some(block)) => weigh(&block.x, importance, mean_square(&block.x)),
            _ => [1.0; 32],
        };
        let error = |exponent| squared_error(x, &weights, half_power(exponent));
        block[0] = if largest > 0.0 && exponent < 252 && error(exponent + 1) < error(exponent) {
            exponent + 1
        } else {
            exponent
        };
        let inverse = 1.0 / half_power(block[0]).max(f32::MIN_POSITIVE);
        put_nibbles(&x.map(|value| index(value * inverse)), &mut block[1..]);
    });
}

/// 2^(exponent - 128); the two smallest are subnormal.
#[inline]
fn half_power(exponent: u8) -> f32 {
    f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { u32::from(exponent - 1) << 23 })
}

/// The weighted error in units of the scale times the scale, so that it cannot overflow alone.
#[inline]
pub(super) fn squared_error<const N: usize>(x: &[f32; N], weights: &[f32; N], d: f32) -> f32 {
    let inverse = 1.0 / d.max(f32::MIN_POSITIVE);
    let mut lanes = [0f32; LANES];
    for c in 0..N / LANES {
        for l in 0..LANES {
            let level = (x[c * LANES + l] * inverse).abs();
            let miss = level - magnitude(level);
            lanes[l] += weights[c * LANES + l] * miss * miss;
        }
    }
    total(&lanes) * d * d
}

/// The doubled magnitude nearest to `level`, which is not negative.
#[inline(always)]
fn magnitude(level: f32) -> f32 {
    let mut value = 0.0;
    for k in 0..7 {
        let (low, high) = (f32::from(E2M1_DOUBLED[k]), f32::from(E2M1_DOUBLED[k + 1]));
        value += if level > (low + high) * 0.5 { high - low } else { 0.0 };
    }
    value
}

/// The index of the doubled 4-bit float nearest to `level`.
#[inline(always)]
pub(super) fn index(level: f32) -> u8 {
    let (size, mut index) = (level.abs(), 0);
    for k in 0..7 {
        let middle = (f32::from(E2M1_DOUBLED[k]) + f32::from(E2M1_DOUBLED[k + 1])) * 0.5;
        index += u8::from(size > middle);
    }
    if level < 0.0 && index > 0 { index | 8 } else { index }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_lead_to_the_nearest_float() {
        for tenth in -150..150 {
            let level = tenth as f32 / 10.0;
            let distance = |index: usize| (f32::from(E2M1_DOUBLED[index]) - level).abs();
            let nearest = (0..16).map(distance).fold(f32::MAX, f32::min);
            assert_eq!(distance(usize::from(index(level))), nearest, "{level}");
            assert_eq!((level.abs() - magnitude(level.abs())).abs(), nearest, "{level}");
        }
    }
}
