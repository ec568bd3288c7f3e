//! Rows of weights on the CPU as integers: every block format becomes codes of 16 bits, a scale for each thirty-two of
//! them and, where the format has minimums, an offset for each sixteen. No code exceeds [`MOST`].

use fearless_simd::prelude::*;
use fearless_simd::{
    Simd, dispatch, f32x16, i8x32, i16x16, i16x32, i32x16, mask8x32, u8x16, u8x32, u16x32, u32x4, u32x8, u64x2, u64x4,
};
use kiln_gguf::TensorType;
use kiln_gguf::quant::codebook::{E2M1_DOUBLED, IQ4, iq1, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs, nvfp4_half_scale};

use super::cpu_rows::{bits_at, half_at, halves, sixteen};
use crate::simd::{finite_half, level};

/// Codes that share a scale.
pub(super) const BLOCK: usize = 32;
/// The largest magnitude of a code: thirty-two products with activations of 15 bits fit 32 bits.
pub(super) const MOST: i16 = 1 << 12;

/// A piece of a row: element e is `scales[e / 32] codes[e] + offsets[e / 16]`.
pub(super) struct Piece<'a> {
    /// A code for each element.
    pub codes: &'a mut [i16],
    /// A scale for each [`BLOCK`].
    pub scales: &'a mut [f32],
    /// Two offsets for each [`BLOCK`]; left alone by formats that have none.
    pub offsets: &'a mut [f32],
}

/// The same as bytes: element e is `scales[e / 16] codes[e] + offsets[e / 16]`.
#[cfg(arm_dotprod)]
pub(super) struct BytePiece<'a> {
    /// A code for each element.
    pub codes: &'a mut [i8],
    /// Two scales for each [`BLOCK`].
    pub scales: &'a mut [f32],
    /// See [`Piece::offsets`].
    pub offsets: &'a mut [f32],
}

