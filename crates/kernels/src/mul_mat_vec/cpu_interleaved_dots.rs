//! How rows that are interleaved (`cpu_interleaved.rs`) meet activations: sixteen rows times up to eight activations at a time. An instruction
//! adds four products for each of sixteen rows; elements of activations are two bytes, as in `cpu_spans.rs`.

use std::arch::x86_64::__m512i;
use std::array::from_fn;

use fearless_simd::prelude::*;
use fearless_simd::{Avx512, f32x16, u8x32, u8x64, u32x16};
use kiln_gguf::TensorType;
use kiln_system::instructions::{fetch, gains_by_fetching};

use super::cpu_interleaved::{Interleave, InterleavedRows, Line, ROWS};
use super::cpu_quants::{BLOCK, E2M1_RAISED, IQ4_RAISED};
use super::cpu_spans::{ActivationSpan, RUN, SpanActivations};
use super::cpu_wide::{
    and, bits, by_128, by_table, dot, four_everywhere, halves_of, load_16, select_bits, sum, take, to_floats, wide,
    with_bits_of, zeros,
};

/// Bytes ahead of which memory is fetched where that helps.
const AHEAD: usize = 2048;
/// Sixteens of rows that meet all activations before the next ones do: they stay in the nearest caches, while activations come from further away.
const STRETCH: usize = 3;
/// Activations that sixteen rows meet at once: sums of eight fill the registers that codes leave.
const MOST: usize = 8;

/// Calls a generic function with the format of a type, or else does what is last.
macro_rules! with_format {
    ($ty:expr, $function:ident $arguments:tt, else $other:expr) => {
        match $ty {
            TensorType::Q4_0 => $function::<Nibbles> $arguments,
            TensorType::Q4_1 => $function::<LeastNibbles> $arguments,
            TensorType::Q5_0 => $function::<Fives> $arguments,
            TensorType::Q5_1 => $function::<LeastFives> $arguments,
            TensorType::Q8_0 => $function::<Wholes> $arguments,
            TensorType::IQ4_NL => $function::<Listed> $arguments,
            TensorType::MXFP4 => $function::<Tiny> $arguments,
            _ => $other,
        }
    };
}

/// How blocks of a type are interleaved; `None` where they are not.
pub(super) fn interleave_of(ty: TensorType) -> Option<Interleave> {
    fn of<F: Format>() -> Option<Interleave> {
        Some(F::INTERLEAVE)
    }
    with_format!(ty, of(), else None)
}

impl InterleavedRows<'_> {
    /// Rows times all activations: `out` has one activation vector's results after the other.
    pub(super) fn dots(self, simd: Avx512, columns: &SpanActivations, out: &mut [f32]) {
        with_format!(self.ty(), dots(simd, self, columns, out), else unreachable!("it was interleaved"));
    }

    /// Codes of the i-th sixteen rows as bytes with a sign, scales and offsets: of one block after the other.
    pub(super) fn spread(&self, simd: Avx512, i: usize, to: &mut Spread) {
        with_format!(self.ty(), spread(simd, self.sixteen(i), to), else unreachable!("it was interleaved"));
    }

    /// Whether blocks have offsets.
    pub(super) fn has_offsets(&self) -> bool {
        interleave_of(self.ty()).is_some_and(|interleave| interleave.heads == 2)
    }
}

/// What [`InterleavedRows::spread`] makes of sixteen rows, for each block.
pub(super) struct Spread {
    /// The first four elements of each row, then the next four.
    pub codes: Vec<[u8; ROWS * BLOCK]>,
    pub scales: Vec<[f32; ROWS]>,
    pub offsets: Vec<[f32; ROWS]>,
}

/// A interleaved type: element e of a block is `scale (code(e) - ZERO) + offset`. The offset is the second head.
trait Format {
    const INTERLEAVE: Interleave;
    const ZERO: u8;

    /// Elements `4 i .. 4 i + 4` of every row for each i.
    fn codes(simd: Avx512, lines: &[Line]) -> [__m512i; 8];

