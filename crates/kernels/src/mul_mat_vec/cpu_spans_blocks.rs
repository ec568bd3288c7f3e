//! Formats of 32 elements in a block, as `cpu_spans.rs` reads them: eight blocks are a run.

use std::arch::x86_64::__m512i;

use fearless_simd::prelude::*;
use fearless_simd::{Avx512, f32x16, u32x16};

use super::cpu_quants::{E2M1_RAISED, IQ4_RAISED};
use super::cpu_spans::Format;
use super::cpu_wide::{
    add_where, and, bits, blend_words, by_table, four, halves, load, load_two, pick_bytes, pick_bytes_of_two,
    pick_wide, pick_words, take, xor,
};

/// Where the half floats of eight blocks lie, in up to four vectors of a run.
struct Halves {
    /// The first byte of each vector.
    at: [usize; 4],
    /// Vectors there are.
    count: usize,
    /// Words of the first two, and of the last two.
    words: [[u16; 32]; 2],
    /// Which are of the last two.
    last: u32,
}

/// The half floats `at` bytes behind the beginning of eight blocks of `bytes`, each twice.
const fn places(bytes: usize, at: usize) -> Halves {
    let mut made = Halves { at: [0; 4], count: 0, words: [[0; 32]; 2], last: 0 };
    let (mut b, mut end) = (0, 0);
    while b < 8 {
        let place = b * bytes + at;
        if place + 2 > end {
            let most = 8 * bytes - 64;
            made.at[made.count] = if place < most { place } else { most };
            end = made.at[made.count] + 64;
            made.count += 1;
        }
        let vector = made.count - 1;
        let word = ((place - made.at[vector]) / 2 + 32 * (vector % 2)) as u16;
        made.words[vector / 2][2 * b] = word;
        made.words[vector / 2][2 * b + 1] = word;
        if vector > 1 {
            made.last |= 3 << (2 * b);
        }
        b += 1;
    }
    made
}

/// A half float of each block, twice.
#[inline(always)]
fn halves_at(simd: Avx512, run: &[u8], places: &Halves) -> f32x16<Avx512> {
    let [a, b, c, d] = places.at;
    let mut words = pick_words(simd, &places.words[0], load(simd, run, a), load(simd, run, b));
    if places.count > 2 {
        let others = pick_words(simd, &places.words[1], load(simd, run, c), load(simd, run, d));
        words = blend_words(simd, places.last, words, others);
    }
    halves(simd, words)
}

/// Where nibbles of two blocks lie, for each quarter of a run.
struct Nibbles {
    at: [usize; 4],
    bytes: [[u8; 64]; 4],
}

/// Sixteen bytes `at` behind the beginning of each block of `bytes`: of two blocks all of them, each sixteen twice.
const fn nibbles(bytes: usize, at: usize) -> Nibbles {
    let mut made = Nibbles { at: [0; 4], bytes: [[0; 64]; 4] };
    let mut q = 0;
    while q < 4 {
        let (first, most) = (2 * q * bytes, 8 * bytes - 64);
        made.at[q] = if first < most { first } else { most };
        let mut e = 0;
        while e < 64 {
            made.bytes[q][e] = (first + e / 32 * bytes + at + e % 16 - made.at[q]) as u8;
            e += 1;
        }
        q += 1;
    }
    made
}

const LOW: u64 = take(0, 4, 0);
const HIGH: u64 = take(4, 4, 0);
/// Low nibbles, then high ones.
const LOW_AND_HIGH: [u64; 8] = [LOW, LOW, HIGH, HIGH, LOW, LOW, HIGH, HIGH];

/// The nibbles of a quarter.
#[inline(always)]
fn nibbles_at<const Q: usize>(simd: Avx512, run: &[u8], nibbles: &Nibbles) -> __m512i {
    let bytes = pick_bytes(simd, &nibbles.bytes[Q], load(simd, run, nibbles.at[Q]));
    bits(simd, bytes, &LOW_AND_HIGH)
}

