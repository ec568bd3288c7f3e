//! Rows of weights on the CPU as floats. Plain types become floats in vector registers, thirty-two at a time: to be
//! multiplied with a small N at once, or to be stored for many. Two block formats of large codes do so, too, where activations
//! are few. The other ones come here where an activation vector cannot be rounded; they are made floats by the host first. Their usual way
//! is in `cpu_quants.rs`.

use std::array::from_fn;

use fearless_simd::prelude::*;
use fearless_simd::{Simd, dispatch, f32x16, i8x16, i32x16, u8x16, u8x32, u8x64, u16x16, u32x16};
use kiln_gguf::{TensorType, quant};
use kiln_system::instructions::{fetch, gains_by_fetching};

use crate::simd::{finite_half, level, load, native_halves};

/// Bytes ahead of which memory is fetched where that helps.
const AHEAD: usize = 2048;

/// Bytes from run to run from which on reading several runs of rows side by side is faster than reading them in a row. On Zen 4, of
/// rows of 1,152 bytes in a mapped file, four runs of 6 KiB are read at 0.65 times the speed of one reader, four of 27 KiB at the
/// same, and four of 108 KiB at 1.25 times.
const FAR: usize = 64 << 10;

/// Rows that lie `stride` bytes apart.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    /// Their type.
    pub ty: TensorType,
    /// From the first one on.
    pub bytes: &'a [u8],
    /// From row to row.
    pub stride: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
}

/// Whether a small N meet rows of this type as floats: turning codes into floats costs less than making words of them. Where
/// they become bytes in registers, that is faster still, and where vectors are as short as ARM's, words are.
pub(super) fn is_float_for_few(ty: TensorType) -> bool {
    #[cfg(target_arch = "x86_64")]
    let as_codes = level().as_avx512().is_some();
    #[cfg(not(target_arch = "x86_64"))]
    let as_codes = cfg!(target_arch = "aarch64");
    matches!(ty, TensorType::Q8_0 | TensorType::Q6_K) && !as_codes
}

/// Calls a generic function with the format of a type, or else does what is last.
macro_rules! with_format {
    ($ty:expr, [$($variant:ident $name:ident),*], $function:ident $arguments:tt, else $other:expr) => {
        match $ty {
            $(TensorType::$variant => $function::<$name> $arguments,)*
            _ => $other,
        }
    };
}

impl<'a> Rows<'a> {
    /// Row number `i`.
    pub(super) fn row(&self, i: usize) -> &'a [u8] {
        &self.bytes[i * self.stride..][..self.row_bytes]
    }

    /// `depth` elements of row `i` from `start` on, whole blocks.
    pub(super) fn piece(&self, i: usize, start: usize, depth: usize) -> &'a [u8] {
        self.pieces(i, 1, start, depth)
    }

    /// The same of `count` rows, which are whole and lie side by side if there are several.
    pub(super) fn pieces(&self, i: usize, count: usize, start: usize, depth: usize) -> &'a [u8] {
        let bytes = |elements: usize| elements / self.ty.block_len() * self.ty.block_bytes();
        &self.bytes[i * self.stride + bytes(start)..][..count * bytes(depth)]
    }

    /// Rows times activations of `k` elements: the results of a row lie side by side.
    pub(super) fn dots(self, k: usize, columns: &[f32], out: &mut [f32]) {
        with_format!(
            self.ty,
            [F32 F32, F16 F16, BF16 BF16, Q8_0 Q8_0, Q6_K Q6K],
            dots_of(self, k, columns, out),
            else {
                let mut row = vec![0.0; k];
                for (i, out) in out.chunks_exact_mut(columns.len() / k).enumerate() {
                    decode(self.ty, self.row(i), &mut row);
                    let bytes: &[u8] = bytemuck::cast_slice(&row);
                    let floats = Rows { ty: TensorType::F32, bytes, stride: 0, row_bytes: bytes.len() };
                    dots_of::<F32>(floats, k, columns, out);
                }
            }
        );
    }
}

/// Whole blocks as floats.
pub(super) fn decode(ty: TensorType, bytes: &[u8], out: &mut [f32]) {
    with_format!(
        ty,
        [F32 F32, F16 F16, BF16 BF16],
        decode_of(bytes, out),
        else quant::dequantise(ty, bytes, out).expect("rows are whole blocks")
    );
}