    /// The scales of sixteen rows, from their first head on.
    #[inline(always)]
    fn scales(simd: Avx512, heads: &[u8]) -> f32x16<Avx512> {
        halves_of(simd, u8x32::load_array_ref(simd, heads.first_chunk().expect("half a vector")))
    }
}

#[inline(always)]
fn vector(simd: Avx512, line: &Line) -> __m512i {
    u8x64::load_array_ref(simd, &line.0).into()
}

#[inline(always)]
fn nibbles(simd: Avx512, lines: &[Line]) -> [__m512i; 8] {
    let [a, b, c, d] = lines.first_chunk().expect("four vectors of a block");
    let [a, b, c, d] = [vector(simd, a), vector(simd, b), vector(simd, c), vector(simd, d)];
    let [e, f, g, h] = [high(simd, a), high(simd, b), high(simd, c), high(simd, d)];
    [and(simd, a, 15), and(simd, b, 15), and(simd, c, 15), and(simd, d, 15), e, f, g, h]
}

#[inline(always)]
fn high(simd: Avx512, bytes: __m512i) -> __m512i {
    const HIGH: [u64; 8] = [take(4, 4, 0); 8];
    bits(simd, bytes, &HIGH)
}

/// Nibbles and a fifth bit of each: the first vector has those bits of all elements of a row, from the first one on.
#[inline(always)]
fn fives(simd: Avx512, lines: &[Line]) -> [__m512i; 8] {
    let (fifth, low) = (vector(simd, &lines[0]), nibbles(simd, &lines[1..]));
    let mut codes = low;
    for (i, codes) in codes.iter_mut().enumerate() {
        *codes = with_bits_of(simd, low[i], select_bits(simd, &FIFTH[i], fifth), 16);
    }
    codes
}

/// From which bit of eight bytes on each byte comes that has the fifth bit of its element instead of bit 4: both halves are a row.
const FIFTH: [[u8; 64]; 8] = {
    let mut from = [[0; 64]; 8];
    let mut i = 0;
    while i < 512 {
        let (vector, byte) = (i / 64, i % 64);
        from[vector][byte] = ((byte % 8 / 4 * 32 + 4 * vector + byte % 4 + 60) % 64) as u8;
        i += 1;
    }
    from
};

/// What nibbles stand for.
#[inline(always)]
fn listed(simd: Avx512, lines: &[Line], table: &[u8; 16]) -> [__m512i; 8] {
    let mut codes = nibbles(simd, lines);
    for codes in &mut codes {
        *codes = by_table(simd, table, *codes);
    }
    codes
}

