//! TQ1_0: 256 values in 54 bytes. Base-3 digits, five a byte @0[48], four a byte @48[4], f16 d @52. Elements 0..160:
//! byte e % 32, digit e / 32; 160..240: byte 32 + (e - 160) % 16, digit (e - 160) / 16; 240..256: byte 48 + (e - 240) %
//! 4, digit (e - 240) / 4. A byte is the digits' fraction of 256, rounded up: multiplying it by 3 moves the next digit
//! into the carry. value = (digit - 1) * d

use super::blocks::{decode, encode, half_at, max_abs, put_scale};
use super::q2_0::ternary;

/// First element, first byte, bytes and digits per byte of the three parts.
const PARTS: [(usize, usize, usize, usize); 3] = [(0, 0, 32, 5), (160, 32, 16, 5), (240, 48, 4, 4)];
const POWERS: [u8; 5] = [1, 3, 9, 27, 81];

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 54], out: &mut [f32; 256]| {
        let d = half_at(block, 52);
        for (element, byte, count, digits) in PARTS {
            for (digit, power) in POWERS[..digits].iter().enumerate() {
                let run = &mut out[element + digit * count..][..count];
                for (value, packed) in run.iter_mut().zip(&block[byte..]) {
                    let rest = packed.wrapping_mul(*power);
                    *value = f32::from(((u16::from(rest) * 3) >> 8) as i8 - 1) * d;
                }
            }
        }
    });
}

/// d is the largest magnitude: the format is for weights that are -1, 0, 1 times a scale, and keeps those exactly.
pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 256], _, block: &mut [u8; 54]| {
        let inverse = put_scale(block, 52, max_abs(x));
        for (element, byte, count, digits) in PARTS {
            let mut numbers = [0u16; 32];
            for digit in 0..5 {
                for (l, number) in numbers[..count].iter_mut().enumerate() {
                    // A missing fifth digit is zero.
                    let trit = if digit < digits { ternary(x[element + digit * count + l] * inverse) } else { 0 };
                    *number = *number * 3 + u16::from(trit);
                }
            }
            for (packed, number) in block[byte..byte + count].iter_mut().zip(numbers) {
                *packed = (number * 256).div_ceil(243) as u8;
            }
        }
    });
}