/// Where eight bytes of nibbles of each block lie: the first of each, then the second.
struct Eights {
    /// The first bytes of two vectors, each.
    at: [[usize; 2]; 2],
    bytes: [[u8; 64]; 2],
}

/// Nibbles that begin `at` bytes behind each block of `bytes`, at most 18.
const fn eights(bytes: usize, at: usize) -> Eights {
    let mut made = Eights { at: [[0; 2]; 2], bytes: [[0; 64]; 2] };
    let mut i = 0;
    while i < 128 {
        let (part, block, byte) = (i / 64, i % 64 / 8, i % 8);
        let (first, most) = (block / 4 * 4 * bytes + at + 8 * part, 8 * bytes - 64);
        let first = if first < most { first } else { most };
        made.at[part][block / 4] = first;
        made.bytes[part][i % 64] = (block * bytes + at + 8 * part + byte - first + block / 4 * 64) as u8;
        i += 1;
    }
    made
}

/// The nibbles of a run, see [`Format::in_turn`].
#[inline(always)]
fn eights_at(simd: Avx512, run: &[u8], eights: &Eights) -> [__m512i; 4] {
    let [[a, b], [c, d]] = eights.at;
    let first = pick_bytes_of_two(simd, &eights.bytes[0], load(simd, run, a), load(simd, run, b));
    let second = pick_bytes_of_two(simd, &eights.bytes[1], load(simd, run, c), load(simd, run, d));
    [and(simd, first, 15), and(simd, second, 15), bits(simd, first, &[HIGH; 8]), bits(simd, second, &[HIGH; 8])]
}

/// The same by a table.
#[inline(always)]
fn eights_of(simd: Avx512, run: &[u8], eights: &Eights, table: &[u8; 16]) -> [__m512i; 4] {
    let [a, b, c, d] = eights_at(simd, run, eights);
    [by_table(simd, table, a), by_table(simd, table, b), by_table(simd, table, c), by_table(simd, table, d)]
}

/// Declares a format of nibbles: bytes of a block, where its nibbles lie, the byte that stands for zero, where the least value
/// lies if there is one, what becomes of the nibbles of a quarter, and codes in turn.
macro_rules! format {
    ($name:ident, $bytes:literal, $at:literal, $zero:literal, $least:expr, |$simd:ident, $run:ident, $q:ident, $codes:ident| $body:expr,
     |$turned:ident, $bytes_of:ident| $in_turn:expr) => {
        pub(super) struct $name;

        impl Format for $name {
            const BYTES: usize = 8 * $bytes;
            const ZERO: u8 = $zero;
            const OFFSETS: bool = $least.is_some();
            type Made = ();

            #[inline(always)]
            fn begin(simd: Avx512, run: &[u8]) -> (f32x16<Avx512>, f32x16<Avx512>, ()) {
                const LEAST: Option<usize> = $least;
                const SCALES: Halves = places($bytes, 0);
                const OFFSETS: Halves = places($bytes, if let Some(at) = LEAST { at } else { 0 });
                let scales = halves_at(simd, run, &SCALES);
                match LEAST {
                    Some(_) => (scales, halves_at(simd, run, &OFFSETS), ()),
                    None => (scales, f32x16::splat(simd, 0.0), ()),
                }
            }

            #[inline(always)]
            fn codes<const Q: usize>($simd: Avx512, $run: &[u8], (): &()) -> __m512i {
                const NIBBLES: Nibbles = nibbles($bytes, $at);
                let $q = Q;
                let $codes = nibbles_at::<Q>($simd, $run, &NIBBLES);
                $body
            }

            #[inline(always)]
            fn in_turn($turned: Avx512, $bytes_of: &[u8]) -> Option<[__m512i; 4]> {
                $in_turn
            }
        }
    };
}