/// Declares a format: heads of a block and bytes of each, vectors of codes, what is changed in them, the byte that stands for zero, codes.
macro_rules! format {
    ($(#[$meta:meta])* $name:ident, $heads:literal of $head_bytes:literal, $lines:literal, $flip:literal, $zero:literal,
     |$simd:ident, $of:ident| $codes:expr $(, |$in:ident, $bytes:ident| $scales:expr)?) => {
        $(#[$meta])*
        struct $name;

        impl Format for $name {
            const INTERLEAVE: Interleave = Interleave { heads: $heads, head_bytes: $head_bytes, lines: $lines, flip: $flip };
            const ZERO: u8 = $zero;

            #[inline(always)]
            fn codes($simd: Avx512, $of: &[Line]) -> [__m512i; 8] {
                $codes
            }

            $(#[inline(always)]
            fn scales($in: Avx512, $bytes: &[u8]) -> f32x16<Avx512> {
                $scales
            })?
        }
    };
}

format!(Nibbles, 1 of 2, 4, 0, 8, |simd, lines| nibbles(simd, lines));
format!(LeastNibbles, 2 of 2, 4, 0, 0, |simd, lines| nibbles(simd, lines));
format!(Fives, 1 of 2, 5, 0, 16, |simd, lines| fives(simd, lines));
format!(LeastFives, 2 of 2, 5, 0, 0, |simd, lines| fives(simd, lines));
format!(Listed, 1 of 2, 4, 0, 128, |simd, lines| listed(simd, lines, &IQ4_RAISED));
format!(Tiny, 1 of 1, 4, 0, 12, |simd, lines| listed(simd, lines, &E2M1_RAISED), |simd, heads| {
    let exponents: u32x16<Avx512> = wide(simd, load_16(simd, heads, 0)).simd_into(simd);
    // 2^(exponent - 127), of which the smallest is subnormal; half of it, because the table holds numbers doubled.
    let powers: f32x16<Avx512> = (exponents << 23).max(u32x16::splat(simd, 0x0040_0000)).bitcast();
    powers * f32x16::splat(simd, 0.5)
});
format!(
    /// Whole bytes have a sign in the file, and none here.
    Wholes, 1 of 2, 8, 0x8080_8080, 128, |simd, lines| {
    let [a, b, c, d, e, f, g, h] = lines.first_chunk().expect("eight vectors of a block");
    let [a, b, c, d] = [vector(simd, a), vector(simd, b), vector(simd, c), vector(simd, d)];
    [a, b, c, d, vector(simd, e), vector(simd, f), vector(simd, g), vector(simd, h)]
});

/// The heads of a block from number `head` on.
#[inline(always)]
fn heads<F: Format>(lines: &[Line], block: usize, head: usize) -> &[u8] {
    &lines[F::INTERLEAVE.line_of_heads(block)].0[F::INTERLEAVE.place_of_head(block, head)..]
}

/// The offsets of sixteen rows.
#[inline(always)]
fn offsets<F: Format>(simd: Avx512, lines: &[Line], block: usize) -> f32x16<Avx512> {
    halves_of(simd, u8x32::load_array_ref(simd, heads::<F>(lines, block, 1).first_chunk().expect("half a vector")))
}

/// The vectors of codes of a block. The memory that follows is fetched, if `ahead`.
#[inline(always)]
fn codes_of<F: Format>(lines: &[Line], block: usize, ahead: bool) -> &[Line] {
    let own = &lines[F::INTERLEAVE.line_of_codes(block)..][..F::INTERLEAVE.lines];
    if ahead {
        own.iter().for_each(|line| fetch(&line.0, AHEAD));
        if block.is_multiple_of(F::INTERLEAVE.beside()) {
            fetch(&lines[F::INTERLEAVE.line_of_heads(block)].0, AHEAD);
        }
    }
    own
}

#[inline(never)]
fn dots<F: Format>(simd: Avx512, rows: InterleavedRows<'_>, columns: &SpanActivations, out: &mut [f32]) {
    simd.vectorize(
        #[inline(always)]
        || {
            let n = columns.count();
            let (sixteens, ahead) = (out.len() / n / ROWS, gains_by_fetching());
            for first in (0..sixteens).step_by(STRETCH) {
                let some = Stretch { rows, first, end: sixteens.min(first + STRETCH), ahead };
                let mut c = 0;
                while c < n {
                    c += match n - c {
                        MOST.. => some.meet::<F, MOST>(simd, columns, c, out),
                        4.. => some.meet::<F, 4>(simd, columns, c, out),
                        2.. => some.meet::<F, 2>(simd, columns, c, out),
                        _ => some.meet::<F, 1>(simd, columns, c, out),
                    };
                }
            }
        },
    );
}

/// Some sixteens of rows.
#[derive(Clone, Copy)]
struct Stretch<'a> {
    rows: InterleavedRows<'a>,
    first: usize,
    end: usize,
    /// Whether memory is fetched ahead for any N.
    ahead: bool,
}

impl Stretch<'_> {
    /// They times `N` activations from number `c` on; gives the number of these.
    #[inline(always)]
    fn meet<F: Format, const N: usize>(
        self,
        simd: Avx512,
        columns: &SpanActivations,
        c: usize,
        out: &mut [f32],
    ) -> usize {
        let count = out.len() / columns.count();
        let some: [&[ActivationSpan]; N] = from_fn(|i| columns.column(c + i));
        for i in self.first..self.end {
            // A block of several activations takes so long that the hardware prefetcher does not look far enough ahead.
            let ahead = self.ahead || N >= 4;
            let sums = meet::<F, N>(simd, self.rows.sixteen(i), self.rows.blocks(), some, ahead);
            for (j, sums) in sums.iter().enumerate() {
                sums.store_slice(&mut out[(c + j) * count + i * ROWS..][..ROWS]);
            }
        }
        N
    }
}