/// A plain type, whose elements become floats in registers. They come in blocks of thirty-two; the last one may be filled
/// up with zeros.
trait Format {
    /// Elements of a block, a multiple of thirty-two.
    const LEN: usize;
    /// Bytes of a block.
    const BYTES: usize;

    /// Calls `each(i, a, b)` with elements `32 i .. 32 i + 16` and `32 i + 16 .. 32 i + 32` for every i.
    fn values<S: Simd>(simd: S, block: &[u8], each: impl FnMut(usize, f32x16<S>, f32x16<S>));
}

#[inline(never)]
fn dots_of<F: Format>(rows: Rows<'_>, k: usize, columns: &[f32], out: &mut [f32]) {
    dispatch!(level(), simd => {
        let n = columns.len() / k;
        if n == 1 {
            return one_column::<_, F>(simd, rows, columns, out);
        }
        for (i, out) in out.chunks_exact_mut(n).enumerate() {
            let row = rows.row(i);
            let (fours, rest) = out.as_chunks_mut::<4>();
            let mut columns = columns;
            for out in fours {
                let (four, after) = columns.split_at(4 * k);
                [*out] = row_dots::<_, F, 1, 4>(simd, [row], from_fn(|c| &four[c * k..][..k]));
                columns = after;
            }
            for (out, column) in rest.iter_mut().zip(columns.chunks_exact(k)) {
                [[*out]] = row_dots::<_, F, 1, 1>(simd, [row], [column]);
            }
        }
    });
}

/// Rows times one activation vector: the sums of four rows have room among registers of sixteen floats, those of two among shorter ones. Rows of
/// F32 are read by two as well: by four they are a tenth slower (Zen 4, a mapped file).
#[inline(always)]
fn one_column<S: Simd, F: Format>(simd: S, rows: Rows<'_>, column: &[f32], out: &mut [f32]) {
    if S::f32s::LEN == 16 && F::BYTES < 4 * F::LEN {
        far_dots::<_, F, 4>(simd, rows, column, out);
    } else {
        far_dots::<_, F, 2>(simd, rows, column, out);
    }
}

/// Rows times one activation vector. Hardware prefetchers follow several sequential streams at once: the rows
/// are `R` runs that are read side by side. Readers within the same few pages hinder each other, so short runs are read in a row.
#[inline(always)]
fn far_dots<S: Simd, F: Format, const R: usize>(simd: S, rows: Rows<'_>, column: &[f32], out: &mut [f32]) {
    let run = out.len() / R;
    let side_by_side = if run * rows.row_bytes < FAR { 0 } else { run };
    for i in 0..side_by_side {
        let sums = row_dots::<_, F, R, 1>(simd, from_fn(|r| rows.row(r * run + i)), [column]);
        sums.into_iter().enumerate().for_each(|(r, [sum])| out[r * run + i] = sum);
    }
    for (i, out) in out.iter_mut().enumerate().skip(R * side_by_side) {
        [[*out]] = row_dots::<_, F, 1, 1>(simd, [rows.row(i)], [column]);
    }
}

/// `R` rows times `N` columns. A result's bits do not depend on the rows and columns beside it.
#[inline(always)]
fn row_dots<S: Simd, F: Format, const R: usize, const N: usize>(
    simd: S,
    rows: [&[u8]; R],
    columns: [&[f32]; N],
) -> [[f32; N]; R] {
    let mut sums = [[[f32x16::splat(simd, 0.0); 2]; N]; R];
    let (whole, ahead) = (rows[0].len() / F::BYTES, gains_by_fetching());
    for i in 0..whole {
        let x: [&[f32]; N] = from_fn(|c| &columns[c][i * F::LEN..][..F::LEN]);
        for (row, sums) in rows.iter().zip(&mut sums) {
            let block = &row[i * F::BYTES..][..F::BYTES];
            if ahead {
                (0..F::BYTES).step_by(64).for_each(|at| fetch(block, at + AHEAD));
            }
            add_block::<S, F, N>(simd, block, x, sums);
        }
    }
    if whole * F::BYTES < rows[0].len() {
        // Only plain types have a rest, and zeros are zero bytes in all of them.
        let mut padded = [[0.0; 32]; N];
        for (padded, column) in padded.iter_mut().zip(columns) {
            padded[..column.len() - whole * F::LEN].copy_from_slice(&column[whole * F::LEN..]);
        }
        for (row, sums) in rows.iter().zip(&mut sums) {
            let rest = &row[whole * F::BYTES..];
            let mut block = [0; 128];
            block[..rest.len()].copy_from_slice(rest);
            add_block::<S, F, N>(simd, &block[..F::BYTES], from_fn(|c| &padded[c][..]), sums);
        }
    }
    sums.map(|sums| sums.map(|sums| (sums[0] + sums[1]).reduce_sum()))
}

