//! Q8_K: 256 values in 292 bytes. f32 d @0, int8 @4[256], int16 sums of 16 codes each @260[16]. For activations on the
//! CPU.
//! value = d * q

use super::blocks::{decode, encode, extreme};
use super::search::{nearest, within};

pub(super) fn dequantise(bytes: &[u8], out: &mut [f32]) {
    decode(bytes, out, |block: &[u8; 292], out: &mut [f32; 256]| {
        let d = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
        for (value, &q) in out.iter_mut().zip(&block[4..260]) {
            *value = d * f32::from(q as i8);
        }
    });
}

/// The value of largest magnitude becomes -127.
pub(super) fn quantise(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    encode(row, importance, out, |x: &[f32; 256], _, block: &mut [u8; 292]| {
        block.fill(0);
        // A little below the end of f32, where rounding d upwards would make 127 d infinite.
        let largest = within(extreme(x), -3.4e38, 3.4e38);
        // Smaller blocks have no finite inverse scale; they count as zero.
        if largest.abs() < 1e-36 {
            return;
        }
        let inverse = -127.0 / largest;
        block[..4].copy_from_slice(&(largest / -127.0).to_le_bytes());
        let (head, sums) = block.split_at_mut(260);
        for (i, sub) in x.as_chunks::<16>().0.iter().enumerate() {
            let mut sum = 0i16;
            for (l, &value) in sub.iter().enumerate() {
                let q = nearest(within(value * inverse, -127.0, 127.0)) as i8;
                head[4 + 16 * i + l] = q as u8;
                sum += i16::from(q);
            }
            sums[2 * i..2 * i + 2].copy_from_slice(&sum.to_le_bytes());
        }
    });
}
