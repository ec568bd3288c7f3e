//! Rows of weights on the CPU. The commonest formats become floats in vector registers, thirty-two at a time: to be
//! multiplied with a few columns at once, or to be stored for many. The other formats are made floats by the host first.

use std::array::from_fn;

use fearless_simd::prelude::*;
use fearless_simd::{Simd, dispatch, f32x4, f32x16, i8x16, i32x16, u8x16, u8x32, u8x64, u16x16, u32x4, u32x16, u64x2};
use kiln_gguf::quant::codebook::{E2M1_DOUBLED, IQ4};
use kiln_gguf::{TensorType, quant};

use crate::simd::{finite_half, level, load};

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

    /// Rows times columns of `k` elements: the results of a row lie side by side.
    pub(super) fn dots(self, k: usize, columns: &[f32], out: &mut [f32]) {
        with_format!(
            self.ty,
            [F32 F32, F16 F16, Q4_0 Q4_0, Q4_1 Q4_1, Q8_0 Q8_0, Q4_K Q4K, Q6_K Q6K],
            dots_of(self, k, columns, out),
            // Every function here is compiled for each instruction set: the rarer formats go through memory.
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
        [F32 F32, F16 F16, BF16 BF16, Q4_0 Q4_0, Q4_1 Q4_1, Q5_0 Q5_0, Q5_1 Q5_1, Q8_0 Q8_0, IQ4_NL IQ4NL,
         MXFP4 MXFP4, Q2_K Q2K, Q3_K Q3K, Q4_K Q4K, Q5_K Q5K, Q6_K Q6K],
        decode_of(bytes, out),
        else quant::dequantise(ty, bytes, out).expect("rows are whole blocks")
    );
}

/// A format whose blocks become floats in registers. Plain types come in blocks of thirty-two; their last block may be
/// filled up with zeros.
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
        for (i, out) in out.chunks_exact_mut(n).enumerate() {
            let row = rows.row(i);
            let (fours, rest) = out.as_chunks_mut::<4>();
            let mut columns = columns;
            for out in fours {
                let (four, after) = columns.split_at(4 * k);
                *out = row_dots::<_, F, 4>(simd, row, from_fn(|c| &four[c * k..][..k]));
                columns = after;
            }
            for (out, column) in rest.iter_mut().zip(columns.chunks_exact(k)) {
                [*out] = row_dots::<_, F, 1>(simd, row, [column]);
            }
        }
    });
}