/// How a format becomes codes.
#[derive(Clone, Copy)]
pub(super) struct Coder {
    /// Whole blocks of a row into a piece of as many elements.
    pub fill: fn(&[u8], Piece<'_>),
    /// The same as bytes.
    #[cfg(arm_dotprod)]
    pub fill_bytes: fn(&[u8], BytePiece<'_>),
    /// Whether the two scales of a [`BLOCK`] of bytes may differ.
    #[cfg(arm_dotprod)]
    pub two_scales: bool,
    /// Offsets of a [`BLOCK`]: none, one (found twice in a piece) or two.
    pub offsets: usize,
}

/// How this type becomes codes; None where it stays floats.
pub(super) fn coder(ty: TensorType) -> Option<Coder> {
    macro_rules! table {
        ($($variant:ident $name:ident),*) => {
            match ty {
                $(TensorType::$variant => Some(Coder {
                    fill: fill::<$name>,
                    #[cfg(arm_dotprod)]
                    fill_bytes: fill_bytes::<$name>,
                    #[cfg(arm_dotprod)]
                    two_scales: $name::TWO_SCALES,
                    offsets: $name::OFFSETS,
                }),)*
                _ => None,
            }
        };
    }
    table!(
        Q4_0 Q4_0, Q4_1 Q4_1, Q5_0 Q5_0, Q5_1 Q5_1, Q8_0 Q8_0, Q2_K Q2K, Q3_K Q3K, Q4_K Q4K, Q5_K Q5K, Q6_K Q6K,
        IQ4_NL IQ4NL, IQ4_XS IQ4XS, MXFP4 MXFP4, NVFP4 NVFP4, IQ2_XXS IQ2XXS, IQ2_XS IQ2XS, IQ2_S IQ2S,
        IQ3_XXS IQ3XXS, IQ3_S IQ3S, IQ1_S IQ1S, IQ1_M IQ1M, TQ1_0 TQ1, TQ2_0 TQ2, Q1_0 Q1, Q2_0 Q2
    )
}

/// A format whose blocks become codes in registers.
pub(super) trait Format {
    /// Elements of a block, a multiple of [`BLOCK`].
    const LEN: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// See [`Coder::offsets`].
    const OFFSETS: usize;
    /// Whether scales and offsets come as the bits of half floats, which become floats together.
    const HALVES: bool;
    /// The byte that stands for zero.
    const ZERO: u8;
    /// Whether thirty-two elements may have two scales.
    #[cfg(arm_dotprod)]
    const TWO_SCALES: bool;

    /// Calls `each(i, bytes, scales, offsets)` for every thirty-two elements from `32 i` on: an element is
    /// `scale (byte - ZERO) + offset`, with a scale and an offset for each sixteen.
    fn bytes<S: Simd>(simd: S, block: &[u8], each: impl FnMut(usize, u8x32<S>, [f32; 2], [f32; 2]));

    /// Calls `each(i, codes, scale, offsets)` in the same way, with one scale for thirty-two elements. Formats with two scales
    /// make them a part of the codes.
    #[inline(always)]
    fn codes<S: Simd>(simd: S, block: &[u8], mut each: impl FnMut(usize, i16x32<S>, f32, [f32; 2])) {
        Self::bytes(
            simd,
            block,
            #[inline(always)]
            |i, bytes, scales, offsets| {
                let zero = i16x32::splat(simd, i16::from(Self::ZERO));
                let codes = if Self::ZERO == 0 { wide(bytes) } else { wide(bytes) - zero };
                each(i, codes, scales[0], offsets);
            },
        );
    }
}

#[inline(never)]
fn fill<F: Format>(bytes: &[u8], piece: Piece<'_>) {
    dispatch!(level(), simd => {
        let codes = piece.codes.chunks_exact_mut(F::LEN);
        let scales = piece.scales.chunks_exact_mut(F::LEN / BLOCK);
        let offsets = piece.offsets.chunks_exact_mut(F::LEN / BLOCK * 2);
        for (((block, codes), scales), offsets) in bytes.chunks_exact(F::BYTES).zip(codes).zip(scales).zip(offsets) {
            F::codes(
                simd,
                block,
                #[inline(always)]
                |i, values, scale, pair| {
                    values.store_slice(&mut codes[BLOCK * i..][..BLOCK]);
                    scales[i] = scale;
                    if F::OFFSETS > 0 {
                        offsets[2 * i..][..2].copy_from_slice(&pair);
                    }
                },
            );
        }
        if F::HALVES {
            let blocks = bytes.len() / F::BYTES;
            to_floats(simd, &mut piece.scales[..blocks]);
            to_floats(simd, &mut piece.offsets[..2 * blocks * F::OFFSETS.min(1)]);
        }
    });
}

#[cfg(arm_dotprod)]
#[inline(never)]
fn fill_bytes<F: Format>(bytes: &[u8], piece: BytePiece<'_>) {
    dispatch!(level(), simd => {
        let codes = piece.codes.chunks_exact_mut(F::LEN);
        let scales = piece.scales.chunks_exact_mut(F::LEN / BLOCK * 2);
        let offsets = piece.offsets.chunks_exact_mut(F::LEN / BLOCK * 2);
        for (((block, codes), scales), offsets) in bytes.chunks_exact(F::BYTES).zip(codes).zip(scales).zip(offsets) {
            F::bytes(
                simd,
                block,
                #[inline(always)]
                |i, bytes, both, pair| {
                    let codes = &mut codes[BLOCK * i..][..BLOCK];
                    less(simd, bytes, F::ZERO.cast_signed()).store_slice(codes);
                    scales[2 * i..][..2].copy_from_slice(&both);
                    if F::OFFSETS > 0 {
                        offsets[2 * i..][..2].copy_from_slice(&pair);
                    }
                },
            );
        }
        if F::HALVES {
            let blocks = bytes.len() / F::BYTES;
            to_floats(simd, &mut piece.scales[..2 * blocks]);
            to_floats(simd, &mut piece.offsets[..2 * blocks * F::OFFSETS.min(1)]);
        }
    });
}

/// Bits of half floats become floats, in place.
#[inline(always)]
fn to_floats<S: Simd>(simd: S, bits: &mut [f32]) {
    let (sixteens, rest) = bits.as_chunks_mut::<16>();
    for bits in sixteens {
        halves(simd, f32x16::load_array_ref(simd, bits).bitcast()).store_array(bits);
    }
    rest.iter_mut().for_each(|bits| *bits = finite_half(bits.to_bits() as u16));
}

/// The bits of the half float at `at`.
#[inline(always)]
fn half_bits(block: &[u8], at: usize) -> f32 {
    f32::from_bits(u32::from(word_at(block, at)))
}

#[inline(always)]
fn thirty_two<S: Simd>(simd: S, block: &[u8], at: usize) -> u8x32<S> {
    u8x32::load_array_ref(simd, block[at..].first_chunk().expect("blocks hold whole runs of thirty-two"))
}

/// Sixteen bytes as the low nibbles of all, then the high ones.
#[inline(always)]
fn nibbles<S: Simd>(simd: S, block: &[u8], at: usize) -> u8x32<S> {
    let bytes = sixteen(simd, block, at);
    (bytes & 15).combine(bytes >> 4)
}

#[inline(always)]
fn wide<S: Simd>(codes: u8x32<S>) -> i16x32<S> {
    let (a, b) = codes.widen();
    a.combine(b).bitcast()
}

#[inline(always)]
fn signed<S: Simd>(codes: i8x32<S>) -> i16x32<S> {
    let (a, b) = codes.widen();
    a.combine(b)
}

/// Codes minus a number.
#[inline(always)]
fn less<S: Simd>(simd: S, codes: u8x32<S>, by: i8) -> i8x32<S> {
    let codes: i8x32<S> = codes.bitcast();
    codes - i8x32::splat(simd, by)
}

/// Codes times a number for each sixteen of them.
#[inline(always)]
fn by_halves<S: Simd>(simd: S, codes: i16x32<S>, [a, b]: [i16; 2]) -> i16x32<S> {
    codes * i16x16::splat(simd, a).combine(i16x16::splat(simd, b))
}

/// Nibbles with a fifth bit each on top, the first of them the lowest of `bits`.
#[inline(always)]
fn with_fifth<S: Simd>(simd: S, nibbles: u8x32<S>, bits: u32) -> u8x32<S> {
    let fifth = mask8x32::from_bitmask(simd, u64::from(bits));
    nibbles | fifth.select(u8x32::splat(simd, 16), u8x32::splat(simd, 0))
}

/// Codes with a minus where a bit is set.
#[inline(always)]
fn with_signs<S: Simd>(simd: S, codes: i8x32<S>, bits: u32) -> i8x32<S> {
    mask8x32::from_bitmask(simd, u64::from(bits)).select(-codes, codes)
}

/// Indices into a table of sixteen numbers.
#[inline(always)]
fn by_table<S: Simd>(simd: S, table: [u8; 16], indices: u8x32<S>) -> u8x32<S> {
    let table = u8x16::load_array(simd, table);
    table.combine(table).swizzle_dyn_within_blocks(indices)
}

/// Four entries of a grid of eights.
#[inline(always)]
fn eights<S: Simd>(simd: S, entry: impl Fn(usize) -> [i8; 8]) -> i8x32<S> {
    let words: [u64; 4] = std::array::from_fn(|g| u64::from_le_bytes(entry(g).map(i8::cast_unsigned)));
    u64x4::load_array(simd, words).bitcast()
}

/// Eight entries of a grid of fours.
#[inline(always)]
fn fours<S: Simd>(simd: S, entry: impl Fn(usize) -> [i8; 4]) -> i8x32<S> {
    let words: [u32; 8] = std::array::from_fn(|g| u32::from_le_bytes(entry(g).map(i8::cast_unsigned)));
    u32x8::load_array(simd, words).bitcast()
}

/// Four times eight signs from four times seven: the eighth makes their number even.
#[inline(always)]
fn even_signs(sevens: u32) -> u32 {
    let spread = (sevens & 0x7f) | (sevens & 0x3f80) << 1 | (sevens & 0x1f_c000) << 2 | (sevens & 0xfe0_0000) << 3;
    let parity = spread ^ spread >> 4;
    let parity = parity ^ parity >> 2;
    let parity = (parity ^ parity >> 1) & 0x0101_0101;
    spread | parity << 7
}

#[inline(always)]
fn word_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// Declares a format: elements and bytes of a block, the byte that stands for zero, offsets of thirty-two elements, whether
/// scales come as half floats, and its bytes; then its codes where they are more than bytes without their zero.
macro_rules! format {
    ($name:ident, $len:literal in $bytes:literal, $zero:literal, $offsets:literal, $halves:literal,
     |$simd:ident, $block:ident, $each:ident| $body:block $(, $codes:block)?) => {
        pub(super) struct $name;

        impl Format for $name {
            const LEN: usize = $len;
            const BYTES: usize = $bytes;
            const OFFSETS: usize = $offsets;
            const HALVES: bool = $halves;
            const ZERO: u8 = $zero;
            #[cfg(arm_dotprod)]
            const TWO_SCALES: bool = [false $(, !stringify!($codes).is_empty())?].len() > 1;

            #[inline(always)]
            fn bytes<S: Simd>($simd: S, $block: &[u8], mut $each: impl FnMut(usize, u8x32<S>, [f32; 2], [f32; 2])) {
                let $block = &$block[..$bytes];
                $body
            }

            $(
                #[inline(always)]
                fn codes<S: Simd>($simd: S, $block: &[u8], mut $each: impl FnMut(usize, i16x32<S>, f32, [f32; 2])) {
                    let $block = &$block[..$bytes];
                    $codes
                }
            )?
        }
    };
}

const NONE: [f32; 2] = [0.0; 2];

format!(Q4_0, 32 in 18, 8, 0, true, |simd, block, each| {
    each(0, nibbles(simd, block, 2), [half_bits(block, 0); 2], NONE);
});

format!(Q4_1, 32 in 20, 0, 1, true, |simd, block, each| {
    each(0, nibbles(simd, block, 4), [half_bits(block, 0); 2], [half_bits(block, 2); 2]);
});

format!(Q5_0, 32 in 22, 16, 0, true, |simd, block, each| {
    each(0, with_fifth(simd, nibbles(simd, block, 6), bits_at(block, 2)), [half_bits(block, 0); 2], NONE);
});

format!(Q5_1, 32 in 24, 0, 1, true, |simd, block, each| {
    let codes = with_fifth(simd, nibbles(simd, block, 8), bits_at(block, 4));
    each(0, codes, [half_bits(block, 0); 2], [half_bits(block, 2); 2]);
});

format!(Q8_0, 32 in 34, 128, 0, true, |simd, block, each| {
    each(0, thirty_two(simd, block, 2) ^ 128, [half_bits(block, 0); 2], NONE);
});

/// The values of a table with a number added that makes them positive.
const fn raised(table: [i8; 16], by: i16) -> [u8; 16] {
    let mut raised = [0; 16];
    let mut i = 0;
    while i < 16 {
        raised[i] = (table[i] as i16 + by) as u8;
        i += 1;
    }
    raised
}

pub(super) const IQ4_RAISED: [u8; 16] = raised(IQ4, 128);
pub(super) const E2M1_RAISED: [u8; 16] = raised(E2M1_DOUBLED, 12);

format!(IQ4NL, 32 in 18, 128, 0, true, |simd, block, each| {
    each(0, by_table(simd, IQ4_RAISED, nibbles(simd, block, 2)), [half_bits(block, 0); 2], NONE);
});

format!(IQ4XS, 256 in 136, 128, 0, false, |simd, block, each| {
    let (d, high) = (half_at(block, 0), word_at(block, 2));
    for i in 0..8 {
        let low = block[4 + i / 2] >> (4 * (i % 2)) & 15;
        let scale = d * f32::from((low | ((high >> (2 * i) & 3) as u8) << 4) as i8 - 32);
        each(i, by_table(simd, IQ4_RAISED, nibbles(simd, block, 8 + 16 * i)), [scale; 2], NONE);
    }
});

format!(MXFP4, 32 in 17, 12, 0, false, |simd, block, each| {
    // 2^(exponent - 128), where the two smallest are subnormal: the table holds the numbers doubled.
    let exponent = u32::from(block[0]);
    let d = f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 });
    each(0, by_table(simd, E2M1_RAISED, nibbles(simd, block, 1)), [d; 2], NONE);
});