#[inline(always)]
fn add_block<S: Simd, F: Format, const N: usize>(
    simd: S,
    block: &[u8],
    x: [&[f32]; N],
    sums: &mut [[f32x16<S>; 2]; N],
) {
    F::values(
        simd,
        block,
        #[inline(always)]
        |i, a, b| {
            for (x, sums) in x.iter().zip(sums.iter_mut()) {
                let x = &x[32 * i..][..32];
                sums[0] = a.mul_add(load(simd, x), sums[0]);
                sums[1] = b.mul_add(load(simd, &x[16..]), sums[1]);
            }
        },
    );
}

#[inline(never)]
fn decode_of<F: Format>(bytes: &[u8], out: &mut [f32]) {
    dispatch!(level(), simd => {
        let blocks = bytes.chunks_exact(F::BYTES);
        let rest = blocks.remainder();
        let mut outs = out.chunks_exact_mut(F::LEN);
        for (block, out) in blocks.zip(&mut outs) {
            store_block::<_, F>(simd, block, out);
        }
        if !rest.is_empty() {
            let (mut block, mut values) = ([0; 128], [0.0; 32]);
            block[..rest.len()].copy_from_slice(rest);
            store_block::<_, F>(simd, &block[..F::BYTES], &mut values);
            let out = outs.into_remainder();
            out.copy_from_slice(&values[..out.len()]);
        }
    });
}

#[inline(always)]
fn store_block<S: Simd, F: Format>(simd: S, block: &[u8], out: &mut [f32]) {
    F::values(
        simd,
        block,
        #[inline(always)]
        |i, a, b| {
            let out = &mut out[32 * i..][..32];
            a.store_slice(&mut out[..16]);
            b.store_slice(&mut out[16..]);
        },
    );
}

#[inline(always)]
pub(super) fn half_at(block: &[u8], at: usize) -> f32 {
    finite_half(u16::from_le_bytes([block[at], block[at + 1]]))
}

#[inline(always)]
pub(super) fn sixteen<S: Simd>(simd: S, block: &[u8], at: usize) -> u8x16<S> {
    u8x16::load_array_ref(simd, block[at..].first_chunk().expect("blocks hold whole sixteens"))
}

#[inline(always)]
pub(super) fn bits_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Declares a format: elements and bytes of a block, and its floats.
macro_rules! format {
    ($name:ident, $len:literal in $bytes:literal, |$simd:ident, $block:ident, $each:ident| $body:block) => {
        struct $name;

        impl Format for $name {
            const LEN: usize = $len;
            const BYTES: usize = $bytes;

            #[inline(always)]
            fn values<S: Simd>($simd: S, $block: &[u8], mut $each: impl FnMut(usize, f32x16<S>, f32x16<S>)) $body
        }
    };
}

format!(F32, 32 in 128, |simd, block, each| {
    let a = u8x64::from_slice(simd, &block[..64]);
    let b = u8x64::from_slice(simd, &block[64..128]);
    each(0, a.bitcast(), b.bitcast());
});

/// Sixteen numbers of 16 bits, each in 32.
#[inline(always)]
fn words<S: Simd>(simd: S, block: &[u8], at: usize) -> u32x16<S> {
    let words: u16x16<S> = u8x32::from_slice(simd, &block[at..][..32]).bitcast();
    let (a, b) = words.widen();
    a.combine(b)
}

/// See [`finite_half`].
#[inline(always)]
pub(super) fn halves<S: Simd>(simd: S, words: u32x16<S>) -> f32x16<S> {
    let magnitude: f32x16<S> = ((words & 0x7fff) << 13).bitcast();
    let bits: u32x16<S> = (magnitude * f32x16::splat(simd, f32::from_bits(0x7780_0000))).bitcast();
    (bits | (words & 0x8000) << 16).bitcast()
}

format!(F16, 32 in 64, |simd, block, each| {
    each(0, sixteen_halves(simd, block, 0), sixteen_halves(simd, block, 32));
});

