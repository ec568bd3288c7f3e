//! Looks for NaN and infinity in tensor data. Codes of blocks are always finite, so only their scales are looked at:
//! a pass over a file costs little more than touching its pages.

use rayon::prelude::*;

use super::dequantise;
use crate::TensorType;

/// What makes a block of a format something else than finite numbers.
#[derive(Clone, Copy)]
pub(super) enum Scales {
    /// Every value is a float of this many bytes, whose exponent is all ones.
    Values(FloatKind),
    /// Half floats at these bytes of a block.
    Halves(&'static [usize]),
    /// Whatever this says of a block.
    Look(fn(&[u8]) -> bool),
    /// Nothing: every bit pattern is a finite number.
    Never,
}

/// A kind of float.
#[derive(Clone, Copy)]
pub(super) enum FloatKind {
    F16,
    Bf16,
    F32,
    F64,
}

/// Bytes that a task of one thread looks at.
const TASK: usize = 1 << 20;

/// The first value that is not finite (its index), or `None` where all are. On all threads of the current rayon pool.
/// `bytes` are whole blocks of a type of files.
pub fn first_not_finite(ty: TensorType, bytes: &[u8]) -> Option<usize> {
    let (scales, block) = (super::format(ty).scales, ty.block_bytes());
    if matches!(scales, Scales::Never) {
        return None;
    }
    let task = (TASK / block).max(1) * block;
    let in_task = |(i, piece): (usize, &[u8])| {
        if !suspicious(scales, block, piece) {
            return None;
        }
        // A block with a strange scale is read as every other: what counts is what comes out.
        let mut values = vec![0.0f32; ty.block_len()];
        let in_block = |(j, bytes): (usize, &[u8])| {
            if !suspicious(scales, block, bytes) || dequantise(ty, bytes, &mut values).is_err() {
                return None;
            }
            let wrong = values.iter().position(|v| !v.is_finite())?;
            Some((i * (task / block) + j) * ty.block_len() + wrong)
        };
        piece.chunks_exact(block).enumerate().find_map(in_block)
    };
    bytes.par_chunks(task).enumerate().find_map_first(in_task)
}

/// Whether whole blocks may hold something else than finite numbers.
fn suspicious(scales: Scales, block: usize, bytes: &[u8]) -> bool {
    fn any<const N: usize>(bytes: &[u8], wrong: impl Fn([u8; N]) -> bool) -> bool {
        // Without a way out inside the inner loop, which lets it run on vectors.
        bytes.chunks(N * 4096).any(|some| some.as_chunks().0.iter().fold(false, |found, value| found | wrong(*value)))
    }
    let is_special = |half: [u8; 2]| u16::from_le_bytes(half) & 0x7c00 == 0x7c00;
    match scales {
        Scales::Values(FloatKind::F16) => any(bytes, is_special),
        Scales::Values(FloatKind::Bf16) => any(bytes, |b| u16::from_le_bytes(b) & 0x7f80 == 0x7f80),
        Scales::Values(FloatKind::F32) => any(bytes, |b| u32::from_le_bytes(b) & 0x7f80_0000 == 0x7f80_0000),
        Scales::Values(FloatKind::F64) => any(bytes, |b| !(f64::from_le_bytes(b) as f32).is_finite()),
        Scales::Halves(places) => places.iter().any(|&at| {
            bytes.chunks_exact(block).fold(false, |found, block| found | is_special([block[at], block[at + 1]]))
        }),
        Scales::Look(wrong) => bytes.chunks_exact(block).any(wrong),
        Scales::Never => false,
    }
}

/// A float of 32 bits at the beginning of a block, which codes of up to 128 are multiplied with.
pub(super) fn float_first(block: &[u8]) -> bool {
    block.first_chunk().is_none_or(|bytes| !(128.0 * f32::from_le_bytes(*bytes)).is_finite())
}

/// A power of two whose multiples overflow, or the code that stands for NaN.
pub(super) fn large_power_first(block: &[u8]) -> bool {
    block.first().is_none_or(|exponent| *exponent > 252)
}

/// The half float whose nibbles lie on top of four words at the end of an IQ1_M block.
pub(super) fn scattered_half(block: &[u8]) -> bool {
    block[55] >> 4 & 7 == 7 && block[53] >> 6 == 3
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition: dequantise and look at every value.
    fn plainly(ty: TensorType, bytes: &[u8]) -> Option<usize> {
        let mut values = vec![0.0; bytes.len() / ty.block_bytes() * ty.block_len()];
        dequantise(ty, bytes, &mut values).unwrap();
        values.iter().position(|v| !v.is_finite())
    }

    #[test]
    fn every_format_agrees_with_its_definition_on_any_bytes() {
        let mut state = 1u64;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u8
        };
        for &ty in TensorType::ALL {
            let mut found = 0;
            for round in 0..300 {
                // Many blocks seldom hit the exponent; bytes of ones do at once.
                let blocks = 1 + round % 7;
                let mut bytes: Vec<u8> = (0..blocks * ty.block_bytes()).map(|_| random()).collect();
                if round % 3 == 0 {
                    let at = usize::from(random()) % bytes.len();
                    bytes[at..].iter_mut().take(8).for_each(|b| *b = 0xff);
                }
                let want = plainly(ty, &bytes);
                assert_eq!(first_not_finite(ty, &bytes), want, "{ty}, round {round}");
                found += usize::from(want.is_some());
            }
            let never = matches!(super::super::format(ty).scales, Scales::Never);
            assert_eq!(found == 0, never, "{ty}: {found} of 300");
        }
    }

    #[test]
    fn a_single_value_of_many_is_found() {
        for (ty, nan) in [(TensorType::F16, &[0x00, 0x7e][..]), (TensorType::Q8_0, &[0xff, 0xff])] {
            let blocks = 3 * TASK / ty.block_bytes();
            let mut bytes = vec![0; blocks * ty.block_bytes()];
            assert_eq!(first_not_finite(ty, &bytes), None);
            let at = blocks / 2;
            bytes[at * ty.block_bytes()..][..2].copy_from_slice(nan);
            assert_eq!(first_not_finite(ty, &bytes), Some(at * ty.block_len()));
        }
    }
}
