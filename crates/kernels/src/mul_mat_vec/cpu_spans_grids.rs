//! Formats whose codes come out of tables of four or eight numbers, and NVFP4, as `cpu_spans.rs` reads them.

use std::arch::x86_64::__m512i;

use fearless_simd::prelude::*;
use fearless_simd::{Avx512, f32x16, i32x16, u32x16, u64x8};
use kiln_gguf::quant::codebook::{iq1, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs};

use super::cpu_quants::E2M1_RAISED;
use super::cpu_spans::Format;
use super::cpu_wide::{
    add, add_where, bits, by_eight, by_table, eight, four, gathered, half, in_turn, load, load_16, load_twice, negated,
    pair, pick, pick_bytes, select_bits, spread, take, to_floats, wide, wide_words, with_bit, word,
};

/// What is added to numbers with a sign so that they have none.
const ZERO: u8 = 64;

/// Declares a format: bytes of a block, the byte that stands for zero, whether it has offsets, what is made once for a block with its
/// type, scales and offsets, and the codes of a quarter.
macro_rules! format {
    ($name:ident, $bytes:literal, $zero:expr, $offsets:literal, |$simd:ident, $run:ident, $made:ident: $type:ty, $q:ident|
     $begin:expr, $codes:expr) => {
        pub(super) struct $name;

        impl Format for $name {
            const BYTES: usize = $bytes;
            const ZERO: u8 = $zero;
            const OFFSETS: bool = $offsets;
            type Made = $type;

            #[inline(always)]
            fn begin($simd: Avx512, $run: &[u8]) -> (f32x16<Avx512>, f32x16<Avx512>, $type) {
                $begin
            }

            #[inline(always)]
            fn codes<const Q: usize>($simd: Avx512, $run: &[u8], $made: &$type) -> __m512i {
                let $q = Q;
                $codes
            }
        }
    };
}

/// A table of `N` entries of `W` numbers.
type Grid<const W: usize, const N: usize> = &'static [[i8; W]; N];

#[inline(always)]
fn whole<const W: usize, const N: usize>(grid: &'static [[i8; W]]) -> Grid<W, N> {
    grid.first_chunk().expect("tables have as many entries as indices can name")
}

/// Eight entries of eight numbers.
#[inline(always)]
fn eights<const N: usize>(simd: Avx512, grid: Grid<8, N>, which: [usize; 8]) -> __m512i {
    let [a, b, c, d, e, f, g, h] = which;
    let words = [grid[a], grid[b], grid[c], grid[d], grid[e], grid[f], grid[g], grid[h]];
    u64x8::load_array(simd, bytemuck::cast(words)).into()
}

/// Sixteen entries of four numbers.
#[inline(always)]
fn fours<const N: usize>(simd: Avx512, grid: Grid<4, N>, which: [usize; 16]) -> __m512i {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = which;
    let words = [
        [grid[a], grid[b], grid[c], grid[d], grid[e], grid[f], grid[g], grid[h]],
        [grid[i], grid[j], grid[k], grid[l], grid[m], grid[n], grid[o], grid[p]],
    ];
    u32x16::load_array(simd, bytemuck::cast(words)).into()
}

/// Eight bytes from `at` on, as indices.
#[inline(always)]
fn indices(run: &[u8], at: usize) -> [usize; 8] {
    let [a, b, c, d, e, f, g, h] = *run[at..].first_chunk().expect("eight bytes");
    [a.into(), b.into(), c.into(), d.into(), e.into(), f.into(), g.into(), h.into()]
}

/// Adds to each index, as bits from the ninth on, `width` bits of a number in turn.
#[inline(always)]
fn with_high_bits<const N: usize>(mut which: [usize; N], bits: u64, width: usize) -> [usize; N] {
    let mut i = 0;
    while i < N {
        which[i] |= (bits as usize >> (width * i) & ((1 << width) - 1)) << 8;
        i += 1;
    }
    which
}