/// Sixteen half floats, which are finite.
#[inline(always)]
fn sixteen_halves<S: Simd>(simd: S, block: &[u8], at: usize) -> f32x16<S> {
    let native = native_halves(simd, block[at..].first_chunk().expect("thirty-two bytes"));
    native.unwrap_or_else(|| halves(simd, words(simd, block, at)))
}

format!(BF16, 32 in 64, |simd, block, each| {
    each(0, (words(simd, block, 0) << 16).bitcast(), (words(simd, block, 32) << 16).bitcast());
});

#[inline(always)]
fn signed<S: Simd>(codes: u8x16<S>) -> f32x16<S> {
    let codes: i8x16<S> = codes.bitcast();
    let (a, b) = codes.widen();
    let ((a, b), (c, d)) = (a.widen(), b.widen());
    let codes: i32x16<S> = a.combine(b).combine(c.combine(d));
    codes.to_float()
}

#[inline(always)]
fn wide<S: Simd>(codes: u8x16<S>) -> u32x16<S> {
    let (a, b) = codes.widen();
    let ((a, b), (c, d)) = (a.widen(), b.widen());
    a.combine(b).combine(c.combine(d))
}

/// codes * scale + offset
#[inline(always)]
fn affine_of<S: Simd>(simd: S, codes: u32x16<S>, scale: f32, offset: f32) -> f32x16<S> {
    let codes: i32x16<S> = codes.bitcast();
    let codes: f32x16<S> = codes.to_float();
    codes.mul_add(f32x16::splat(simd, scale), f32x16::splat(simd, offset))
}

#[inline(always)]
fn affine<S: Simd>(simd: S, codes: u8x16<S>, scale: f32, offset: f32) -> f32x16<S> {
    affine_of(simd, wide(codes), scale, offset)
}

format!(Q8_0, 32 in 34, |simd, block, each| {
    let d = f32x16::splat(simd, half_at(block, 0));
    each(0, signed(sixteen(simd, block, 2)) * d, signed(sixteen(simd, block, 18)) * d);
});

format!(Q6K, 256 in 210, |simd, block, each| {
    let d = half_at(block, 208);
    // Thirty-two elements at a time: 128 n + 32 g.
    for i in 0..8 {
        let (n, g) = (i / 4, i % 4);
        let mut pair = [f32x16::splat(simd, 0.0); 2];
        for (half, values) in pair.iter_mut().enumerate() {
            let lows = (sixteen(simd, block, 64 * n + 32 * (g % 2) + 16 * half) >> (4 * (g / 2) as u32)) & 15;
            let highs = (sixteen(simd, block, 128 + 32 * n + 16 * half) >> (2 * g as u32)) & 3;
            let scale = d * f32::from(block[192 + 2 * i + half] as i8);
            *values = affine(simd, lows | highs << 4, scale, -32.0 * scale);
        }
        each(i, pair[0], pair[1]);
    }
});

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows that lie far enough apart to be read side by side, and some that are left over, have the bits that each has alone.
    #[test]
    fn rows_read_side_by_side_are_those_read_alone() {
        let (k, m) = (1024, 4 * 40 + 3);
        let column: Vec<f32> = (0..k).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
        for ty in [TensorType::F32, TensorType::F16, TensorType::BF16] {
            let row_bytes = k / ty.block_len() * ty.block_bytes();
            assert!(m / 4 * row_bytes >= FAR, "{ty}: rows should lie far apart");
            // Any bits below 0x3c00 are finite in all three types.
            let bytes: Vec<u8> =
                (0..m * row_bytes / 2).flat_map(|i| ((i * 7919 % 0x3c00) as u16).to_le_bytes()).collect();
            let rows = Rows { ty, bytes: &bytes, stride: row_bytes, row_bytes };
            let mut together = vec![f32::NAN; m];
            rows.dots(k, &column, &mut together);
            for (i, got) in together.iter().enumerate() {
                let mut alone = [f32::NAN];
                Rows { bytes: rows.row(i), ..rows }.dots(k, &column, &mut alone);
                assert_eq!(got.to_bits(), alone[0].to_bits(), "{ty}: row {i}: {got} and {}", alone[0]);
            }
            assert!(together.windows(2).any(|pair| pair[0] != pair[1]), "{ty}: rows should differ");
        }
    }
}
