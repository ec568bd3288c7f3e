//! Rows of weights on the CPU as integers: every block format becomes codes of 16 bits, a scale for each thirty-two of
//! them and, where the format has minimums, an offset for each sixteen. No code exceeds [`MOST`].

use fearless_simd::prelude::*;
use fearless_simd::{
    Simd, dispatch, f32x16, i8x16, i8x32, i16x16, i16x32, i32x16, mask8x32, mask16x32, u8x16, u8x32, u16x32, u32x4, u32x8,
    u64x2, u64x4,
};
use kiln_gguf::TensorType;
use kiln_gguf::quant::codebook::{
    E2M1_DOUBLED, IQ4, iq1, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs, nvfp4_half_scale,
};

use super::cpu_rows::{bits_at, half_at, halves, sixteen};
use crate::simd::{finite_half, level};

/// Codes that share a scale.
pub(super) const BLOCK: usize = 32;
/// The largest magnitude of a code: thirty-two products with columns of 15 bits fit 32 bits.
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

/// How a format becomes codes.
#[derive(Clone, Copy)]
pub(super) struct Coder {
    /// Whole blocks of a row into a piece of as many elements.
    pub fill: fn(&[u8], Piece<'_>),
    /// Offsets of a [`BLOCK`]: none, one (found twice in a piece) or two.
    pub offsets: usize,
}

/// How this type becomes codes; None where it stays floats.
pub(super) fn coder(ty: TensorType) -> Option<Coder> {
    macro_rules! table {
        ($($variant:ident $name:ident),*) => {
            match ty {
                $(TensorType::$variant => Some(Coder { fill: fill::<$name>, offsets: $name::OFFSETS }),)*
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
trait Format {
    /// Elements of a block, a multiple of [`BLOCK`].
    const LEN: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// See [`Coder::offsets`].
    const OFFSETS: usize;
    /// Whether scales and offsets come as the bits of half floats, which become floats together.
    const HALVES: bool;

    /// Calls `each(i, codes, scale, offsets)` for every thirty-two elements from `32 i` on.
    fn codes<S: Simd>(simd: S, block: &[u8], each: impl FnMut(usize, i16x32<S>, f32, [f32; 2]));
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
fn by_table<S: Simd>(simd: S, table: [i8; 16], indices: u8x32<S>) -> i8x32<S> {
    let table = i8x16::load_array(simd, table);
    let table: u8x32<S> = table.combine(table).bitcast();
    table.swizzle_dyn_within_blocks(indices).bitcast()
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

/// Declares a format: elements and bytes of a block, offsets of thirty-two elements, whether scales come as half floats,
/// and its codes.
macro_rules! format {
    ($name:ident, $len:literal in $bytes:literal, $offsets:literal, $halves:literal, |$simd:ident, $block:ident, $each:ident| $body:block) => {
        struct $name;

        impl Format for $name {
            const LEN: usize = $len;
            const BYTES: usize = $bytes;
            const OFFSETS: usize = $offsets;
            const HALVES: bool = $halves;

            #[inline(always)]
            fn codes<S: Simd>($simd: S, $block: &[u8], mut $each: impl FnMut(usize, i16x32<S>, f32, [f32; 2])) {
                let $block = &$block[..$bytes];
                $body
            }
        }
    };
}

const NONE: [f32; 2] = [0.0; 2];

format!(Q4_0, 32 in 18, 0, true, |simd, block, each| {
    each(0, signed(less(simd, nibbles(simd, block, 2), 8)), half_bits(block, 0), NONE);
});

format!(Q4_1, 32 in 20, 1, true, |simd, block, each| {
    each(0, wide(nibbles(simd, block, 4)), half_bits(block, 0), [half_bits(block, 2); 2]);
});

format!(Q5_0, 32 in 22, 0, true, |simd, block, each| {
    let codes = with_fifth(simd, nibbles(simd, block, 6), bits_at(block, 2));
    each(0, signed(less(simd, codes, 16)), half_bits(block, 0), NONE);
});

format!(Q5_1, 32 in 24, 1, true, |simd, block, each| {
    let codes = with_fifth(simd, nibbles(simd, block, 8), bits_at(block, 4));
    each(0, wide(codes), half_bits(block, 0), [half_bits(block, 2); 2]);
});

format!(Q8_0, 32 in 34, 0, true, |simd, block, each| {
    each(0, signed(thirty_two(simd, block, 2).bitcast()), half_bits(block, 0), NONE);
});

format!(IQ4NL, 32 in 18, 0, true, |simd, block, each| {
    each(0, signed(by_table(simd, IQ4, nibbles(simd, block, 2))), half_bits(block, 0), NONE);
});

format!(IQ4XS, 256 in 136, 0, false, |simd, block, each| {
    let (d, high) = (half_at(block, 0), word_at(block, 2));
    for i in 0..8 {
        let low = block[4 + i / 2] >> (4 * (i % 2)) & 15;
        let scale = f32::from((low | ((high >> (2 * i) & 3) as u8) << 4) as i8 - 32);
        each(i, signed(by_table(simd, IQ4, nibbles(simd, block, 8 + 16 * i))), d * scale, NONE);
    }
});

format!(MXFP4, 32 in 17, 0, false, |simd, block, each| {
    // 2^(exponent - 128), where the two smallest are subnormal: the table holds the numbers doubled.
    let exponent = u32::from(block[0]);
    let d = f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 });
    each(0, signed(by_table(simd, E2M1_DOUBLED, nibbles(simd, block, 1))), d, NONE);
});

/// Codes times a factor, rounded.
#[inline(always)]
fn rounded<S: Simd>(simd: S, codes: i8x16<S>, factor: f32) -> i32x16<S> {
    let (a, b) = codes.widen();
    let ((a, b), (c, d)) = (a.widen(), b.widen());
    let codes: f32x16<S> = a.combine(b).combine(c.combine(d)).to_float();
    (codes * f32x16::splat(simd, factor)).round_ties_even().to_int()
}

format!(NVFP4, 64 in 36, 0, false, |simd, block, each| {
    for i in 0..2 {
        // Two scales that are floats meet under one: the codes of the smaller are rounded to one in four thousand of the
        // larger.
        let scales = [nvfp4_half_scale(block[2 * i]), nvfp4_half_scale(block[2 * i + 1])];
        let top = scales[0].max(scales[1]);
        let reach = f32::from(MOST) / 12.0;
        let factors = scales.map(|scale| if top == 0.0 { 0.0 } else { scale / top * reach });
        let codes = by_table(simd, E2M1_DOUBLED, nibbles(simd, block, 4 + 16 * i));
        // Eight low nibbles of each scale, then eight high ones of each.
        let (lows, highs) = codes.split();
        let (lows, highs): (u64x2<S>, u64x2<S>) = (lows.bitcast(), highs.bitcast());
        let (first, second) = lows.interleave(highs);
        let codes = rounded(simd, first.bitcast(), factors[0]).narrow(rounded(simd, second.bitcast(), factors[1]));
        each(i, codes, top / reach, NONE);
    }
});

format!(Q2K, 256 in 84, 2, false, |simd, block, each| {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for i in 0..8 {
        let codes = (thirty_two(simd, block, 16 + 32 * (i / 4)) >> (2 * (i % 4) as u32)) & 3;
        let both = [block[2 * i], block[2 * i + 1]];
        let codes = by_halves(simd, wide(codes), both.map(|b| i16::from(b & 15)));
        each(i, codes, d, both.map(|b| -dmin * f32::from(b >> 4)));
    }
});

format!(Q3K, 256 in 110, 0, false, |simd, block, each| {
    let d = half_at(block, 108);
    for i in 0..8 {
        let scale = |sub: usize| {
            let low = block[96 + sub % 8] >> (4 * (sub / 8)) & 15;
            let high = block[104 + sub % 4] >> (2 * (sub / 4)) & 3;
            i16::from(low | high << 4) - 32
        };
        let lows = (thirty_two(simd, block, 32 + 32 * (i / 4)) >> (2 * (i % 4) as u32)) & 3;
        let highs = (thirty_two(simd, block, 0) >> i as u32) & 1;
        let codes = signed(less(simd, lows | highs << 2, 4));
        each(i, by_halves(simd, codes, [scale(2 * i), scale(2 * i + 1)]), d, NONE);
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

format!(Q4K, 256 in 144, 1, false, |simd, block, each| {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    for i in 0..8 {
        let (scale, least) = six_bits(&block[4..16], i);
        let codes = (thirty_two(simd, block, 16 + 32 * (i / 2)) >> (4 * (i % 2) as u32)) & 15;
        each(i, wide(codes), d * scale, [-dmin * least; 2]);
    }
});

format!(Q5K, 256 in 176, 1, false, |simd, block, each| {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    for i in 0..8 {
        let (scale, least) = six_bits(&block[4..16], i);
        let lows = (thirty_two(simd, block, 48 + 32 * (i / 2)) >> (4 * (i % 2) as u32)) & 15;
        let highs = (thirty_two(simd, block, 16) >> i as u32) & 1;
        each(i, wide(lows | highs << 4), d * scale, [-dmin * least; 2]);
    }
});

format!(Q6K, 256 in 210, 0, false, |simd, block, each| {
    let d = half_at(block, 208);
    // Thirty-two elements at a time: 128 n + 32 g.
    for i in 0..8 {
        let (n, g) = (i / 4, i % 4);
        let lows = (thirty_two(simd, block, 64 * n + 32 * (g % 2)) >> (4 * (g / 2) as u32)) & 15;
        let highs = (thirty_two(simd, block, 128 + 32 * n) >> (2 * g as u32)) & 3;
        let scales = [block[192 + 2 * i], block[193 + 2 * i]].map(|b| i16::from(b as i8));
        let codes = signed(less(simd, lows | highs << 4, 32));
        each(i, by_halves(simd, codes, scales), d, NONE);
    }
});

format!(IQ2XXS, 256 in 66, 0, false, |simd, block, each| {
    let (grid, d) = (iq2_xxs(), half_at(block, 0));
    for i in 0..8 {
        let rest = bits_at(block, 6 + 8 * i);
        let codes = eights(simd, #[inline(always)] |g| grid[usize::from(block[2 + 8 * i + g])]);
        let scale = d * (0.5 + (rest >> 28) as f32) * 0.25;
        each(i, signed(with_signs(simd, codes, even_signs(rest))), scale, NONE);
    }
});

format!(IQ2XS, 256 in 74, 0, false, |simd, block, each| {
    let (grid, d) = (iq2_xs(), half_at(block, 0));
    for i in 0..8 {
        let words: [u16; 4] = std::array::from_fn(|g| word_at(block, 2 + 8 * i + 2 * g));
        let codes = eights(simd, #[inline(always)] |g| grid[usize::from(words[g] & 511)]);
        let sevens = (0..4).fold(0, |bits, g| bits | u32::from(words[g] >> 9) << (7 * g));
        let scale = block[66 + i];
        let codes = signed(with_signs(simd, codes, even_signs(sevens)));
        each(i, by_halves(simd, codes, [scale & 15, scale >> 4].map(|s| 2 * i16::from(s) + 1)), d * 0.125, NONE);
    }
});

format!(IQ2S, 256 in 82, 0, false, |simd, block, each| {
    let (grid, d) = (iq2_s(), half_at(block, 0));
    for i in 0..8 {
        let (highs, scale) = (usize::from(block[66 + i]), block[74 + i]);
        let codes = eights(simd, #[inline(always)] |g| grid[usize::from(block[2 + 4 * i + g]) | (highs >> (2 * g) & 3) << 8]);
        let codes = signed(with_signs(simd, codes, bits_at(block, 34 + 4 * i)));
        each(i, by_halves(simd, codes, [scale & 15, scale >> 4].map(|s| 2 * i16::from(s) + 1)), d * 0.125, NONE);
    }
});

format!(IQ3XXS, 256 in 98, 0, false, |simd, block, each| {
    let (grid, d) = (iq3_xxs(), half_at(block, 0));
    for i in 0..8 {
        let rest = bits_at(block, 66 + 4 * i);
        let codes = fours(simd, #[inline(always)] |g| grid[usize::from(block[2 + 8 * i + g])]);
        let scale = d * (0.5 + (rest >> 28) as f32) * 0.5;
        each(i, signed(with_signs(simd, codes, even_signs(rest))), scale, NONE);
    }
});

format!(IQ3S, 256 in 110, 0, false, |simd, block, each| {
    let (grid, d) = (iq3_s(), half_at(block, 0));
    for i in 0..8 {
        let highs = usize::from(block[66 + i]);
        let codes = fours(simd, #[inline(always)] |g| grid[usize::from(block[2 + 8 * i + g]) | (highs >> g & 1) << 8]);
        let scale = block[106 + i / 2] >> (4 * (i % 2)) & 15;
        let codes = with_signs(simd, codes, bits_at(block, 74 + 4 * i));
        each(i, signed(codes), d * f32::from(1 + 2 * scale), NONE);
    }
});

/// Values of -1, 0, 1 with an eighth added, or taken away where a bit is set, in eighths.
#[inline(always)]
fn shifted<S: Simd>(simd: S, codes: i8x32<S>, down: u32) -> i16x32<S> {
    let shift = mask8x32::from_bitmask(simd, u64::from(down)).select(i8x32::splat(simd, -1), i8x32::splat(simd, 1));
    signed((codes << 3) + shift)
}

format!(IQ1S, 256 in 50, 0, false, |simd, block, each| {
    let (grid, d) = (iq1(), half_at(block, 0));
    for i in 0..8 {
        let high = word_at(block, 34 + 2 * i);
        let index = |g: usize| usize::from(block[2 + 4 * i + g]) | usize::from(high >> (3 * g) & 7) << 8;
        let codes = shifted(simd, eights(simd, #[inline(always)] |g| grid[index(g)]), if high & 0x8000 != 0 { u32::MAX } else { 0 });
        each(i, codes, d * 0.125 * f32::from(2 * (high >> 12 & 7) + 1), NONE);
    }
});

format!(IQ1M, 256 in 56, 0, false, |simd, block, each| {
    let grid = iq1();
    let d = (0..4).fold(0, |bits, k| bits | (word_at(block, 48 + 2 * k) >> 12) << (4 * k));
    let d = finite_half(d) * 0.125;
    for i in 0..8 {
        let nibbles = word_at(block, 32 + 2 * i);
        let index = |g: usize| usize::from(block[4 * i + g]) | usize::from(nibbles >> (4 * g) & 7) << 8;
        // A bit for each eight elements becomes eight of them.
        let down = (0..4).fold(0, |bits, g| bits | u32::from(nibbles >> (4 * g + 3) & 1) << (8 * g)) * 255;
        let codes = shifted(simd, eights(simd, #[inline(always)] |g| grid[index(g)]), down);
        let scales = word_at(block, 48 + 2 * (i / 2)) >> (6 * (i % 2));
        each(i, by_halves(simd, codes, [scales & 7, scales >> 3 & 7].map(|s| 2 * s as i16 + 1)), d, NONE);
    }
});

/// The digit on top of numbers below 243, which stand for five digits of base three: 0, 1, 2.
#[inline(always)]
fn top_digit<S: Simd>(simd: S, bytes: u8x32<S>, power: u16) -> i16x32<S> {
    let (a, b) = bytes.widen();
    let bytes: u16x32<S> = a.combine(b);
    let rest = (bytes * u16x32::splat(simd, power)) & 0xff;
    ((rest * u16x32::splat(simd, 3)) >> 8).bitcast()
}

format!(TQ1, 256 in 54, 0, false, |simd, block, each| {
    let (d, one) = (half_at(block, 52), i16x32::splat(simd, 1));
    const POWERS: [u16; 5] = [1, 3, 9, 27, 81];
    let first = thirty_two(simd, block, 0);
    for i in 0..5 {
        each(i, top_digit(simd, first, POWERS[i]) - one, d, NONE);
    }
    // Sixteen bytes of five digits each, then four of four.
    let second = sixteen(simd, block, 32).combine(sixteen(simd, block, 32));
    let mut digits = [i16x16::splat(simd, 0); 5];
    for (digit, power) in digits.iter_mut().zip(POWERS) {
        *digit = top_digit(simd, second, power).split().0;
    }
    each(5, digits[0].combine(digits[1]) - one, d, NONE);
    each(6, digits[2].combine(digits[3]) - one, d, NONE);
    let last: u8x16<S> = u32x4::splat(simd, bits_at(block, 48)).bitcast();
    let powers = std::array::from_fn(|e| POWERS[e / 4 % 4]);
    let (a, b) = last.combine(last).widen();
    let rest = (a.combine(b) * u16x32::load_array(simd, powers)) & 0xff;
    let last: i16x32<S> = ((rest * u16x32::splat(simd, 3)) >> 8).bitcast();
    each(7, digits[4].combine(last.split().0) - one, d, NONE);
});

format!(TQ2, 256 in 66, 0, false, |simd, block, each| {
    let d = half_at(block, 64);
    for i in 0..8 {
        let codes = (thirty_two(simd, block, 32 * (i / 4)) >> (2 * (i % 4) as u32)) & 3;
        each(i, signed(less(simd, codes, 1)), d, NONE);
    }
});

format!(Q1, 128 in 18, 0, false, |simd, block, each| {
    for i in 0..4 {
        let bits = mask16x32::from_bitmask(simd, u64::from(bits_at(block, 2 + 4 * i)));
        each(i, bits.select(i16x32::splat(simd, 1), i16x32::splat(simd, -1)), half_at(block, 0), NONE);
    }
});

format!(Q2, 64 in 18, 0, false, |simd, block, each| {
    const FOUR_TIMES: [u8; 32] = {
        let mut indices = [0; 32];
        let mut e = 0;
        while e < 32 {
            indices[e] = (e / 4 % 4) as u8;
            e += 1;
        }
        indices
    };
    for i in 0..2 {
        let low = u32x4::splat(simd, bits_at(block, 2 + 8 * i));
        let high = u32x4::splat(simd, bits_at(block, 6 + 8 * i));
        let bytes: u8x32<S> = low.combine(high).bitcast();
        let (a, b) = bytes.swizzle_dyn_within_blocks(u8x32::load_array(simd, FOUR_TIMES)).widen();
        // A product moves the two bits of each element to the same place.
        let powers = u16x32::load_array(simd, std::array::from_fn(|e| [64, 16, 4, 1][e % 4]));
        let codes: i16x32<S> = ((a.combine(b) * powers >> 6) & 3).bitcast();
        each(i, codes - i16x32::splat(simd, 1), half_at(block, 0), NONE);
    }
});

#[cfg(test)]
mod tests {
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

    #[test]
    fn codes_mean_what_the_formats_mean() {
        let mut tried = 0;
        for &ty in TensorType::ALL {
            let Some(coder) = coder(ty) else { continue };
            for seed in 1..40 {
                let n = 512;
                let mut bytes = noise(ty.row_bytes(n).unwrap(), seed);
                let mut want = vec![0.0; n];
                quant::dequantise(ty, &bytes, &mut want).unwrap();
                // Half floats that are no numbers do not come this far.
                if want.iter().any(|x| !x.is_finite()) {
                    bytes.iter_mut().for_each(|b| *b &= 0x3b);
                    quant::dequantise(ty, &bytes, &mut want).unwrap();
                }
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