/// Sixteen indices of twice eight.
#[inline(always)]
fn both([a, b, c, d, e, f, g, h]: [usize; 8], [i, j, k, l, m, n, o, p]: [usize; 8]) -> [usize; 16] {
    [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
}

/// The matrix that makes eight signs of seven from bit `from` of a byte on: the eighth makes their number even.
const fn even_signs(from: usize) -> u64 {
    let mut matrix = take(from, 7, 0);
    let mut i = 0;
    while i < 7 {
        // The row of bit 7 is the lowest byte.
        matrix |= 1 << (from + i);
        i += 1;
    }
    matrix
}

/// From which bit of eight bytes on each byte comes: four times seven of each half, in turn with the other or alone.
const fn sevens(alone: bool) -> [u8; 64] {
    let mut from = [0; 64];
    let mut i = 0;
    while i < 64 {
        let half = if alone { 1 } else { i % 8 / 4 };
        from[i] = (32 * half + 7 * (i % 4)) as u8;
        i += 1;
    }
    from
}

/// Which byte of signs each element has, for each quarter. A quarter has eight of them and begins `quarter` bytes behind the one before;
/// this many lie side by side, and `step` bytes behind the first of them lie the next ones.
const fn sign_bytes(quarter: usize, beside: usize, step: usize, first: usize) -> [[u8; 64]; 4] {
    let mut which = [[0; 64]; 4];
    let mut i = 0;
    while i < 256 {
        let byte = i % 64 / 8;
        which[i / 64][i % 64] = (first + i / 64 * quarter + byte / beside * step + byte % beside) as u8;
        i += 1;
    }
    which
}

/// Codes with signs of a vector of them, raised.
#[inline(always)]
fn with_signs_of(simd: Avx512, codes: __m512i, signs: __m512i, which: &[u8; 64]) -> __m512i {
    let minus = with_bit(simd, pick_bytes(simd, which, signs));
    add(simd, negated(simd, codes, minus), ZERO)
}

/// Two nibbles of each of eight bytes as scales, twice each and one more, times d.
#[inline(always)]
fn odd_scales(simd: Avx512, nibbles: u64, d: f32x16<Avx512>) -> f32x16<Avx512> {
    let mask = 0x0f0f_0f0f_0f0f_0f0f;
    let scales = to_floats(simd, wide(simd, in_turn(simd, nibbles & mask, nibbles >> 4 & mask)));
    scales.mul_add(d + d, d)
}

/// The number on top of every second word of four bytes, and a half, times d: each twice.
#[inline(always)]
fn top_scales(simd: Avx512, words: __m512i, which: &[i32; 16], d: f32x16<Avx512>) -> f32x16<Avx512> {
    let words: u32x16<Avx512> = words.simd_into(simd);
    let scales = pick(simd, which, to_floats(simd, (words >> 28).into()));
    (scales + f32x16::splat(simd, 0.5)) * d
}

#[inline(always)]
fn scaled(simd: Avx512, run: &[u8], at: usize, by: f32) -> f32x16<Avx512> {
    half(simd, word(run, at)) * f32x16::splat(simd, by)
}

/// Each number of eight twice.
const TWICE: [i32; 16] = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7];

format!(
    Iq2Xxs,
    66,
    ZERO,
    false,
    |simd, run, made: (__m512i, Grid<8, 256>), q| {
        let words = load(simd, run, 2);
        let signs = bits(simd, select_bits(simd, &const { sevens(true) }, words), &[const { even_signs(0) }; 8]);
        const ODD: [i32; 16] = [1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15];
        let scales = top_scales(simd, words, &ODD, scaled(simd, run, 0, 0.25));
        (scales, scales, (signs, whole(iq2_xxs())))
    },
    {
        let ([a, b, c, d, ..], [e, f, g, h, ..]) = (indices(run, 2 + 16 * q), indices(run, 10 + 16 * q));
        let codes = eights(simd, made.1, [a, b, c, d, e, f, g, h]);
        with_signs_of(simd, codes, made.0, &const { sign_bytes(16, 4, 8, 0) }[q])
    }
);

format!(
    Iq2Xs,
    74,
    ZERO,
    false,
    |simd, run, made: (__m512i, Grid<8, 512>), q| {
        let signs = bits(simd, load(simd, run, 2), &[const { even_signs(1) }; 8]);
        let scales = odd_scales(simd, eight(run, 66), scaled(simd, run, 0, 0.125));
        (scales, scales, (signs, whole(iq2_xs())))
    },
    {
        let mut which = [0; 8];
        for (i, which) in which.iter_mut().enumerate() {
            *which = usize::from(word(run, 2 + 16 * q + 2 * i) & 511);
        }
        // Signs are in the second byte of each word.
        with_signs_of(simd, eights(simd, made.1, which), made.0, &const { sign_bytes(16, 1, 2, 1) }[q])
    }
);

format!(
    Iq2S,
    82,
    ZERO,
    false,
    |simd, run, made: Grid<8, 1024>, q| {
        let scales = odd_scales(simd, eight(run, 74), scaled(simd, run, 0, 0.125));
        (scales, scales, whole(iq2_s()))
    },
    {
        let which = with_high_bits(indices(run, 2 + 8 * q), u64::from(word(run, 66 + 2 * q)), 2);
        add(simd, negated(simd, eights(simd, made, which), eight(run, 34 + 8 * q)), ZERO)
    }
);

format!(
    Iq3Xxs,
    98,
    ZERO,
    false,
    |simd, run, made: (__m512i, Grid<4, 256>), q| {
        let words = load_twice(simd, run, 66);
        let signs = bits(simd, select_bits(simd, &const { sevens(false) }, words), &[const { even_signs(0) }; 8]);
        let scales = top_scales(simd, words, &TWICE, scaled(simd, run, 0, 0.5));
        (scales, scales, (signs, whole(iq3_xxs())))
    },
    {
        let codes = fours(simd, made.1, both(indices(run, 2 + 16 * q), indices(run, 10 + 16 * q)));
        with_signs_of(simd, codes, made.0, &const { sign_bytes(8, 8, 0, 0) }[q])
    }
);