/// Thirty-two elements of NVFP4 with their two scales.
#[inline(always)]
fn nvfp4<S: Simd>(simd: S, block: &[u8], i: usize) -> (u8x32<S>, [f32; 2]) {
    let scales = [nvfp4_half_scale(block[2 * i]), nvfp4_half_scale(block[2 * i + 1])];
    let codes = by_table(simd, E2M1_RAISED, nibbles(simd, block, 4 + 16 * i));
    // Eight low nibbles of each scale, then eight high ones of each.
    let (lows, highs) = codes.split();
    let (lows, highs): (u64x2<S>, u64x2<S>) = (lows.bitcast(), highs.bitcast());
    let (first, second) = lows.interleave(highs);
    (first.combine(second).bitcast(), scales)
}

/// Codes minus their zero, times a factor, rounded.
#[inline(always)]
fn rounded<S: Simd>(simd: S, codes: u8x16<S>, zero: f32, factor: f32) -> i32x16<S> {
    let (a, b) = codes.widen();
    let ((a, b), (c, d)) = (a.widen(), b.widen());
    let codes: i32x16<S> = a.combine(b).combine(c.combine(d)).bitcast();
    let codes: f32x16<S> = codes.to_float();
    ((codes - f32x16::splat(simd, zero)) * f32x16::splat(simd, factor)).round_ties_even().to_int()
}

