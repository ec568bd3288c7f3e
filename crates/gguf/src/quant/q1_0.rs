//! Q1_0: 128 values in 18 bytes. f16 d @0, bits @2[16] (element e is bit e % 8 of byte e / 8).
//! value = +d where the bit is set, else -d

use std::array;

use super::blocks::{decode, encode, half_at, put_half, sum};

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 18], out: &mut [f32; 128]| {
        let d = half_at(block, 0);
        for (e, value) in out.iter_mut().enumerate() {
            *value = if block[2 + e / 8] >> (e % 8) & 1 == 1 { d } else { -d };
        }
    });
}

/// d is the mean magnitude, which is the best scale for signs alone; the importance weighs that mean.
pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 128], importance, block: &mut [u8; 18]| {
        put_half(block, 0, mean_magnitude(x, importance));
        for (byte, eight) in block[2..].iter_mut().zip(x.as_chunks::<8>().0) {
            *byte = (0..8).fold(0, |bits, j| bits | u8::from(eight[j] >= 0.0) << j);
        }
    });
}

fn mean_magnitude(x: &[f32; 128], importance: Option<&[f32; 128]>) -> f32 {
    // NaN counts as nothing: the maximum of it and zero is zero.
    let magnitudes = x.map(|value| value.abs().max(0.0));
    if let Some(importance) = importance {
        let whole = sum(importance);
        if whole > 0.0 && whole <= f32::MAX {
            return sum(&array::from_fn::<f32, 128, _>(|e| magnitudes[e] * (importance[e] / whole)));
        }
    }
    sum(&magnitudes.map(|magnitude| magnitude / 128.0))
}