/// A row times `N` columns. A result's bits do not depend on the columns beside it.
#[inline(always)]
fn row_dots<S: Simd, F: Format, const N: usize>(simd: S, row: &[u8], columns: [&[f32]; N]) -> [f32; N] {
    let mut sums = [[f32x16::splat(simd, 0.0); 2]; N];
    let blocks = row.chunks_exact(F::BYTES);
    let rest = blocks.remainder();
    let mut start = 0;
    for block in blocks {
        let x: [&[f32]; N] = from_fn(|c| &columns[c][start..][..F::LEN]);
        add_block::<S, F, N>(simd, block, x, &mut sums);
        start += F::LEN;
    }
    if !rest.is_empty() {
        // Only plain types have a rest, and zeros are zero bytes in all of them.
        let mut block = [0; 128];
        block[..rest.len()].copy_from_slice(rest);
        let mut padded = [[0.0; 32]; N];
        for (padded, column) in padded.iter_mut().zip(columns) {
            padded[..column.len() - start].copy_from_slice(&column[start..]);
        }
        add_block::<S, F, N>(simd, &block[..F::BYTES], from_fn(|c| &padded[c][..]), &mut sums);
    }
    from_fn(|c| (sums[c][0] + sums[c][1]).reduce_sum())
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
fn half_at(block: &[u8], at: usize) -> f32 {
    finite_half(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// Two half floats side by side, as [`half_at`] reads one.
#[inline(always)]
fn halves_at<S: Simd>(simd: S, block: &[u8], at: usize) -> (f32, f32) {
    let bits = u64::from(bits_at(block, at));
    let pair = (bits | bits << 16) & 0x0000_ffff_0000_ffff;
    let magnitudes: f32x4<S> = u64x2::load_array(simd, [(pair & 0x0000_7fff_0000_7fff) << 13, 0]).bitcast();
    let signs: u32x4<S> = u64x2::load_array(simd, [(pair & 0x0000_8000_0000_8000) << 16, 0]).bitcast();
    let bits: u32x4<S> = (magnitudes * f32x4::splat(simd, f32::from_bits(0x7780_0000))).bitcast();
    let floats: f32x4<S> = (bits | signs).bitcast();
    let [first, second, ..] = floats.to_array();
    (first, second)
}

#[inline(always)]
fn sixteen<S: Simd>(simd: S, block: &[u8], at: usize) -> u8x16<S> {
    u8x16::load_array_ref(simd, block[at..].first_chunk().expect("blocks hold whole sixteens"))
}

#[inline(always)]
fn wide<S: Simd>(codes: u8x16<S>) -> u32x16<S> {
    let (a, b) = codes.widen();
    let ((a, b), (c, d)) = (a.widen(), b.widen());
    a.combine(b).combine(c.combine(d))
}

#[inline(always)]
fn signed<S: Simd>(codes: u8x16<S>) -> f32x16<S> {
    let codes: i8x16<S> = codes.bitcast();
    let (a, b) = codes.widen();
    let ((a, b), (c, d)) = (a.widen(), b.widen());
    let codes: i32x16<S> = a.combine(b).combine(c.combine(d));
    codes.to_float()
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
fn halves<S: Simd>(simd: S, words: u32x16<S>) -> f32x16<S> {
    let magnitude: f32x16<S> = ((words & 0x7fff) << 13).bitcast();
    let bits: u32x16<S> = (magnitude * f32x16::splat(simd, f32::from_bits(0x7780_0000))).bitcast();
    (bits | (words & 0x8000) << 16).bitcast()
}

format!(F16, 32 in 64, |simd, block, each| {
    each(0, halves(simd, words(simd, block, 0)), halves(simd, words(simd, block, 32)));
});

format!(BF16, 32 in 64, |simd, block, each| {
    each(0, (words(simd, block, 0) << 16).bitcast(), (words(simd, block, 32) << 16).bitcast());
});

format!(Q4_0, 32 in 18, |simd, block, each| {
    let (d, nibbles) = (half_at(block, 0), sixteen(simd, block, 2));
    each(0, affine(simd, nibbles & 15, d, -8.0 * d), affine(simd, nibbles >> 4, d, -8.0 * d));
});

format!(Q4_1, 32 in 20, |simd, block, each| {
    let ((d, least), nibbles) = (halves_at(simd, block, 0), sixteen(simd, block, 4));
    each(0, affine(simd, nibbles & 15, d, least), affine(simd, nibbles >> 4, d, least));
});

/// Nibbles with a fifth bit each on top, the first of them the lowest of `bits`.
#[inline(always)]
fn with_fifth<S: Simd>(simd: S, nibbles: u8x16<S>, bits: u32) -> u32x16<S> {
    let lanes = u32x16::load_array(simd, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
    wide(nibbles) | ((u32x16::splat(simd, bits) >> lanes) & 1) << 4
}

#[inline(always)]
fn bits_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

format!(Q5_0, 32 in 22, |simd, block, each| {
    let (d, bits, nibbles) = (half_at(block, 0), bits_at(block, 2), sixteen(simd, block, 6));
    let a = affine_of(simd, with_fifth(simd, nibbles & 15, bits), d, -16.0 * d);
    each(0, a, affine_of(simd, with_fifth(simd, nibbles >> 4, bits >> 16), d, -16.0 * d));
});

format!(Q5_1, 32 in 24, |simd, block, each| {
    let (d, least) = halves_at(simd, block, 0);
    let (bits, nibbles) = (bits_at(block, 4), sixteen(simd, block, 8));
    let a = affine_of(simd, with_fifth(simd, nibbles & 15, bits), d, least);
    each(0, a, affine_of(simd, with_fifth(simd, nibbles >> 4, bits >> 16), d, least));
});

format!(Q8_0, 32 in 34, |simd, block, each| {
    let d = f32x16::splat(simd, half_at(block, 0));
    each(0, signed(sixteen(simd, block, 2)) * d, signed(sixteen(simd, block, 18)) * d);
});

/// Nibbles that are indices into a table of sixteen numbers.
#[inline(always)]
fn by_table<S: Simd>(simd: S, table: [i8; 16], nibbles: u8x16<S>, d: f32) -> (f32x16<S>, f32x16<S>) {
    let table: u8x16<S> = i8x16::load_array(simd, table).bitcast();
    let d = f32x16::splat(simd, d);
    (signed(table.swizzle_dyn(nibbles & 15)) * d, signed(table.swizzle_dyn(nibbles >> 4)) * d)
}

format!(IQ4NL, 32 in 18, |simd, block, each| {
    let (a, b) = by_table(simd, IQ4, sixteen(simd, block, 2), half_at(block, 0));
    each(0, a, b);
});

format!(MXFP4, 32 in 17, |simd, block, each| {
    // 2^(exponent - 128), where the two smallest are subnormal: the table holds the numbers doubled.
    let exponent = u32::from(block[0]);
    let d = f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 });
    let (a, b) = by_table(simd, E2M1_DOUBLED, sixteen(simd, block, 1), d);
    each(0, a, b);
});

format!(Q2K, 256 in 84, |simd, block, each| {
    let (d, dmin) = halves_at(simd, block, 80);
    for i in 0..8 {
        let (at, shift) = (16 + 32 * (i / 4), 2 * (i % 4) as u32);
        let mut pair = [f32x16::splat(simd, 0.0); 2];
        for (half, values) in pair.iter_mut().enumerate() {
            let (scale, least) = (f32::from(block[2 * i + half] & 15), f32::from(block[2 * i + half] >> 4));
            let codes = (sixteen(simd, block, at + 16 * half) >> shift) & 3;
            *values = affine(simd, codes, d * scale, -dmin * least);
        }
        each(i, pair[0], pair[1]);
    }
});

format!(Q3K, 256 in 110, |simd, block, each| {
    let d = half_at(block, 108);
    for i in 0..8 {
        let mut pair = [f32x16::splat(simd, 0.0); 2];
        for (half, values) in pair.iter_mut().enumerate() {
            let sub = 2 * i + half;
            let low = block[96 + sub % 8] >> (4 * (sub / 8)) & 15;
            let high = block[104 + sub % 4] >> (2 * (sub / 4)) & 3;
            let scale = d * f32::from((low | high << 4) as i8 - 32);
            let lows = (sixteen(simd, block, 32 + 32 * (i / 4) + 16 * half) >> (2 * (i % 4) as u32)) & 3;
            let highs = (sixteen(simd, block, 16 * half) >> i as u32) & 1;
            *values = affine(simd, lows | highs << 2, scale, -4.0 * scale);
        }
        each(i, pair[0], pair[1]);
    }
});

/// Scale and minimum of sub-block `i` from the twelve bytes of six-bit numbers.
#[inline(always)]
fn six_bits(c: &[u8], i: usize) -> (f32, f32) {
    let (scale, least) = match i {
        0..4 => (c[i] & 63, c[i + 4] & 63),
        _ => ((c[i + 4] & 15) | (c[i - 4] >> 6) << 4, (c[i + 4] >> 4) | (c[i] >> 6) << 4),
    };
    (f32::from(scale), f32::from(least))
}

format!(Q4K, 256 in 144, |simd, block, each| {
    let (d, dmin) = halves_at(simd, block, 0);
    for pair in 0..4 {
        let (a, b) = (sixteen(simd, block, 16 + 32 * pair), sixteen(simd, block, 32 + 32 * pair));
        let (scale, least) = six_bits(&block[4..16], 2 * pair);
        let (scale, least) = (d * scale, -dmin * least);
        each(2 * pair, affine(simd, a & 15, scale, least), affine(simd, b & 15, scale, least));
        let (scale, least) = six_bits(&block[4..16], 2 * pair + 1);
        let (scale, least) = (d * scale, -dmin * least);
        each(2 * pair + 1, affine(simd, a >> 4, scale, least), affine(simd, b >> 4, scale, least));
    }
});

format!(Q5K, 256 in 176, |simd, block, each| {
    let (d, dmin) = halves_at(simd, block, 0);
    for sub in 0..8 {
        let (scale, least) = six_bits(&block[4..16], sub);
        let mut pair = [f32x16::splat(simd, 0.0); 2];
        for (half, values) in pair.iter_mut().enumerate() {
            let nibbles = (sixteen(simd, block, 48 + 32 * (sub / 2) + 16 * half) >> (4 * (sub % 2) as u32)) & 15;
            let fifth = (sixteen(simd, block, 16 + 16 * half) >> sub as u32) & 1;
            *values = affine(simd, nibbles | fifth << 4, d * scale, -dmin * least);
        }
        each(sub, pair[0], pair[1]);
    }
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