format!(
    Iq3S,
    110,
    ZERO,
    false,
    |simd, run, made: Grid<4, 512>, q| {
        let nibbles = spread(simd, u64::from(four(run, 106)), 0x0f0f_0f0f_0f0f_0f0f);
        let d = scaled(simd, run, 0, 1.0);
        let scales = to_floats(simd, wide(simd, in_turn(simd, nibbles, nibbles))).mul_add(d + d, d);
        (scales, scales, whole(iq3_s()))
    },
    {
        let which = both(indices(run, 2 + 16 * q), indices(run, 10 + 16 * q));
        let which = with_high_bits(which, u64::from(word(run, 66 + 2 * q)), 1);
        add(simd, negated(simd, fours(simd, made, which), eight(run, 74 + 8 * q)), ZERO)
    }
);

format!(
    Iq1S,
    50,
    1,
    true,
    |simd, run, made: Grid<8, 2048>, q| {
        let words: i32x16<Avx512> = wide_words(simd, load_16(simd, run, 34)).simd_into(simd);
        let d = scaled(simd, run, 0, 1.0);
        let scales = to_floats(simd, ((words >> 12) & 7).into()).mul_add(d + d, d);
        // The values of a group are moved by an eighth, up or down.
        let eighth: u32x16<Avx512> = ((words & 0x8000) << 16).bitcast();
        let moved: f32x16<Avx512> = (eighth | 0.125f32.to_bits()).bitcast();
        (pick(simd, &TWICE, scales), pick(simd, &TWICE, scales * moved), whole(iq1()))
    },
    {
        let high = u64::from(word(run, 34 + 4 * q)) & 0xfff | (u64::from(word(run, 36 + 4 * q)) & 0xfff) << 12;
        add(simd, eights(simd, made, with_high_bits(indices(run, 2 + 8 * q), high, 3)), 1)
    }
);

format!(
    Iq1M,
    56,
    ZERO,
    false,
    |simd, run, made: Grid<8, 2048>, q| {
        let words = eight(run, 48);
        let numbers = gathered(simd, words, 0x0fff_0fff_0fff_0fff);
        let mask = 0x0707_0707_0707_0707;
        let numbers = wide(simd, pair(simd, spread(simd, numbers, mask), spread(simd, numbers >> 24, mask)));
        let d = half(simd, gathered(simd, words, 0xf000_f000_f000_f000) as u16) * f32x16::splat(simd, 0.125);
        let scales = to_floats(simd, numbers).mul_add(d + d, d);
        (scales, scales, whole(iq1()))
    },
    {
        // Of each nibble three bits belong to an index, and the fourth says whether values are moved down by an eighth or up.
        let nibbles = u64::from(four(run, 32 + 4 * q));
        let which = with_high_bits(indices(run, 4 * 2 * q), gathered(simd, nibbles, 0x7777_7777), 3);
        let down = spread(simd, gathered(simd, nibbles, 0x8888_8888), 0x0101_0101_0101_0101).wrapping_mul(255);
        let eighths = add(simd, by_eight(simd, add(simd, eights(simd, made, which), 1)), ZERO - 8 + 1);
        add_where(simd, eighths, down, 254)
    }
);

const LOW: u64 = take(0, 4, 0);
const HIGH: u64 = take(4, 4, 0);
/// Eight bytes of thirty-two twice, then the next.
const EIGHTS_TWICE: [u8; 64] = {
    let mut which = [0; 64];
    let mut i = 0;
    while i < 64 {
        which[i] = (i / 16 * 8 + i % 8) as u8;
        i += 1;
    }
    which
};

format!(
    Nvfp4,
    144,
    12,
    false,
    |simd, run, _made: (), q| {
        let low = u64::from(four(run, 0)) | u64::from(four(run, 36)) << 32;
        let high = u64::from(four(run, 72)) | u64::from(four(run, 108)) << 32;
        let codes: u32x16<Avx512> = wide(simd, pair(simd, low, high)).simd_into(simd);
        // Exponents of four bits have another zero than those of floats. Half of each, because the table holds numbers doubled.
        let numbers: f32x16<Avx512> = ((codes & 0x7f) << 20).bitcast();
        let scales = numbers * f32x16::splat(simd, f32::from_bits((119 + 127) << 23));
        let none = f32x16::splat(simd, 0.0);
        let scales = codes.simd_eq(0x7f).select(none, scales);
        (scales, none, ())
    },
    {
        let bytes = pick_bytes(simd, &EIGHTS_TWICE, load_twice(simd, run, 36 * q + 4));
        by_table(simd, &E2M1_RAISED, bits(simd, bytes, &[LOW, HIGH, LOW, HIGH, LOW, HIGH, LOW, HIGH]))
    }
);
