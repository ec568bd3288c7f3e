//! Plain floats and integers, little-endian, without blocks. Integers are only read: weights are never stored so.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::blocks::LARGEST_HALF;

/// Values converted at once, so that the conversion runs over whole vectors without an allocation.
const CHUNK: usize = 256;

pub(super) fn dequantise_f32(bytes: &[u8], out: &mut [f32]) {
    each(bytes, out, f32::from_le_bytes);
}

pub(super) fn dequantise_f64(bytes: &[u8], out: &mut [f32]) {
    each(bytes, out, |b| f64::from_le_bytes(b) as f32);
}

pub(super) fn dequantise_f16(bytes: &[u8], out: &mut [f32]) {
    let mut halves = [f16::ZERO; CHUNK];
    for (bytes, out) in bytes.chunks(2 * CHUNK).zip(out.chunks_mut(CHUNK)) {
        let halves = &mut halves[..out.len()];
        for (half, b) in halves.iter_mut().zip(bytes.as_chunks().0) {
            *half = f16::from_le_bytes(*b);
        }
        halves.convert_to_f32_slice(out);
    }
}

/// BF16 is the upper half of an f32.
pub(super) fn dequantise_bf16(bytes: &[u8], out: &mut [f32]) {
    each(bytes, out, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16));
}

pub(super) fn dequantise_i8(bytes: &[u8], out: &mut [f32]) {
    each(bytes, out, |b| f32::from(i8::from_le_bytes(b)));
}

pub(super) fn dequantise_i16(bytes: &[u8], out: &mut [f32]) {
    each(bytes, out, |b| f32::from(i16::from_le_bytes(b)));
}

pub(super) fn dequantise_i32(bytes: &[u8], out: &mut [f32]) {
    each(bytes, out, |b| i32::from_le_bytes(b) as f32);
}

pub(super) fn dequantise_i64(bytes: &[u8], out: &mut [f32]) {
    each(bytes, out, |b| i64::from_le_bytes(b) as f32);
}

pub(super) fn quantise_f32(row: &[f32], _importance: Option<&[f32]>, out: &mut [u8]) {
    for (value, b) in row.iter().zip(out.as_chunks_mut().0) {
        *b = value.to_le_bytes();
    }
}

pub(super) fn quantise_f64(row: &[f32], _importance: Option<&[f32]>, out: &mut [u8]) {
    for (&value, b) in row.iter().zip(out.as_chunks_mut().0) {
        *b = f64::from(value).to_le_bytes();
    }
}

/// Rounds to nearest; finite values beyond f16 become its largest finite value, infinities stay.
pub(super) fn quantise_f16(row: &[f32], _importance: Option<&[f32]>, out: &mut [u8]) {
    let mut clamped = [0f32; CHUNK];
    let mut halves = [f16::ZERO; CHUNK];
    for (row, out) in row.chunks(CHUNK).zip(out.chunks_mut(2 * CHUNK)) {
        let (clamped, halves) = (&mut clamped[..row.len()], &mut halves[..row.len()]);
        for (clamped, &value) in clamped.iter_mut().zip(row) {
            let saturated = value.clamp(-LARGEST_HALF, LARGEST_HALF);
            *clamped = if value.abs() == f32::INFINITY { value } else { saturated };
        }
        halves.convert_from_f32_slice(clamped);
        for (half, b) in halves.iter().zip(out.as_chunks_mut().0) {
            *b = half.to_le_bytes();
        }
    }
}

/// Rounds to nearest even; finite values beyond bf16 become its largest finite value, infinities stay.
pub(super) fn quantise_bf16(row: &[f32], _importance: Option<&[f32]>, out: &mut [u8]) {
    for (&value, b) in row.iter().zip(out.as_chunks_mut().0) {
        let bits = value.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
        // An exponent of all ones means that the rounding overflowed, or that the value was no number before.
        let special = rounded & 0x7f80 == 0x7f80 || bits & 0x7f80_0000 == 0x7f80_0000;
        *b = if special { special_bf16(value) } else { rounded }.to_le_bytes();
    }
}

#[cold]
fn special_bf16(value: f32) -> u16 {
    if value.is_finite() {
        bf16::MAX.to_bits() | bf16::from_f32(value).to_bits() & 0x8000
    } else {
        bf16::from_f32(value).to_bits()
    }
}

fn each<const BYTES: usize>(bytes: &[u8], out: &mut [f32], read: impl Fn([u8; BYTES]) -> f32) {
    for (value, b) in out.iter_mut().zip(bytes.as_chunks().0) {
        *value = read(*b);
    }
}
