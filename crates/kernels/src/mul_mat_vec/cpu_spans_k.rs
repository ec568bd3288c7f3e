//! Formats of 256 elements in a block, as `cpu_spans.rs` reads them: a block is a run.

use std::arch::x86_64::__m512i;

use fearless_simd::{Avx512, f32x16};

use super::cpu_quants::IQ4_RAISED;
use super::cpu_spans::Format;
use super::cpu_wide::{
    and, bits, bits_of_16, by_table, eight, four, half, in_turn, less, load, load_16, load_twice, or, or_16, pair,
    pick, pick_bytes, shifted, spread, take, to_floats, two_halves, wide, wide_signed, word,
};

/// A matrix for thirty-two bytes, and another one for as many.
const fn two(a: u64, b: u64) -> [u64; 8] {
    [a, a, a, a, b, b, b, b]
}

/// Matrices for each quarter that take `count` bits, those of thirty-two elements beside those of the thirty-two before.
const fn quarters(count: usize, to: usize) -> [[u64; 8]; 4] {
    let mut made = [[0; 8]; 4];
    let mut q = 0;
    while q < 4 {
        let from = 2 * q * count % 8;
        made[q] = two(take(from, count, to), take((from + count) % 8, count, to));
        q += 1;
    }
    made
}

/// Declares a format: bytes of a block, the byte that stands for zero, whether it has offsets, scales and offsets of a block, and
/// the codes of a quarter.
macro_rules! format {
    ($name:ident, $bytes:literal, $zero:literal, $offsets:literal,
     |$simd:ident, $run:ident, $q:ident| $factors:expr, $codes:expr) => {
        pub(super) struct $name;

        impl Format for $name {
            const BYTES: usize = $bytes;
            const ZERO: u8 = $zero;
            const OFFSETS: bool = $offsets;
            type Made = ();

            #[inline(always)]
            fn begin($simd: Avx512, $run: &[u8]) -> (f32x16<Avx512>, f32x16<Avx512>, ()) {
                let (scales, offsets) = $factors;
                (scales, offsets, ())
            }

            #[inline(always)]
            fn codes<const Q: usize>($simd: Avx512, $run: &[u8], (): &()) -> __m512i {
                let $q = Q;
                $codes
            }
        }
    };
}

const LOW: u64 = take(0, 4, 0);
const HIGH: u64 = take(4, 4, 0);
/// Each number of eight twice: those in even places, and those in odd ones.
const EVEN: [i32; 16] = [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14];
const ODD: [i32; 16] = [1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15];

/// Scales and offsets of Q4_K and Q5_K: eight of six bits each.
#[inline(always)]
fn six_bits(simd: Avx512, run: &[u8]) -> (f32x16<Avx512>, f32x16<Avx512>) {
    let (a, b, c) = (four(run, 4), four(run, 8), four(run, 12));
    let low = |x: u32| u64::from(x & 0x3f3f_3f3f);
    let high = |low: u32, high: u32| u64::from(low & 0x0f0f_0f0f | high >> 2 & 0x3030_3030) << 32;
    let numbers = to_floats(simd, wide(simd, in_turn(simd, low(a) | high(c, a), low(b) | high(c >> 4, b))));
    // The second half float is that of the minimums, which are taken away.
    let both = numbers * two_halves(simd, four(run, 0) ^ 0x8000_0000);
    (pick(simd, &EVEN, both), pick(simd, &ODD, both))
}

format!(Q4K, 144, 0, true, |simd, run, q| six_bits(simd, run), {
    bits(simd, load_twice(simd, run, 16 + 32 * q), &const { two(LOW, HIGH) })
});

format!(Q5K, 176, 0, true, |simd, run, q| six_bits(simd, run), {
    let lows = bits(simd, load_twice(simd, run, 48 + 32 * q), &const { two(LOW, HIGH) });
    or(simd, lows, bits(simd, load_twice(simd, run, 16), &const { quarters(1, 4) }[q]))
});

format!(
    Q6K,
    210,
    32,
    false,
    |simd, run, q| {
        let scales = to_floats(simd, wide_signed(simd, load_16(simd, run, 192)));
        (scales * half(simd, word(run, 208)), scales)
    },
    {
        let bytes = load(simd, run, 64 * (q / 2));
        let lows = if q.is_multiple_of(2) { and(simd, bytes, 15) } else { bits(simd, bytes, &[HIGH; 8]) };
        or(simd, lows, bits(simd, load_twice(simd, run, 128 + 32 * (q / 2)), &const { quarters(2, 4) }[q]))
    }
);

format!(
    Q2K,
    84,
    0,
    true,
    |simd, run, q| {
        let bytes = load_16(simd, run, 0);
        let scales = to_floats(simd, wide(simd, bits_of_16(simd, bytes, [LOW; 2])));
        let leasts = to_floats(simd, wide(simd, bits_of_16(simd, bytes, [HIGH; 2])));
        (scales * half(simd, word(run, 80)), leasts * half(simd, word(run, 82) ^ 0x8000))
    },
    bits(simd, load_twice(simd, run, 16 + 32 * (q / 2)), &const { quarters(2, 0) }[q])
);

format!(
    Q3K,
    110,
    4,
    false,
    |simd, run, q| {
        let bytes = eight(run, 96);
        let lows = bits_of_16(simd, pair(simd, bytes, bytes), [LOW, HIGH]);
        let highs = bits_of_16(simd, shifted(simd, four(run, 104), &[0, 2, 4, 6]), [take(0, 2, 4); 2]);
        let scales = to_floats(simd, less(simd, wide(simd, or_16(simd, lows, highs)), 32));
        (scales * half(simd, word(run, 108)), scales)
    },
    {
        let lows = bits(simd, load_twice(simd, run, 32 + 32 * (q / 2)), &const { quarters(2, 0) }[q]);
        or(simd, lows, bits(simd, load_twice(simd, run, 0), &const { quarters(1, 2) }[q]))
    }
);

format!(
    Tq2,
    66,
    1,
    false,
    |simd, run, q| {
        let scales = half(simd, word(run, 64));
        (scales, scales)
    },
    bits(simd, load_twice(simd, run, 32 * (q / 2)), &const { quarters(2, 0) }[q])
);

/// Two sixteens of thirty-two bytes, each twice.
const SIXTEENS_TWICE: [u8; 64] = {
    let mut which = [0; 64];
    let mut i = 0;
    while i < 64 {
        which[i] = (i / 32 * 16 + i % 16) as u8;
        i += 1;
    }
    which
};

format!(
    Iq4Xs,
    136,
    128,
    false,
    |simd, run, q| {
        let lows = spread(simd, u64::from(four(run, 4)), 0x0f0f_0f0f_0f0f_0f0f);
        let highs = spread(simd, u64::from(word(run, 2)), 0x3030_3030_3030_3030);
        let scales = to_floats(simd, less(simd, wide(simd, in_turn(simd, lows | highs, lows | highs)), 32));
        (scales * half(simd, word(run, 0)), scales)
    },
    {
        let bytes = pick_bytes(simd, &SIXTEENS_TWICE, load_twice(simd, run, 8 + 32 * q));
        by_table(simd, &IQ4_RAISED, bits(simd, bytes, &[LOW, LOW, HIGH, HIGH, LOW, LOW, HIGH, HIGH]))
    }
);