/// Sixteen rows times `N` activations. A result's bits do not depend on the activations beside it.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "codes and bytes of columns go together")]
fn meet<F: Format, const N: usize>(
    simd: Avx512,
    lines: &[Line],
    blocks: usize,
    columns: [&[ActivationSpan]; N],
    ahead: bool,
) -> [f32x16<Avx512>; N] {
    let mut sums = [f32x16::splat(simd, 0.0); N];
    for b in 0..blocks {
        let (run, at) = (b / (RUN / BLOCK), b % (RUN / BLOCK));
        let codes = F::codes(simd, codes_of::<F>(lines, b, ahead));
        let scales = F::scales(simd, heads::<F>(lines, b, 0));
        let mut x = [&columns[0][run]; N];
        let mut whole = [zeros(simd); N];
        for c in 0..N {
            x[c] = &columns[c][run];
        }
        for i in 0..8 {
            for c in 0..N {
                whole[c] = dot(simd, whole[c], codes[i], four_everywhere(simd, four(x[c].block_of_highs(at), i)));
            }
        }
        // Small N leave registers for sums of their own for low bytes, which then need not wait for the others.
        let mut lows = [zeros(simd); N];
        for c in 0..N {
            // What stands for zero is taken away from the whole numbers, which are exact.
            let less = four_everywhere(simd, x[c].ints_of_blocks[at].wrapping_mul(-i32::from(F::ZERO)));
            whole[c] = if F::ZERO > 0 { sum(simd, by_128(simd, whole[c]), less) } else { by_128(simd, whole[c]) };
        }
        for i in 0..8 {
            for c in 0..N {
                let to = if N < MOST { &mut lows[c] } else { &mut whole[c] };
                *to = dot(simd, *to, codes[i], four_everywhere(simd, four(x[c].block_of_lows(at), i)));
            }
        }
        for c in 0..N {
            if N < MOST {
                whole[c] = sum(simd, whole[c], lows[c]);
            }
            let factors = scales * f32x16::splat(simd, x[c].scales[2 * at]);
            sums[c] = to_floats(simd, whole[c]).mul_add(factors, sums[c]);
            if F::INTERLEAVE.heads == 2 {
                let offsets = offsets::<F>(simd, lines, b);
                sums[c] = offsets.mul_add(f32x16::splat(simd, x[c].sums_of_blocks[at]), sums[c]);
            }
        }
    }
    sums
}

/// Four bytes as one number.
#[inline(always)]
fn four(bytes: &[u8; BLOCK], i: usize) -> i32 {
    i32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
}

#[inline(never)]
fn spread<F: Format>(simd: Avx512, lines: &[Line], to: &mut Spread) {
    simd.vectorize(
        #[inline(always)]
        || {
            let ahead = gains_by_fetching();
            for b in 0..to.codes.len() {
                let codes = F::codes(simd, codes_of::<F>(lines, b, ahead));
                for (codes, to) in codes.into_iter().zip(to.codes[b].as_chunks_mut::<64>().0) {
                    let codes: u8x64<Avx512> = codes.simd_into(simd);
                    (codes - u8x64::splat(simd, F::ZERO)).store_array(to);
                }
                F::scales(simd, heads::<F>(lines, b, 0)).store_array(&mut to.scales[b]);
                if F::INTERLEAVE.heads == 2 {
                    offsets::<F>(simd, lines, b).store_array(&mut to.offsets[b]);
                }
            }
        },
    );
}