format!(NVFP4, 64 in 36, 12, 0, false, |simd, block, each| {
    for i in 0..2 {
        let (codes, scales) = nvfp4(simd, block, i);
        each(i, codes, scales, NONE);
    }
}, {
    for i in 0..2 {
        // Two scales that are floats meet under one: the codes of the smaller are rounded to one in four thousand of the
        // larger.
        let (codes, scales) = nvfp4(simd, block, i);
        let (first, second) = codes.split();
        let top = scales[0].max(scales[1]);
        let reach = f32::from(MOST) / 12.0;
        let factors = scales.map(|scale| if top == 0.0 { 0.0 } else { scale / top * reach });
        let codes = rounded(simd, first, 12.0, factors[0]).narrow(rounded(simd, second, 12.0, factors[1]));
        each(i, codes, top / reach, NONE);
    }
});

format!(Q2K, 256 in 84, 0, 2, false, |simd, block, each| {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for i in 0..8 {
        let codes = (thirty_two(simd, block, 16 + 32 * (i / 4)) >> (2 * (i % 4) as u32)) & 3;
        let both = [block[2 * i], block[2 * i + 1]];
        each(i, codes, both.map(|b| d * f32::from(b & 15)), both.map(|b| -dmin * f32::from(b >> 4)));
    }
}, {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for i in 0..8 {
        let codes = (thirty_two(simd, block, 16 + 32 * (i / 4)) >> (2 * (i % 4) as u32)) & 3;
        let both = [block[2 * i], block[2 * i + 1]];
        let codes = by_halves(simd, wide(codes), both.map(|b| i16::from(b & 15)));
        each(i, codes, d, both.map(|b| -dmin * f32::from(b >> 4)));
    }
});

