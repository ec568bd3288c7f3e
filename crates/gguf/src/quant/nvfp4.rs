//! NVFP4: 64 values in 36 bytes, 4 sub-blocks of 16. Scales @0[4] (unsigned 8-bit floats, four bits of exponent, three
//! of mantissa), 4-bit floats @4[32]: element 16 s + r in byte 4 + 8 s + r % 8, low half for r < 8.
//! value = table[nibble] * scale / 2, where the table holds the floats doubled

use super::blocks::{decode, encode, max_abs};
use super::codebook::{E2M1_DOUBLED, nvfp4_half_scale};
use super::mxfp4::{index, squared_error};
use super::search::{mean_square, normalise, weigh};

/// The largest finite scale, 448; the next code means nothing and reads as zero.
const TOP: u8 = 0x7e;

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 36], out: &mut [f32; 64]| {
        for (s, sub) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let d = nvfp4_half_scale(block[s]);
            for r in 0..8 {
                let byte = block[4 + 8 * s + r];
                sub[r] = d * f32::from(E2M1_DOUBLED[usize::from(byte & 15)]);
                sub[r + 8] = d * f32::from(E2M1_DOUBLED[usize::from(byte >> 4)]);
            }
        }
    });
}

/// The largest magnitude becomes about 6; the scales around that are tried and the smallest squared error wins.
pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 64], importance, block: &mut [u8; 36]| {
        for (s, sub) in x.as_chunks::<16>().0.iter().enumerate() {
            let weights = match (importance, normalise(sub, f32::MAX)) {
                (Some(importance), Some(block)) => {
                    weigh(&block.x, &importance.as_chunks::<16>().0[s], mean_square(&block.x))
                }
                _ => [1.0; 16],
            };
            block[s] = best_scale(sub, &weights);
            let d = nvfp4_half_scale(block[s]);
            let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
            for r in 0..8 {
                block[4 + 8 * s + r] = index(sub[r] * inverse) | index(sub[r + 8] * inverse) << 4;
            }
        }
    });
}

fn best_scale(x: &[f32; 16], weights: &[f32; 16]) -> u8 {
    let largest = max_abs(x);
    if largest == 0.0 {
        return 0;
    }
    let middle = scale_code(largest / 6.0);
    let mut best = (f32::INFINITY, middle);
    for code in middle.saturating_sub(2).max(1)..=(middle + 2).min(TOP) {
        let error = squared_error(x, weights, nvfp4_half_scale(code));
        if error < best.0 {
            best = (error, code);
        }
    }
    best.1
}

/// The code of the scale nearest to `scale`.
fn scale_code(scale: f32) -> u8 {
    let (mut low, mut high) = (0, TOP);
    while low < high {
        let middle = (low + high) / 2;
        if nvfp4_half_scale(middle) + nvfp4_half_scale(middle + 1) < scale { low = middle + 1 } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_codes_lead_back_to_their_scale() {
        for code in 0..=TOP {
            assert_eq!(scale_code(2.0 * nvfp4_half_scale(code)), code);
        }
        assert_eq!(scale_code(1e30), TOP);
        assert_eq!(nvfp4_half_scale(TOP), 224.0);
    }
}
