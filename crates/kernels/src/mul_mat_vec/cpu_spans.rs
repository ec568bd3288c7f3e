//! A small N on machines whose widest instructions multiply bytes (AVX-512 with VNNI). A rounded element of an activation vector is two
//! bytes, 128 high + low. Rows are read in runs of 256 elements: a run becomes bytes in registers, sixty-four at a time, and an
//! instruction adds sixty-four products of them and one byte of each element. Formats are in `cpu_spans_blocks.rs`,
//! `cpu_spans_k.rs` and `cpu_spans_grids.rs`.

use std::arch::x86_64::{__m512i, _mm512_cvtepi32_epi8};
use std::array::from_fn;
use std::marker::PhantomData;

use fearless_simd::prelude::*;
use fearless_simd::{Avx512, f32x16, i32x16, u8x16, u8x32, u8x64};
use kiln_gguf::TensorType;
use rayon::prelude::*;

use super::cpu_interleaved::InterleavedRows;
use super::cpu_ints::{HUGE, TINY, TOP};
use super::cpu_quants::{self, BLOCK, Q1, Q2, TQ1};
use super::cpu_rows::Rows;
use super::cpu_spans_blocks::{Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use super::cpu_spans_grids::{Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Nvfp4};
use super::cpu_spans_k::{Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K, Tq2};
use super::cpu_wide::{by_128, dot, pick, sum, to_floats, zeros};

/// Elements of a run.
pub(super) const RUN: usize = 256;
/// Activations from which on several threads round them.
const SHARED: usize = 16;
/// A format whose runs become bytes in registers: element e of a run is `scales(e / 16) (codes(e) - ZERO) + offsets(e / 16)`.
pub(super) trait Format {
    /// Bytes of a run.
    const BYTES: usize;
    /// The byte that stands for zero.
    const ZERO: u8;
    /// Whether there are offsets.
    const OFFSETS: bool;
    /// What is made once for a run.
    type Made;

    /// Scales and offsets of a run, and what its codes need besides.
    fn begin(simd: Avx512, run: &[u8]) -> (f32x16<Avx512>, f32x16<Avx512>, Self::Made);

    /// The codes of elements `64 Q .. 64 Q + 64`.
    fn codes<const Q: usize>(simd: Avx512, run: &[u8], made: &Self::Made) -> __m512i;

    /// The codes of a run in turn, where they can be had so: vector t has elements `8 t .. 8 t + 8` of every thirty-two. All vectors
    /// then have the same scales, and their products are summed before they are scaled.
    #[inline(always)]
    fn in_turn(_simd: Avx512, _run: &[u8]) -> Option<[__m512i; 4]> {
        None
    }
}

/// A format that is known by its bytes in `cpu_quants.rs`.
struct Coded<F>(PhantomData<F>);

impl<F: cpu_quants::Format> Format for Coded<F> {
    const BYTES: usize = RUN / F::LEN * F::BYTES;
    const ZERO: u8 = F::ZERO;
    const OFFSETS: bool = F::OFFSETS > 0;
    type Made = [__m512i; 4];

    #[inline(always)]
    fn begin(simd: Avx512, run: &[u8]) -> (f32x16<Avx512>, f32x16<Avx512>, [__m512i; 4]) {
        const { assert!(!F::HALVES) };
        let mut codes = [u8x32::splat(simd, 0); 8];
        let (mut scales, mut offsets) = ([0.0; 16], [0.0; 16]);
        for (b, block) in run.chunks_exact(F::BYTES).enumerate() {
            F::bytes(
                simd,
                block,
                #[inline(always)]
                |i, bytes, both, pair| {
                    let at = b * (F::LEN / BLOCK) + i;
                    codes[at] = bytes;
                    scales[2 * at..][..2].copy_from_slice(&both);
                    offsets[2 * at..][..2].copy_from_slice(&pair);
                },
            );
        }
        let [a, b, c, d, e, f, g, h] = codes;
        let made = [a.combine(b).into(), c.combine(d).into(), e.combine(f).into(), g.combine(h).into()];
        (f32x16::load_array(simd, scales), f32x16::load_array(simd, offsets), made)
    }

    #[inline(always)]
    fn codes<const Q: usize>(_: Avx512, _: &[u8], made: &[__m512i; 4]) -> __m512i {
        made[Q]
    }
}

/// How rows of a type meet activations.
type Dots = fn(Avx512, Rows<'_>, &SpanActivations, &mut [f32]);

/// The way of a type.
fn dots_of(ty: TensorType) -> Option<Dots> {
    macro_rules! table {
        ($($variant:ident $name:ty),*) => {
            match ty {
                $(TensorType::$variant => Some(dots::<$name>),)*
                _ => None,
            }
        };
    }
    table!(Q4_0 Q4_0, Q4_1 Q4_1, Q5_0 Q5_0, Q5_1 Q5_1, Q8_0 Q8_0, IQ4_NL Iq4Nl, MXFP4 Mxfp4, Q2_K Q2K, Q3_K Q3K, Q4_K Q4K, Q5_K Q5K, Q6_K Q6K, IQ4_XS Iq4Xs, TQ2_0 Tq2,
        NVFP4 Nvfp4, IQ2_XXS Iq2Xxs, IQ2_XS Iq2Xs, IQ2_S Iq2S, IQ3_XXS Iq3Xxs, IQ3_S Iq3S, IQ1_S Iq1S, IQ1_M Iq1M,
        TQ1_0 Coded<TQ1>, Q1_0 Coded<Q1>, Q2_0 Coded<Q2>
    )
}

/// A run of an activation vector. What an activation vector does not have of its last run is zeros.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct ActivationSpan {
    highs: [[u8; 64]; 4],
    lows: [[u8; 64]; 4],
    /// The same in turn: eight bytes of every thirty-two, then the next eight of each.
    highs_in_turn: [[u8; 64]; 4],
    lows_in_turn: [[u8; 64]; 4],
    /// For each sixteen elements: their scale, the sum of their rounded values times the scale, and the sum of their values.
    pub(super) scales: [f32; 16],
    wholes: [f32; 16],
    sums: [f32; 16],
    /// For each block the sum of rounded values, without the scale, and that of values.
    pub(super) ints_of_blocks: [i32; 8],
    pub(super) sums_of_blocks: [f32; 8],
}

impl ActivationSpan {
    /// The high bytes of a block.
    #[inline(always)]
    pub(super) fn block_of_highs(&self, block: usize) -> &[u8; BLOCK] {
        &bytemuck::cast_ref::<[[u8; 64]; 4], [[u8; BLOCK]; 8]>(&self.highs)[block]
    }

    /// The low bytes of a block.
    #[inline(always)]
    pub(super) fn block_of_lows(&self, block: usize) -> &[u8; BLOCK] {
        &bytemuck::cast_ref::<[[u8; 64]; 4], [[u8; BLOCK]; 8]>(&self.lows)[block]
    }
}

const EMPTY: ActivationSpan = ActivationSpan {
    highs: [[0; 64]; 4],
    lows: [[0; 64]; 4],
    highs_in_turn: [[0; 64]; 4],
    lows_in_turn: [[0; 64]; 4],
    scales: [0.0; 16],
    wholes: [0.0; 16],
    sums: [0.0; 16],
    ints_of_blocks: [0; 8],
    sums_of_blocks: [0.0; 8],
};

/// Rounded activations, one after the other.
pub(super) struct SpanActivations {
    simd: Avx512,
    k: usize,
    runs: Vec<ActivationSpan>,
    /// Activations with elements that are no numbers, or hardly.
    unfit: Vec<usize>,
}

impl SpanActivations {
    /// Activations of `k` elements, whole blocks.
    pub(super) fn new(simd: Avx512, k: usize, columns: &[&[f32]]) -> SpanActivations {
        let mut runs = vec![EMPTY; columns.len() * k.div_ceil(RUN)];
        let one = |(column, runs): (&&[f32], &mut [ActivationSpan])| {
            let mut fit = true;
            simd.vectorize(
                #[inline(always)]
                || {
                    for (x, run) in column.chunks(RUN).zip(runs) {
                        for (b, x) in x.chunks_exact(BLOCK).enumerate() {
                            fit &= round(simd, x, run, b);
                        }
                    }
                },
            );
            fit
        };
        let each = k.div_ceil(RUN);
        let fit: Vec<bool> = if columns.len() < SHARED {
            columns.iter().zip(runs.chunks_exact_mut(each)).map(one).collect()
        } else {
            columns.par_iter().zip(runs.par_chunks_exact_mut(each)).with_min_len(SHARED / 4).map(one).collect()
        };
        let unfit = fit.iter().enumerate().filter(|(_, fit)| !**fit).map(|(c, _)| c).collect();
        SpanActivations { simd, k, runs, unfit }
    }

    /// Activations whose products should be made by floats.
    pub(super) fn unfit(&self) -> &[usize] {
        &self.unfit
    }

    /// Rows of codes times all activations: the results of a row lie side by side.
    pub(super) fn dots(&self, rows: Rows<'_>, out: &mut [f32]) {
        let dots = dots_of(rows.ty).expect("every type that becomes codes has a way");
        dots(self.simd, rows, self, out);
    }

    /// The same with rows that are interleaved, but one activation vector's results after the other.
    pub(super) fn interleaved_dots(&self, rows: InterleavedRows<'_>, out: &mut [f32]) {
        rows.dots(self.simd, self, out);
    }

    /// How large N there are.
    pub(super) fn count(&self) -> usize {
        self.runs.len() / self.k.div_ceil(RUN)
    }

    /// The runs of activation vector `c`.
    pub(super) fn column(&self, c: usize) -> &[ActivationSpan] {
        let runs = self.k.div_ceil(RUN);
        &self.runs[c * runs..][..runs]
    }
}

/// Rounds a block of a run; says whether it is fit for that.
#[inline(always)]
fn round(simd: Avx512, x: &[f32], run: &mut ActivationSpan, block: usize) -> bool {
    let parts: [f32x16<Avx512>; 2] = from_fn(|i| f32x16::from_slice(simd, &x[16 * i..][..16]));
    let top = parts[0].abs().max(parts[1].abs()).reduce_max();
    let reach = top.max(TINY);
    let scale = if top == 0.0 { 0.0 } else { reach / TOP };
    let inverse = f32x16::splat(simd, TOP / reach);
    let (mut fit, mut ints) = (top <= HUGE, 0.0);
    for (i, x) in parts.into_iter().enumerate() {
        let at = 2 * block + i;
        let whole: i32x16<Avx512> = (x * inverse).round_ties_even().to_int();
        let high: i32x16<Avx512> = (whole + 64) >> 7;
        let low = whole - (high << 7);
        let (high, low) = (narrow(simd, high).to_array(), narrow(simd, low).to_array());
        run.highs[at / 4][16 * (at % 4)..][..16].copy_from_slice(&high);
        run.lows[at / 4][16 * (at % 4)..][..16].copy_from_slice(&low);
        for t in 0..2 {
            run.highs_in_turn[2 * i + t][8 * block..][..8].copy_from_slice(&high[8 * t..][..8]);
            run.lows_in_turn[2 * i + t][8 * block..][..8].copy_from_slice(&low[8 * t..][..8]);
        }
        let rounded: f32x16<Avx512> = whole.to_float();
        run.scales[at] = scale;
        // Sums of sixteen whole numbers of 15 bits are exact.
        let int = rounded.reduce_sum();
        ints += int;
        run.wholes[at] = int * scale;
        run.sums[at] = x.reduce_sum();
        // Sums of what is no number are none.
        fit &= run.sums[at].is_finite();
    }
    run.ints_of_blocks[block] = ints as i32;
    run.sums_of_blocks[block] = run.sums[2 * block] + run.sums[2 * block + 1];
    fit
}

fearless_simd::kernel!(
    /// The lowest byte of each number.
    #[inline(always)]
    fn narrow(simd: Avx512, x: i32x16<Avx512>) -> u8x16<Avx512> {
        _mm512_cvtepi32_epi8(x.into()).simd_into(simd)
    }
);

/// Which scale each sum of four products has, for each quarter of a run.
const SCALE_OF: [[i32; 16]; 4] = {
    let mut of = [[0; 16]; 4];
    let mut i = 0;
    while i < 64 {
        of[i / 16][i % 16] = i as i32 / 4;
        i += 1;
    }
    of
};

/// See [`SpanActivations::dots`].
#[inline(never)]
fn dots<F: Format>(simd: Avx512, rows: Rows<'_>, columns: &SpanActivations, out: &mut [f32]) {
    let (k, n) = (columns.k, columns.count());
    // Rows are read in whole runs. What follows a row in a dense matrix are other rows: numbers, which meet the zeros of the activation vector.
    // Behind the last row and between rows that lie apart may be anything or nothing, so those are copied.
    let bytes = k.div_ceil(RUN) * F::BYTES;
    let as_they_lie = match rows.stride == rows.row_bytes {
        _ if bytes == rows.row_bytes => out.len() / n,
        true if rows.bytes.len() >= bytes => (rows.bytes.len() - bytes) / rows.stride + 1,
        _ => 0,
    };
    let (first, last) = out.split_at_mut(out.len().min(n * as_they_lie));
    let count = first.len() / n;
    simd.vectorize(
        #[inline(always)]
        || meet_rows::<F>(simd, rows.bytes, rows.stride, columns, first),
    );
    let mut row = vec![0; bytes];
    for (i, out) in last.chunks_exact_mut(n).enumerate() {
        row[..rows.row_bytes].copy_from_slice(rows.row(count + i));
        simd.vectorize(
            #[inline(always)]
            || meet_rows::<F>(simd, &row, 0, columns, out),
        );
    }
}

/// Rows of whole runs, `stride` bytes apart, times all activations.
#[inline(always)]
fn meet_rows<F: Format>(simd: Avx512, bytes: &[u8], stride: usize, columns: &SpanActivations, out: &mut [f32]) {
    let (k, n) = (columns.k, columns.count());
    let row_bytes = k.div_ceil(RUN) * F::BYTES;
    let row = |i: usize| &bytes[i * stride..][..row_bytes];
    if n == 1 {
        // Rows that meet the activation vector together lie far apart. Hardware prefetchers follow several sequential streams for
        // several readers at once; two rows side by side look to them like one who jumps to and fro.
        let (firsts, others) = out.split_at_mut(out.len().div_ceil(2));
        let far = firsts.len();
        for (i, (first, other)) in firsts.iter_mut().zip(others.iter_mut()).enumerate() {
            [[*first], [*other]] = meet::<F, 2, 1>(simd, [row(i), row(far + i)], [columns.column(0)], k);
        }
        if firsts.len() > others.len() {
            [[firsts[far - 1]]] = meet::<F, 1, 1>(simd, [row(far - 1)], [columns.column(0)], k);
        }
        return;
    }
    for (i, out) in out.chunks_exact_mut(n).enumerate() {
        let (fours, last) = out.as_chunks_mut::<4>();
        let first = 4 * fours.len();
        for (c, out) in fours.iter_mut().enumerate() {
            [*out] = meet::<F, 1, 4>(simd, [row(i)], from_fn(|j| columns.column(4 * c + j)), k);
        }
        for (c, out) in last.iter_mut().enumerate() {
            [[*out]] = meet::<F, 1, 1>(simd, [row(i)], [columns.column(first + c)], k);
        }
    }
}

/// Sums of `R` rows and `N` activations.
struct Sums<const R: usize, const N: usize> {
    dots: [[f32x16<Avx512>; N]; R],
    zeros: [[f32x16<Avx512>; N]; R],
    offsets: [[f32x16<Avx512>; N]; R],
}

/// `R` rows times `N` columns. A result's bits do not depend on the rows and columns beside it.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "rows and columns of several arrays go together")]
fn meet<F: Format, const R: usize, const N: usize>(
    simd: Avx512,
    rows: [&[u8]; R],
    columns: [&[ActivationSpan]; N],
    k: usize,
) -> [[f32; N]; R] {
    let nothing = [[f32x16::splat(simd, 0.0); N]; R];
    let mut sums = Sums { dots: nothing, zeros: nothing, offsets: nothing };
    let (whole, rest) = (k / RUN, k % RUN);
    let mut runs: [&[u8]; R] = [&[]; R];
    let mut x = [&EMPTY; N];
    for i in 0..whole {
        for r in 0..R {
            runs[r] = &rows[r][i * F::BYTES..][..F::BYTES];
        }
        for c in 0..N {
            x[c] = &columns[c][i];
        }
        add_run::<F, R, N>(simd, runs, x, 4, &mut sums);
    }
    if rest > 0 {
        for r in 0..R {
            runs[r] = &rows[r][whole * F::BYTES..][..F::BYTES];
        }
        for c in 0..N {
            x[c] = &columns[c][whole];
        }
        add_run::<F, R, N>(simd, runs, x, rest.div_ceil(64), &mut sums);
    }
    let zero = f32x16::splat(simd, -f32::from(F::ZERO));
    let mut results = [[0.0; N]; R];
    for r in 0..R {
        for c in 0..N {
            let mut whole = sums.dots[r][c];
            if F::ZERO > 0 {
                whole = sums.zeros[r][c].mul_add(zero, whole);
            }
            if F::OFFSETS {
                whole += sums.offsets[r][c];
            }
            results[r][c] = whole.reduce_sum();
        }
    }
    results
}

/// Adds the products of this many quarters of a run.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "rows and columns of several arrays go together")]
fn add_run<F: Format, const R: usize, const N: usize>(
    simd: Avx512,
    runs: [&[u8]; R],
    x: [&ActivationSpan; N],
    quarters: usize,
    sums: &mut Sums<R, N>,
) {
    for r in 0..R {
        let (scales, offsets, made) = F::begin(simd, runs[r]);
        let mut factors = [scales; N];
        for c in 0..N {
            factors[c] = scales * f32x16::load_array_ref(simd, &x[c].scales);
            if F::ZERO > 0 {
                sums.zeros[r][c] = scales.mul_add(f32x16::load_array_ref(simd, &x[c].wholes), sums.zeros[r][c]);
            }
            if F::OFFSETS {
                sums.offsets[r][c] = offsets.mul_add(f32x16::load_array_ref(simd, &x[c].sums), sums.offsets[r][c]);
            }
        }
        if quarters == 4
            && let Some(codes) = F::in_turn(simd, runs[r])
        {
            for c in 0..N {
                let (mut highs, mut lows) = (zeros(simd), zeros(simd));
                for t in 0..4 {
                    highs = dot(simd, highs, codes[t], u8x64::load_array_ref(simd, &x[c].highs_in_turn[t]).into());
                    lows = dot(simd, lows, codes[t], u8x64::load_array_ref(simd, &x[c].lows_in_turn[t]).into());
                }
                let fours = sum(simd, by_128(simd, highs), lows);
                sums.dots[r][c] = to_floats(simd, fours).mul_add(factors[c], sums.dots[r][c]);
            }
            continue;
        }
        macro_rules! quarter {
            ($q:literal) => {
                if quarters > $q {
                    let codes = F::codes::<$q>(simd, runs[r], &made);
                    for c in 0..N {
                        let high: __m512i = u8x64::load_array_ref(simd, &x[c].highs[$q]).into();
                        let low: __m512i = u8x64::load_array_ref(simd, &x[c].lows[$q]).into();
                        let fours = dot(simd, by_128(simd, dot(simd, zeros(simd), codes, high)), codes, low);
                        let scales = pick(simd, &SCALE_OF[$q], factors[c]);
                        sums.dots[r][c] = to_floats(simd, fours).mul_add(scales, sums.dots[r][c]);
                    }
                }
            };
        }
        quarter!(0);
        quarter!(1);
        quarter!(2);
        quarter!(3);
    }
}

#[cfg(test)]
mod tests {
    use kiln_gguf::TensorType;

    use super::*;
    use crate::mul_mat_vec::cpu_quants::coder;
    use crate::mul_mat_vec::cpu_quants::tests::blocks;
    use crate::simd::level;

    /// Rows of bytes that are no pattern times activations, against plain sums.
    fn judge(simd: Avx512, ty: TensorType, [k, m, n]: [usize; 3]) {
        let (bytes, weights) = blocks(ty, m * k, 5);
        let columns: Vec<f32> = (0..n * k).map(|i| ((i * 7919 % 10007) as f32 / 5003.5 - 1.0).powi(3)).collect();
        let row_bytes = ty.row_bytes(k).unwrap();
        let mut got = vec![0.0; m * n];
        let views: Vec<&[f32]> = columns.chunks_exact(k).collect();
        SpanActivations::new(simd, k, &views).dots(Rows { ty, bytes: &bytes, stride: row_bytes, row_bytes }, &mut got);
        for (i, got) in got.iter().enumerate() {
            let terms = weights[i / n * k..][..k].iter().zip(&columns[i % n * k..]);
            let terms: Vec<f64> = terms.map(|(a, b)| f64::from(*a) * f64::from(*b)).collect();
            let (want, size) = (terms.iter().sum::<f64>(), terms.iter().map(|x| x * x).sum::<f64>().sqrt());
            assert!((f64::from(*got) - want).abs() < 1e-3 * size, "{ty} {k} {m} {n}: {got}, not {want}, at {i}");
        }
    }

    #[test]
    fn runs_of_every_format_mean_what_the_format_means() {
        let Some(simd) = level().as_avx512() else { return };
        let mut tried = 0;
        for &ty in TensorType::ALL {
            if coder(ty).is_none() {
                continue;
            }
            for shape in [[512, 5, 1], [256, 4, 6]] {
                judge(simd, ty, shape);
            }
            // Runs that are not full.
            for k in [32, 64, 128, 192, 224, 576, 1120] {
                if k % ty.block_len() == 0 {
                    judge(simd, ty, [k, 3, 1]);
                    judge(simd, ty, [k, 2, 2]);
                }
            }
            tried += 1;
        }
        assert_eq!(tried, 25);
    }

    #[test]
    fn rows_that_lie_apart_are_read_by_themselves() {
        let Some(simd) = level().as_avx512() else { return };
        let (k, ty) = (96, TensorType::Q4_0);
        let (row, weights) = blocks(ty, k, 9);
        // Between the rows lie half floats that are no numbers.
        let stride = 200;
        let mut bytes = vec![0xff; 2 * stride];
        (0..2).for_each(|i| bytes[i * stride..][..row.len()].copy_from_slice(&row));
        let columns: Vec<f32> = (0..k).map(|i| i as f32 - 40.0).collect();
        let mut got = [0.0; 2];
        SpanActivations::new(simd, k, &[&columns])
            .dots(Rows { ty, bytes: &bytes, stride, row_bytes: row.len() }, &mut got);
        let want: f32 = weights.iter().zip(&columns).map(|(a, b)| a * b).sum();
        assert!(got.iter().all(|got| (got - want).abs() < 1e-3 * want.abs()), "{got:?}, not {want}");
    }
}