/// The fifth bits of two blocks of `bytes`, `at` behind their beginnings.
#[inline(always)]
fn fifth_bits(run: &[u8], q: usize, bytes: usize, at: usize) -> u64 {
    let bits = |b: usize| u64::from(four(run, b * bytes + at));
    bits(2 * q) | bits(2 * q + 1) << 32
}

const EIGHTS_OF_18: Eights = eights(18, 2);
const EIGHTS_OF_17: Eights = eights(17, 1);

format!(Q4_0, 18, 2, 8, None::<usize>, |_simd, _run, _q, codes| codes, |simd, run| Some(eights_at(
    simd,
    run,
    &EIGHTS_OF_18
)));
format!(Q4_1, 20, 4, 0, Some(2usize), |_simd, _run, _q, codes| codes, |_simd, _run| None);
format!(
    Q5_0,
    22,
    6,
    16,
    None::<usize>,
    |simd, run, q, codes| add_where(simd, codes, fifth_bits(run, q, 22, 2), 16),
    |_simd, _run| None
);
format!(
    Q5_1,
    24,
    8,
    0,
    Some(2usize),
    |simd, run, q, codes| add_where(simd, codes, fifth_bits(run, q, 24, 4), 16),
    |_simd, _run| None
);
format!(
    Iq4Nl,
    18,
    2,
    128,
    None::<usize>,
    |simd, _run, _q, codes| by_table(simd, &IQ4_RAISED, codes),
    |simd, run| Some(eights_of(simd, run, &EIGHTS_OF_18, &IQ4_RAISED))
);

pub(super) struct Mxfp4;

/// The first byte of each block of 17 bytes, as two numbers.
const EXPONENTS: [u8; 64] = {
    let mut which = [0; 64];
    let mut i = 0;
    while i < 16 {
        which[4 * i] = (i / 2 * 17) as u8;
        i += 1;
    }
    which
};

impl Format for Mxfp4 {
    const BYTES: usize = 8 * 17;
    const ZERO: u8 = 12;
    const OFFSETS: bool = false;
    type Made = ();

    #[inline(always)]
    fn begin(simd: Avx512, run: &[u8]) -> (f32x16<Avx512>, f32x16<Avx512>, ()) {
        let exponents: u32x16<Avx512> =
            pick_wide(simd, &EXPONENTS, load(simd, run, 0), load(simd, run, 64)).simd_into(simd);
        // 2^(exponent - 127), of which the smallest is subnormal; half of it, because the table holds numbers doubled.
        let bits = (exponents << 23).max(u32x16::splat(simd, 0x0040_0000));
        let powers: f32x16<Avx512> = bits.bitcast();
        (powers * f32x16::splat(simd, 0.5), f32x16::splat(simd, 0.0), ())
    }

    #[inline(always)]
    fn codes<const Q: usize>(simd: Avx512, run: &[u8], (): &()) -> __m512i {
        const NIBBLES: Nibbles = nibbles(17, 1);
        by_table(simd, &E2M1_RAISED, nibbles_at::<Q>(simd, run, &NIBBLES))
    }

    #[inline(always)]
    fn in_turn(simd: Avx512, run: &[u8]) -> Option<[__m512i; 4]> {
        Some(eights_of(simd, run, &EIGHTS_OF_17, &E2M1_RAISED))
    }
}

pub(super) struct Q8_0;

impl Format for Q8_0 {
    const BYTES: usize = 8 * 34;
    const ZERO: u8 = 128;
    const OFFSETS: bool = false;
    type Made = ();

    #[inline(always)]
    fn begin(simd: Avx512, run: &[u8]) -> (f32x16<Avx512>, f32x16<Avx512>, ()) {
        const SCALES: Halves = places(34, 0);
        (halves_at(simd, run, &SCALES), f32x16::splat(simd, 0.0), ())
    }

    #[inline(always)]
    fn codes<const Q: usize>(simd: Avx512, run: &[u8], (): &()) -> __m512i {
        xor(simd, load_two(simd, run, 68 * Q + 2, 68 * Q + 36), 128)
    }
}