/// Thirty-two elements of Q3_K, three bits each, and their two scales.
#[inline(always)]
fn q3_k<S: Simd>(simd: S, block: &[u8], i: usize) -> (u8x32<S>, [i16; 2]) {
    let scale = |sub: usize| {
        let low = block[96 + sub % 8] >> (4 * (sub / 8)) & 15;
        let high = block[104 + sub % 4] >> (2 * (sub / 4)) & 3;
        i16::from(low | high << 4) - 32
    };
    let lows = (thirty_two(simd, block, 32 + 32 * (i / 4)) >> (2 * (i % 4) as u32)) & 3;
    let highs = (thirty_two(simd, block, 0) >> i as u32) & 1;
    (lows | highs << 2, [scale(2 * i), scale(2 * i + 1)])
}

format!(Q3K, 256 in 110, 4, 0, false, |simd, block, each| {
    let d = half_at(block, 108);
    for i in 0..8 {
        let (codes, scales) = q3_k(simd, block, i);
        each(i, codes, scales.map(|s| d * f32::from(s)), NONE);
    }
}, {
    let d = half_at(block, 108);
    for i in 0..8 {
        let (codes, scales) = q3_k(simd, block, i);
        each(i, by_halves(simd, signed(less(simd, codes, 4)), scales), d, NONE);
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

format!(Q4K, 256 in 144, 0, 1, false, |simd, block, each| {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    for i in 0..8 {
        let (scale, least) = six_bits(&block[4..16], i);
        let codes = (thirty_two(simd, block, 16 + 32 * (i / 2)) >> (4 * (i % 2) as u32)) & 15;
        each(i, codes, [d * scale; 2], [-dmin * least; 2]);
    }
});

format!(Q5K, 256 in 176, 0, 1, false, |simd, block, each| {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    for i in 0..8 {
        let (scale, least) = six_bits(&block[4..16], i);
        let lows = (thirty_two(simd, block, 48 + 32 * (i / 2)) >> (4 * (i % 2) as u32)) & 15;
        let highs = (thirty_two(simd, block, 16) >> i as u32) & 1;
        each(i, lows | highs << 4, [d * scale; 2], [-dmin * least; 2]);
    }
});

/// Thirty-two elements of Q6_K, 128 n + 32 g, and their two scales.
#[inline(always)]
fn q6_k<S: Simd>(simd: S, block: &[u8], i: usize) -> (u8x32<S>, [i16; 2]) {
    let (n, g) = (i / 4, i % 4);
    let lows = (thirty_two(simd, block, 64 * n + 32 * (g % 2)) >> (4 * (g / 2) as u32)) & 15;
    let highs = (thirty_two(simd, block, 128 + 32 * n) >> (2 * g as u32)) & 3;
    (lows | highs << 4, [block[192 + 2 * i], block[193 + 2 * i]].map(|b| i16::from(b as i8)))
}

format!(Q6K, 256 in 210, 32, 0, false, |simd, block, each| {
    let d = half_at(block, 208);
    for i in 0..8 {
        let (codes, scales) = q6_k(simd, block, i);
        each(i, codes, scales.map(|s| d * f32::from(s)), NONE);
    }
}, {
    let d = half_at(block, 208);
    for i in 0..8 {
        let (codes, scales) = q6_k(simd, block, i);
        each(i, by_halves(simd, signed(less(simd, codes, 32)), scales), d, NONE);
    }
});

/// Codes with a sign, 64 added.
#[inline(always)]
fn raised_by_64<S: Simd>(simd: S, codes: i8x32<S>) -> u8x32<S> {
    (codes + i8x32::splat(simd, 64)).bitcast()
}

format!(IQ2XXS, 256 in 66, 64, 0, false, |simd, block, each| {
    let (grid, d) = (iq2_xxs(), half_at(block, 0));
    for i in 0..8 {
        let rest = bits_at(block, 6 + 8 * i);
        let codes = eights(simd, #[inline(always)] |g| grid[usize::from(block[2 + 8 * i + g])]);
        let scale = d * (0.5 + (rest >> 28) as f32) * 0.25;
        each(i, raised_by_64(simd, with_signs(simd, codes, even_signs(rest))), [scale; 2], NONE);
    }
});

/// Two nibbles of scale, each twice and one more.
#[inline(always)]
fn odd_scales(nibbles: u8) -> [i16; 2] {
    [nibbles & 15, nibbles >> 4].map(|s| 2 * i16::from(s) + 1)
}

/// Thirty-two elements of IQ2_XS with their signs.
#[inline(always)]
fn iq2_xs_codes<S: Simd>(simd: S, block: &[u8], i: usize) -> i8x32<S> {
    let grid = iq2_xs();
    let words: [u16; 4] = std::array::from_fn(|g| word_at(block, 2 + 8 * i + 2 * g));
    let codes = eights(
        simd,
        #[inline(always)]
        |g| grid[usize::from(words[g] & 511)],
    );
    let sevens = (0..4).fold(0, |bits, g| bits | u32::from(words[g] >> 9) << (7 * g));
    with_signs(simd, codes, even_signs(sevens))
}

format!(IQ2XS, 256 in 74, 64, 0, false, |simd, block, each| {
    let d = half_at(block, 0) * 0.125;
    for i in 0..8 {
        let scales = odd_scales(block[66 + i]).map(|s| d * f32::from(s));
        each(i, raised_by_64(simd, iq2_xs_codes(simd, block, i)), scales, NONE);
    }
}, {
    let d = half_at(block, 0) * 0.125;
    for i in 0..8 {
        let codes = signed(iq2_xs_codes(simd, block, i));
        each(i, by_halves(simd, codes, odd_scales(block[66 + i])), d, NONE);
    }
});

/// Thirty-two elements of IQ2_S with their signs.
#[inline(always)]
fn iq2_s_codes<S: Simd>(simd: S, block: &[u8], i: usize) -> i8x32<S> {
    let (grid, highs) = (iq2_s(), usize::from(block[66 + i]));
    let codes = eights(
        simd,
        #[inline(always)]
        |g| grid[usize::from(block[2 + 4 * i + g]) | (highs >> (2 * g) & 3) << 8],
    );
    with_signs(simd, codes, bits_at(block, 34 + 4 * i))
}

format!(IQ2S, 256 in 82, 64, 0, false, |simd, block, each| {
    let d = half_at(block, 0) * 0.125;
    for i in 0..8 {
        let scales = odd_scales(block[74 + i]).map(|s| d * f32::from(s));
        each(i, raised_by_64(simd, iq2_s_codes(simd, block, i)), scales, NONE);
    }
}, {
    let d = half_at(block, 0) * 0.125;
    for i in 0..8 {
        let codes = signed(iq2_s_codes(simd, block, i));
        each(i, by_halves(simd, codes, odd_scales(block[74 + i])), d, NONE);
    }
});

format!(IQ3XXS, 256 in 98, 64, 0, false, |simd, block, each| {
    let (grid, d) = (iq3_xxs(), half_at(block, 0));
    for i in 0..8 {
        let rest = bits_at(block, 66 + 4 * i);
        let codes = fours(simd, #[inline(always)] |g| grid[usize::from(block[2 + 8 * i + g])]);
        let scale = d * (0.5 + (rest >> 28) as f32) * 0.5;
        each(i, raised_by_64(simd, with_signs(simd, codes, even_signs(rest))), [scale; 2], NONE);
    }
});

format!(IQ3S, 256 in 110, 64, 0, false, |simd, block, each| {
    let (grid, d) = (iq3_s(), half_at(block, 0));
    for i in 0..8 {
        let highs = usize::from(block[66 + i]);
        let codes = fours(simd, #[inline(always)] |g| grid[usize::from(block[2 + 8 * i + g]) | (highs >> g & 1) << 8]);
        let scale = d * f32::from(1 + 2 * (block[106 + i / 2] >> (4 * (i % 2)) & 15));
        each(i, raised_by_64(simd, with_signs(simd, codes, bits_at(block, 74 + 4 * i))), [scale; 2], NONE);
    }
});

/// Values of -1, 0, 1 with an eighth added, or taken away where a bit is set, in eighths.
#[inline(always)]
fn shifted<S: Simd>(simd: S, codes: i8x32<S>, down: u32) -> i8x32<S> {
    let shift = mask8x32::from_bitmask(simd, u64::from(down)).select(i8x32::splat(simd, -1), i8x32::splat(simd, 1));
    (codes << 3) + shift
}

format!(IQ1S, 256 in 50, 64, 0, false, |simd, block, each| {
    let (grid, d) = (iq1(), half_at(block, 0) * 0.125);
    for i in 0..8 {
        let high = word_at(block, 34 + 2 * i);
        let index = |g: usize| usize::from(block[2 + 4 * i + g]) | usize::from(high >> (3 * g) & 7) << 8;
        let codes = eights(simd, #[inline(always)] |g| grid[index(g)]);
        let codes = shifted(simd, codes, if high & 0x8000 != 0 { u32::MAX } else { 0 });
        each(i, raised_by_64(simd, codes), [d * f32::from(2 * (high >> 12 & 7) + 1); 2], NONE);
    }
});

/// The scale of a block of IQ1_M, in eighths.
#[inline(always)]
fn iq1_m_scale(block: &[u8]) -> f32 {
    finite_half((0..4).fold(0, |bits, k| bits | (word_at(block, 48 + 2 * k) >> 12) << (4 * k))) * 0.125
}

/// Thirty-two elements of IQ1_M in eighths, and their two scales.
#[inline(always)]
fn iq1_m<S: Simd>(simd: S, block: &[u8], i: usize) -> (i8x32<S>, [i16; 2]) {
    let grid = iq1();
    let nibbles = word_at(block, 32 + 2 * i);
    let index = |g: usize| usize::from(block[4 * i + g]) | usize::from(nibbles >> (4 * g) & 7) << 8;
    // A bit for each eight elements becomes eight of them.
    let down = (0..4).fold(0, |bits, g| bits | u32::from(nibbles >> (4 * g + 3) & 1) << (8 * g)) * 255;
    let codes = shifted(
        simd,
        eights(
            simd,
            #[inline(always)]
            |g| grid[index(g)],
        ),
        down,
    );
    let scales = word_at(block, 48 + 2 * (i / 2)) >> (6 * (i % 2));
    (codes, [scales & 7, scales >> 3 & 7].map(|s| 2 * s as i16 + 1))
}

format!(IQ1M, 256 in 56, 64, 0, false, |simd, block, each| {
    let d = iq1_m_scale(block);
    for i in 0..8 {
        let (codes, scales) = iq1_m(simd, block, i);
        each(i, raised_by_64(simd, codes), scales.map(|s| d * f32::from(s)), NONE);
    }
}, {
    let d = iq1_m_scale(block);
    for i in 0..8 {
        let (codes, scales) = iq1_m(simd, block, i);
        each(i, by_halves(simd, signed(codes), scales), d, NONE);
    }
});

/// The digits on top of numbers below 243, which stand for five digits of base three, once they are multiplied by powers of
/// three: 0, 1, 2.
#[inline(always)]
fn top_digits<S: Simd>(simd: S, bytes: u8x32<S>, powers: u16x32<S>) -> u8x32<S> {
    let (a, b) = bytes.widen();
    let rest = (a.combine(b) * powers) & 0xff;
    let (a, b) = ((rest * u16x32::splat(simd, 3)) >> 8).split();
    a.narrow(b)
}

format!(TQ1, 256 in 54, 1, 0, false, |simd, block, each| {
    const POWERS: [u16; 5] = [1, 3, 9, 27, 81];
    let scales = [half_at(block, 52); 2];
    let first = thirty_two(simd, block, 0);
    for (i, power) in POWERS.into_iter().enumerate() {
        each(i, top_digits(simd, first, u16x32::splat(simd, power)), scales, NONE);
    }
    // Sixteen bytes of five digits each, then four of four.
    let second = sixteen(simd, block, 32);
    for i in 0..2 {
        let powers = std::array::from_fn(|e| POWERS[2 * i + e / 16]);
        each(5 + i, top_digits(simd, second.combine(second), u16x32::load_array(simd, powers)), scales, NONE);
    }
    let last: u8x16<S> = u32x4::splat(simd, bits_at(block, 48)).bitcast();
    let powers = std::array::from_fn(|e| if e < 16 { POWERS[4] } else { POWERS[e / 4 % 4] });
    each(7, top_digits(simd, second.combine(last), u16x32::load_array(simd, powers)), scales, NONE);
});

format!(TQ2, 256 in 66, 1, 0, false, |simd, block, each| {
    let d = half_at(block, 64);
    for i in 0..8 {
        let codes = (thirty_two(simd, block, 32 * (i / 4)) >> (2 * (i % 4) as u32)) & 3;
        each(i, codes, [d; 2], NONE);
    }
});

format!(Q1, 128 in 18, 1, 0, false, |simd, block, each| {
    for i in 0..4 {
        let bits = mask8x32::from_bitmask(simd, u64::from(bits_at(block, 2 + 4 * i)));
        each(i, bits.select(u8x32::splat(simd, 2), u8x32::splat(simd, 0)), [half_at(block, 0); 2], NONE);
    }
});

format!(Q2, 64 in 18, 1, 0, false, |simd, block, each| {
    for i in 0..2 {
        // Every byte four times, its elements two bits further up each time: a product moves them to the same place.
        let low = u32x4::splat(simd, bits_at(block, 2 + 8 * i));
        let high = u32x4::splat(simd, bits_at(block, 6 + 8 * i));
        let bytes: u8x32<S> = low.combine(high).bitcast();
        let indices = u8x32::load_array(simd, std::array::from_fn(|e| (e / 4 % 4) as u8));
        let (a, b) = bytes.swizzle_dyn_within_blocks(indices).widen();
        let powers = u16x32::load_array(simd, std::array::from_fn(|e| [64, 16, 4, 1][e % 4]));
        let (a, b) = (((a.combine(b) * powers) >> 6) & 3).split();
        each(i, a.narrow(b), [half_at(block, 0); 2], NONE);
    }
});

#[cfg(test)]
pub(super) mod tests {
    use kiln_gguf::quant;

    use super::*;

    /// Bytes that are no pattern.
    fn noise(len: usize, seed: u64) -> Vec<u8> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let step = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u8
        };
        (0..len).map(step).collect()
    }

    /// Random blocks of a format and their elements.
    pub(in super::super) fn blocks(ty: TensorType, n: usize, seed: u64) -> (Vec<u8>, Vec<f32>) {
        let mut bytes = noise(ty.row_bytes(n).unwrap(), seed);
        let mut want = vec![0.0; n];
        quant::dequantise(ty, &bytes, &mut want).unwrap();
        // Half floats that are no numbers do not come this far.
        if want.iter().any(|x| !x.is_finite()) {
            bytes.iter_mut().for_each(|b| *b &= 0x3b);
            quant::dequantise(ty, &bytes, &mut want).unwrap();
        }
        (bytes, want)
    }

    #[test]
    fn codes_mean_what_the_formats_mean() {
        let mut tried = 0;
        for &ty in TensorType::ALL {
            let Some(coder) = coder(ty) else { continue };
            for seed in 1..40 {
                let n = 512;
                let (bytes, want) = blocks(ty, n, seed);
                let (mut codes, mut scales, mut offsets) = (vec![0; n], vec![0.0; n / 32], vec![0.0; n / 16]);
                let piece = Piece { codes: &mut codes, scales: &mut scales, offsets: &mut offsets };
                (coder.fill)(&bytes, piece);
                for e in 0..n {
                    let got = scales[e / 32] * f32::from(codes[e]) + offsets[e / 16];
                    let block = &want[e / 32 * 32..][..32];
                    let top = block.iter().fold(offsets[e / 16].abs(), |top, x| top.max(x.abs()));
                    // Codes of NVFP4 are rounded: half a code may be lost.
                    let lost = if ty == TensorType::NVFP4 { 0.51 * scales[e / 32] } else { 0.0 };
                    assert!((got - want[e]).abs() <= 1e-6 * top + lost, "{ty}: {got} {} at {e}", want[e]);
                    assert!(codes[e].abs() <= MOST, "{ty}: {}", codes[e]);
                }
            }
            tried += 1;
        }
        assert_eq!(tried, 25);
    }
}
