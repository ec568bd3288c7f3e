//! Walking over packed blocks, and the small pieces several formats share: f16 scales, nibbles, block extremes.
//! What a block means lives in the file of its format.

use half::f16;

/// Lanes of the running sums. Float sums are not reordered by the compiler, so the lanes are written out.
pub(super) const LANES: usize = 8;

/// The largest finite f16.
pub(super) const LARGEST_HALF: f32 = 65504.0;

/// Pairs packed blocks with the values they hold.
pub(super) fn decode<const BYTES: usize, const LEN: usize>(
    bytes: &[u8],
    out: &mut [f32],
    mut block: impl FnMut(&[u8; BYTES], &mut [f32; LEN]),
) {
    for (packed, values) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        block(packed, values);
    }
}

/// Pairs the blocks of a row with their packed form and with their part of the importance.
pub(super) fn encode<const BYTES: usize, const LEN: usize>(
    row: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
    mut block: impl FnMut(&[f32; LEN], Option<&[f32; LEN]>, &mut [u8; BYTES]),
) {
    let weights = importance.map(|weights| weights.as_chunks().0);
    for (i, (values, packed)) in row.as_chunks().0.iter().zip(out.as_chunks_mut().0).enumerate() {
        block(values, weights.map(|weights| &weights[i]), packed);
    }
}

/// The f16 at byte `at`, as f32.
#[inline]
pub(super) fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_bits(u16_at(block, at)).to_f32()
}

/// The little-endian u16 at byte `at`.
#[inline]
pub(super) fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// The little-endian u32 at byte `at`.
#[inline]
pub(super) fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// The nearest f16; what is too large becomes the largest finite one, because an infinite scale would ruin the block.
#[inline]
pub(super) fn saturate(value: f32) -> f16 {
    f16::from_f32(value.clamp(-LARGEST_HALF, LARGEST_HALF))
}

/// Writes `value` as f16 at byte `at` and gives back what a reader will see.
#[inline]
pub(super) fn put_half(block: &mut [u8], at: usize, value: f32) -> f32 {
    let half = saturate(value);
    block[at..at + 2].copy_from_slice(&half.to_le_bytes());
    half.to_f32()
}

/// Writes the scale `d` of a simple block at byte `at` and gives the factor that turns values into codes.
/// It belongs to the unrounded scale, which is the usual rule of these formats, except where f16 cannot hold the scale:
/// one too large saturates, and one that vanishes makes all codes zero.
#[inline]
pub(super) fn put_scale(block: &mut [u8], at: usize, d: f32) -> f32 {
    let stored = put_half(block, at, d);
    if stored == 0.0 {
        0.0
    } else if d.abs() > LARGEST_HALF {
        1.0 / stored
    } else {
        1.0 / d
    }
}

/// Sixteen bytes of nibbles: element `e` in the low half of byte `e`, element `e + 16` in the high half.
#[inline]
pub(super) fn put_nibbles(codes: &[u8; 32], out: &mut [u8]) {
    for (l, byte) in out[..16].iter_mut().enumerate() {
        *byte = (codes[l] & 15) | (codes[l + 16] << 4);
    }
}

/// Bit `e` is bit 4 of code `e`.
#[inline]
pub(super) fn fifth_bits(codes: &[u8; 32]) -> u32 {
    codes.iter().enumerate().fold(0, |bits, (e, &code)| bits | (u32::from(code >> 4) & 1) << e)
}

/// The largest magnitude; NaN counts as nothing.
#[inline]
pub(super) fn max_abs<const N: usize>(x: &[f32; N]) -> f32 {
    let mut lanes = [0f32; LANES];
    for chunk in x.as_chunks::<LANES>().0 {
        for l in 0..LANES {
            let a = chunk[l].abs();
            lanes[l] = if a > lanes[l] { a } else { lanes[l] };
        }
    }
    lanes.iter().fold(0.0, |m, &a| if a > m { a } else { m })
}

/// The smallest and the largest value; NaN counts as nothing.
#[inline]
pub(super) fn min_max<const N: usize>(x: &[f32; N]) -> (f32, f32) {
    let mut low = [f32::INFINITY; LANES];
    let mut high = [f32::NEG_INFINITY; LANES];
    for chunk in x.as_chunks::<LANES>().0 {
        for l in 0..LANES {
            low[l] = if chunk[l] < low[l] { chunk[l] } else { low[l] };
            high[l] = if chunk[l] > high[l] { chunk[l] } else { high[l] };
        }
    }
    let low = low.iter().fold(f32::INFINITY, |m, &a| if a < m { a } else { m });
    let high = high.iter().fold(f32::NEG_INFINITY, |m, &a| if a > m { a } else { m });
    if low > high { (0.0, 0.0) } else { (low, high) }
}

/// The value with the largest magnitude, with its sign; the first one of a tie.
#[inline]
pub(super) fn extreme<const N: usize>(x: &[f32; N]) -> f32 {
    let (low, high) = min_max(x);
    if high > -low {
        high
    } else if -low > high {
        low
    } else {
        x.iter().copied().find(|v| v.abs() == high).unwrap_or(0.0)
    }
}

/// The sum, in [`LANES`] partial sums.
#[inline]
pub(super) fn sum<const N: usize>(x: &[f32; N]) -> f32 {
    let mut lanes = [0f32; LANES];
    for chunk in x.as_chunks::<LANES>().0 {
        for l in 0..LANES {
            lanes[l] += chunk[l];
        }
    }
    total(&lanes)
}

/// The sum of the lanes, pairwise.
#[inline]
pub(super) fn total(lanes: &[f32; LANES]) -> f32 {
    let [a, b, c, d, e, f, g, h] = *lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extreme_keeps_its_sign_and_the_first_of_a_tie_wins() {
        assert_eq!(extreme(&[0.0, -3.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]), -3.0);
        assert_eq!(extreme(&[0.0, 3.0, 2.0, -3.0, 0.0, 0.0, 0.0, 0.0]), 3.0);
        assert_eq!(extreme(&[0.0, 3.0, 2.0, -4.0, f32::NAN, 0.0, 0.0, 0.0]), -4.0);
        assert_eq!(extreme(&[f32::NAN; 8]), 0.0);
    }
}
