//! Products of codes and activations on the CPU. Activations are rounded to 15 bits, with a scale for each thirty-two elements, so
//! that pairs of products are one instruction on vectors twice as long as floats have; that costs 1e-8 of a result's
//! square at most, and far less as a rule.

use std::ops::Range;

use fearless_simd::prelude::*;
use fearless_simd::{Simd, dispatch, f32x16, i16x32, i32x16};

use rayon::prelude::*;

#[cfg(arm_dotprod)]
use super::cpu_bytes::{self, ByteColumns};
use super::cpu_interleaved::InterleavedRows;
#[cfg(target_arch = "aarch64")]
use super::cpu_neon;
use super::cpu_quants::{BLOCK, Coder, Piece};
use super::cpu_rows::Rows;
#[cfg(target_arch = "x86_64")]
use super::cpu_spans::SpanActivations;
use crate::host::Spare;
use crate::simd::{Layout, level, load, multiply, transpose};

/// The largest magnitude of a rounded element: thirty-two products with codes fit 32 bits, and 128 times a byte with a sign
/// and another such byte reach it.
pub(super) const TOP: f32 = 16319.0;
/// Magnitudes of elements whose products with any code and scale stay far from infinity.
pub(super) const HUGE: f32 = 1e30;
/// Blocks are not scaled further up than this magnitude would be.
pub(super) const TINY: f32 = 1e-30;
/// Elements of a row that become codes at once for tiles: they stay in the nearest caches, with as many of a panel.
pub(super) const DEPTH: usize = 256;
/// The same for a small N, of one or more rows.
pub(super) const LONG: usize = 4096;

/// Activations of k elements that are rounded, one after the other.
#[derive(Default)]
pub(super) struct Ints {
    pub k: usize,
    pub codes: Vec<i16>,
    /// For each [`BLOCK`].
    pub scales: Vec<f32>,
    /// The sum of each sixteen elements, not rounded.
    pub sums: Vec<f32>,
    /// Activations with elements that are no numbers, or hardly.
    pub unfit: Vec<usize>,
}

/// A few rounded activations, in the form that the machine multiplies fastest.
pub(super) enum Few {
    /// As words of 16 bits.
    Words(Ints),
    /// As bytes.
    #[cfg(target_arch = "x86_64")]
    Runs(SpanActivations),
    /// As bytes, on ARM.
    #[cfg(arm_dotprod)]
    Bytes(ByteColumns),
}

impl Few {
    /// Activations of `k` elements, whole blocks.
    pub(super) fn new(k: usize, columns: &[&[f32]]) -> Few {
        #[cfg(target_arch = "x86_64")]
        if let Some(avx512) = level().as_avx512() {
            return Few::Runs(SpanActivations::new(avx512, k, columns));
        }
        #[cfg(arm_dotprod)]
        if cpu_bytes::has_dots() {
            return Few::Bytes(ByteColumns::new(k, &columns.concat()));
        }
        Few::Words(Ints::new(k, columns.iter().copied()))
    }

    /// Activations whose products should be made by floats.
    pub(super) fn unfit(&self) -> &[usize] {
        match self {
            Few::Words(ints) => &ints.unfit,
            #[cfg(target_arch = "x86_64")]
            Few::Runs(runs) => runs.unfit(),
            #[cfg(arm_dotprod)]
            Few::Bytes(bytes) => bytes.unfit(),
        }
    }

    /// Rows that are interleaved times all activations, one activation vector's results after the other. Rows are interleaved only where activations
    /// have the form for that.
    pub(super) fn interleaved_dots(&self, rows: InterleavedRows<'_>, out: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if let Few::Runs(runs) = self {
            return runs.interleaved_dots(rows, out);
        }
        let _ = (rows, out);
        unreachable!("rows are interleaved where columns have the form for that");
    }

    /// Rows times all activations: the results of a row lie side by side.
    pub(super) fn dots(&self, coder: Coder, rows: Rows<'_>, out: &mut [f32]) {
        match self {
            Few::Words(ints) => ints.dots(coder, rows, out),
            #[cfg(target_arch = "x86_64")]
            Few::Runs(runs) => runs.dots(rows, out),
            #[cfg(arm_dotprod)]
            Few::Bytes(bytes) => bytes.dots(coder, rows, out),
        }
    }
}

impl Ints {
    /// Activations of `k` elements, whole blocks.
    pub(super) fn new<'a>(k: usize, columns: impl ExactSizeIterator<Item = &'a [f32]>) -> Ints {
        let (n, blocks) = (columns.len(), columns.len() * k / BLOCK);
        let (codes, scales, sums) = (vec![0; n * k], vec![0.0; blocks], vec![0.0; 2 * blocks]);
        let mut ints = Ints { k, codes, scales, sums, ..Ints::default() };
        for (c, column) in columns.enumerate() {
            let blocks = c * k / BLOCK..(c + 1) * k / BLOCK;
            let sums = &mut ints.sums[2 * blocks.start..2 * blocks.end];
            let fit = dispatch!(level(), simd => {
                round(simd, column, &mut ints.codes[c * k..][..k], &mut ints.scales[blocks], sums)
            });
            if !fit {
                ints.unfit.push(c);
            }
        }
        ints
    }

    /// Rows times all activations: the results of a row lie side by side.
    fn dots(&self, coder: Coder, rows: Rows<'_>, out: &mut [f32]) {
        let (k, n) = (self.k, self.codes.len() / self.k);
        let (mut codes, mut scales, mut offsets) = ([0; LONG], [0.0; LONG / BLOCK], [0.0; 2 * LONG / BLOCK]);
        // Short rows that lie side by side become codes together.
        let most = if rows.stride == rows.row_bytes { (LONG / k).max(1) } else { 1 };
        let mut sums = vec![[0.0; 16]; most * n];
        for (chunk, out) in out.chunks_mut(most * n).enumerate() {
            let count = out.len() / n;
            sums.fill([0.0; 16]);
            for start in (0..k).step_by(LONG) {
                let depth = LONG.min(k - start);
                let codes = &mut codes[..count * depth];
                let (scales, offsets) = (&mut scales[..codes.len() / BLOCK], &mut offsets[..2 * codes.len() / BLOCK]);
                let bytes = rows.pieces(chunk * most, count, start, depth);
                (coder.fill)(bytes, Piece { codes, scales, offsets });
                dispatch!(level(), simd => {
                    for (i, sums) in sums.iter_mut().take(count * n).enumerate() {
                        let (from, at) = (i / n * depth, i % n * k + start);
                        let (a, x) = (&codes[from..][..depth], &self.codes[at..][..depth]);
                        let scales = &scales[from / BLOCK..][..depth / BLOCK];
                        add_dots(simd, a, x, scales, &self.scales[at / BLOCK..][..depth / BLOCK], sums);
                        if coder.offsets > 0 {
                            let offsets = &offsets[2 * from / BLOCK..][..2 * depth / BLOCK];
                            add_products(simd, offsets, &self.sums[2 * at / BLOCK..][..2 * depth / BLOCK], sums);
                        }
                    }
                });
            }
            dispatch!(level(), simd => {
                out.iter_mut().zip(&sums).for_each(|(out, sums)| *out = load(simd, sums).reduce_sum());
            });
        }
    }
}

/// Rounds an activation vector; says whether it is fit for that.
#[inline(always)]
fn round<S: Simd>(simd: S, column: &[f32], codes: &mut [i16], scales: &mut [f32], sums: &mut [f32]) -> bool {
    let mut fit = true;
    let blocks = column.chunks_exact(BLOCK).zip(codes.chunks_exact_mut(BLOCK));
    for (((x, codes), scale), sums) in blocks.zip(scales).zip(sums.chunks_exact_mut(2)) {
        let (a, b) = (load(simd, x), load(simd, &x[16..]));
        let top = a.abs().max(b.abs()).reduce_max();
        sums.copy_from_slice(&[a.reduce_sum(), b.reduce_sum()]);
        // Sums of what is no number are none.
        fit &= top <= HUGE && sums[0].is_finite() && sums[1].is_finite();
        let reach = top.max(TINY);
        *scale = if top == 0.0 { 0.0 } else { reach / TOP };
        let inverse = f32x16::splat(simd, TOP / reach);
        let whole = |x: f32x16<S>| (x * inverse).round_ties_even().to_int::<i32x16<S>>();
        let rounded: i16x32<S> = whole(a).saturating_narrow(whole(b));
        rounded.store_slice(codes);
    }
    fit
}

/// Adds the products of a piece to sixteen partial sums.
#[inline(always)]
fn add_dots<S: Simd>(simd: S, a: &[i16], x: &[i16], scales: &[f32], x_scales: &[f32], sums: &mut [f32; 16]) {
    #[cfg(target_arch = "aarch64")]
    if let Some(neon) = simd.level().as_neon() {
        return cpu_neon::add_dots(neon, a, x, scales, x_scales, sums);
    }
    // Two sums, so that one need not wait for the other.
    let (mut even, mut odd) = (f32x16::load_array_ref(simd, sums), f32x16::splat(simd, 0.0));
    let (a, x) = (a.chunks_exact(2 * BLOCK), x.chunks_exact(2 * BLOCK));
    let (last_a, last_x) = (a.remainder(), x.remainder());
    let factors = scales.as_chunks::<2>().0.iter().zip(x_scales.as_chunks::<2>().0);
    for ((a, x), (scales, x_scales)) in a.zip(x).zip(factors) {
        even = add_product(simd, &a[..BLOCK], &x[..BLOCK], [scales[0], x_scales[0]], even);
        odd = add_product(simd, &a[BLOCK..], &x[BLOCK..], [scales[1], x_scales[1]], odd);
    }
    if let (false, Some(scale), Some(x_scale)) = (last_a.is_empty(), scales.last(), x_scales.last()) {
        even = add_product(simd, last_a, last_x, [*scale, *x_scale], even);
    }
    (even + odd).store_array(sums);
}

/// Adds the products of a block, times two factors.
#[inline(always)]
fn add_product<S: Simd>(simd: S, a: &[i16], x: &[i16], factors: [f32; 2], sum: f32x16<S>) -> f32x16<S> {
    let pairs = i16x32::from_slice(simd, a).pairwise_dot_product(i16x32::from_slice(simd, x));
    let pairs: f32x16<S> = pairs.to_float();
    (pairs * f32x16::splat(simd, factors[0])).mul_add(f32x16::splat(simd, factors[1]), sum)
}

/// Adds products of floats, an even number of them, to sixteen partial sums.
#[inline(always)]
pub(super) fn add_products<S: Simd>(simd: S, a: &[f32], x: &[f32], sums: &mut [f32; 16]) {
    let mut sum = f32x16::load_array_ref(simd, sums);
    let (whole, rest) = a.as_chunks::<16>();
    let (x_whole, x_rest) = x.as_chunks::<16>();
    for (a, x) in whole.iter().zip(x_whole) {
        sum = f32x16::load_array_ref(simd, a).mul_add(f32x16::load_array_ref(simd, x), sum);
    }
    sum.store_array(sums);
    sums.iter_mut().zip(rest.iter().zip(x_rest)).for_each(|(sum, (a, x))| *sum += a * x);
}

/// Rounded activations side by side: panels of [`width`] activations, of which the last is filled up.
pub(super) struct Panels {
    pub k: usize,
    width: usize,
    /// Pairs of elements: of all activations of a panel the first pair, then the second. Pairs are held as the floats that have
    /// their bits. Where bytes are multiplied, as those want it.
    pub codes: Vec<f32>,
    pub scales: Vec<f32>,
    /// The sums of each sixteen, and of each thirty-two elements.
    pub sums: [Vec<f32>; 2],
    /// Activations that should be multiplied as floats: panel, and activation vector in it.
    unfit: Vec<[usize; 2]>,
}

/// Activations of a panel: two vectors.
pub(super) fn width() -> usize {
    fn of<S: Simd>(_: S) -> usize {
        2 * S::f32s::LEN
    }
    dispatch!(level(), simd => of(simd))
}

impl Panels {
    /// Activations of `k` elements, whole blocks: those of each panel. What panels are filled up with is never looked at.
    pub(super) fn new(k: usize, columns: &[Vec<&[f32]>], spare: &mut Spare) -> Panels {
        let width = width();
        let mut room = |each: usize| spare.take(columns.len() * width * each);
        let blocks = k / BLOCK;
        let (mut codes, mut scales) = (room(k / 2), room(blocks));
        let mut sums = [room(2 * blocks), room(blocks)];
        let [halves, wholes] = &mut sums;
        let parts = codes.par_chunks_mut(width * k / 2).zip(scales.par_chunks_mut(width * blocks));
        let parts = parts.zip(halves.par_chunks_mut(2 * width * blocks)).zip(wholes.par_chunks_mut(width * blocks));
        let pack = |(p, ((((codes, scales), halves), wholes), columns)): (usize, (_, &Vec<&[f32]>))| {
            let ints = Ints::new(k, columns.iter().copied());
            put_codes(&ints.codes, k, width, codes);
            put(&ints.scales, blocks, width, scales);
            put(&ints.sums, 2 * blocks, width, halves);
            let whole: Vec<f32> = ints.sums.chunks_exact(2).map(|pair| pair[0] + pair[1]).collect();
            put(&whole, blocks, width, wholes);
            ints.unfit.into_iter().map(move |c| [p, c]).collect::<Vec<_>>()
        };
        let unfit = parts.zip(columns.par_iter()).enumerate().map(pack).flatten_iter().collect();
        Panels { k, width, codes, scales, sums, unfit }
    }

    /// Gives its memory back.
    pub(super) fn end(self, spare: &mut Spare) {
        let [halves, wholes] = self.sums;
        [self.codes, self.scales, halves, wholes].into_iter().for_each(|vector| spare.give(vector));
    }

    /// See [`Few::unfit`]: activations of some panels, counted from the first of these.
    pub(super) fn unfit(&self, panels: Range<usize>) -> impl Iterator<Item = usize> {
        let first = panels.start;
        let own = self.unfit.iter().filter(move |[p, _]| panels.contains(p));
        own.map(move |[p, c]| (p - first) * self.width + c)
    }

    /// Rows times `n` activations that lie in these panels: a piece of each row at a time becomes codes, and meets the same piece of every
    /// panel.
    pub(super) fn tiles(
        &self,
        panels: Range<usize>,
        n: usize,
        coder: Coder,
        rows: Rows<'_>,
        out: &mut [f32],
        stride: usize,
    ) {
        #[cfg(arm_dotprod)]
        if cpu_bytes::has_dots() {
            return cpu_bytes::tiles(self, panels, n, coder, rows, (out, stride));
        }
        let (k, width, n_rows) = (self.k, self.width, out.len() / stride);
        let mut codes = vec![0i32; n_rows * DEPTH / 2];
        let (mut scales, mut offsets) = (vec![0.0f32; n_rows * 8], vec![0.0f32; n_rows * 16]);
        for start in (0..k).step_by(DEPTH) {
            let depth = DEPTH.min(k - start);
            let parts = codes.chunks_exact_mut(DEPTH / 2).zip(scales.chunks_exact_mut(8));
            for (i, ((codes, scales), offsets)) in parts.zip(offsets.chunks_exact_mut(16)).enumerate() {
                let codes = &mut bytemuck::cast_slice_mut(codes)[..depth];
                let (scales, offsets) = (&mut scales[..depth / BLOCK], &mut offsets[..2 * depth / BLOCK]);
                (coder.fill)(rows.piece(i, start, depth), Piece { codes, scales, offsets });
            }
            if coder.offsets == 1 {
                // Both of a pair are the same.
                for offsets in offsets.chunks_exact_mut(16) {
                    (0..8).for_each(|b| offsets[b] = offsets[2 * b]);
                }
            }
            dispatch!(level(), simd => {
                let blocks = k / BLOCK;
                for (i, p) in panels.clone().enumerate() {
                    let out = &mut out[i * width..];
                    let x = Panel {
                        codes: &bytemuck::cast_slice(&self.codes[p * width * k / 2..])[start * width..],
                        scales: &self.scales[(p * blocks + start / BLOCK) * width..],
                        width,
                        used: n - i * width,
                    };
                    let depth = depth / BLOCK;
                    meet(simd, n_rows, Weights { codes: &codes, scales: &scales, depth }, x, (out, stride), start > 0);
                    if coder.offsets > 0 {
                        let (each, sums) = (coder.offsets, &self.sums[2 - coder.offsets]);
                        let layout = Layout { depth: each * depth, a_stride: 16, b_stride: width, c_stride: stride, add: true };
                        let sums = &sums[(p * blocks + start / BLOCK) * each * width..];
                        let cols = if x.is_half(simd) { width / 2 } else { width };
                        multiply(simd, [n_rows, cols], layout, &offsets, sums, out);
                    }
                }
            });
        }
    }
}

/// Activations of `k` codes become activations of a panel.
fn put_codes(columns: &[i16], k: usize, width: usize, out: &mut [f32]) {
    #[cfg(arm_dotprod)]
    if cpu_bytes::has_dots() {
        put(&cpu_bytes::pieces(columns), k / 2, width, out);
        return cpu_bytes::arrange(out);
    }
    put(bytemuck::cast_slice(columns), k / 2, width, out);
}

/// Activations of `k` floats become activations of a panel.
fn put(columns: &[f32], k: usize, width: usize, out: &mut [f32]) {
    let columns: Vec<&[f32]> = columns.chunks_exact(k).collect();
    dispatch!(level(), simd => transpose(simd, &columns, width, out));
}

/// Pieces of rows: pairs of codes, [`DEPTH`] / 2 apart, and scales, 8 apart.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    pub codes: &'a [i32],
    pub scales: &'a [f32],
    /// Blocks of a piece.
    pub depth: usize,
}

/// The same piece of a panel.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    pub codes: &'a [i16],
    pub scales: &'a [f32],
    pub width: usize,
    /// Activations from the panel's first one on that there are, at least one; the panel may be full.
    pub used: usize,
}

impl Panel<'_> {
    /// Whether the first of the two vectors has all there is.
    #[inline(always)]
    fn is_half<S: Simd>(&self, _: S) -> bool {
        self.used <= S::f32s::LEN
    }
}

/// Rows times a panel; results are added to those before if `add`.
#[inline(always)]
fn meet<S: Simd>(simd: S, rows: usize, a: Weights<'_>, x: Panel<'_>, (out, stride): (&mut [f32], usize), add: bool) {
    #[cfg(target_arch = "aarch64")]
    if let Some(neon) = simd.level().as_neon() {
        return cpu_neon::meet(neon, rows, a, x, (out, stride), add);
    }
    let lanes = S::f32s::LEN;
    let mut row = 0;
    while row < rows {
        let a = Weights { codes: &a.codes[row * DEPTH / 2..], scales: &a.scales[row * 8..], ..a };
        let out = &mut out[row * stride..];
        // Machines with vectors of 16 floats have 32 registers for them, others may have 16.
        let done = match rows - row {
            12.. if lanes == 16 && x.is_half(simd) => tile::<S, 12, 1>(simd, a, x, 0, (out, stride), add),
            6.. if x.is_half(simd) => tile::<S, 6, 1>(simd, a, x, 0, (out, stride), add),
            6.. if lanes == 16 => tile::<S, 6, 2>(simd, a, x, 0, (out, stride), add),
            6.. => {
                tile::<S, 6, 1>(simd, a, x, 0, (out, stride), add);
                tile::<S, 6, 1>(simd, a, x, lanes, (out, stride), add)
            }
            2.. => tile::<S, 2, 2>(simd, a, x, 0, (out, stride), add),
            _ => tile::<S, 1, 2>(simd, a, x, 0, (out, stride), add),
        };
        row += done;
    }
}

/// `ROWS` rows times `WIDE` vectors of activations from `first` on; gives the number of rows.
#[inline(always)]
fn tile<S: Simd, const ROWS: usize, const WIDE: usize>(
    simd: S,
    a: Weights<'_>,
    x: Panel<'_>,
    first: usize,
    (out, stride): (&mut [f32], usize),
    add: bool,
) -> usize {
    let lanes = S::f32s::LEN;
    let at = |r: usize, w: usize| r * stride + first + w * lanes;
    let mut sums = [[S::f32s::splat(simd, 0.0); WIDE]; ROWS];
    if add {
        for (r, sums) in sums.iter_mut().enumerate() {
            for (w, sum) in sums.iter_mut().enumerate() {
                *sum = S::f32s::from_slice(simd, &out[at(r, w)..][..lanes]);
            }
        }
    }
    let rows: [&[i32]; ROWS] = std::array::from_fn(|r| &a.codes[r * DEPTH / 2..][..a.depth * BLOCK / 2]);
    for block in 0..a.depth {
        let mut whole = [[S::i32s::splat(simd, 0); WIDE]; ROWS];
        for pair in 0..BLOCK / 2 {
            let pair = block * BLOCK / 2 + pair;
            let x = &x.codes[2 * (pair * x.width + first)..][..2 * WIDE * lanes];
            let mut vectors = [S::i16s::splat(simd, 0); WIDE];
            for (w, vector) in vectors.iter_mut().enumerate() {
                *vector = S::i16s::from_slice(simd, &x[2 * w * lanes..][..2 * lanes]);
            }
            for r in 0..ROWS {
                let a: S::i16s = S::i32s::splat(simd, rows[r][pair]).bitcast();
                for w in 0..WIDE {
                    whole[r][w] += a.pairwise_dot_product(vectors[w]);
                }
            }
        }
        let x_scales = &x.scales[block * x.width + first..][..WIDE * lanes];
        for r in 0..ROWS {
            let scale = S::f32s::splat(simd, a.scales[r * 8 + block]);
            for w in 0..WIDE {
                let x_scale = S::f32s::from_slice(simd, &x_scales[w * lanes..][..lanes]);
                let product = S::f32s::float_from(whole[r][w]) * x_scale;
                sums[r][w] = product.mul_add(scale, sums[r][w]);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (w, sum) in sums.iter().enumerate() {
            sum.store_slice(&mut out[at(r, w)..][..lanes]);
        }
    }
    ROWS
}

#[cfg(test)]
mod tests {
    use kiln_gguf::{TensorType, quant};

    use super::*;
    use crate::mul_mat_vec::cpu_quants::coder;

    /// Numbers that are no pattern, from -1 to 1.
    fn noise(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| (((i + seed * 977) * 7919 % 10007) as f32 / 5003.5 - 1.0).powi(3)).collect()
    }

    /// Products of a format by both ways of integers against plain sums.
    fn judge(ty: TensorType, k: usize, m: usize, n: usize) {
        let values = noise(m * k, 3);
        let mut bytes = vec![0; ty.row_bytes(k).unwrap() * m];
        quant::quantise(ty, &values, k, None, &mut bytes).unwrap();
        let mut weights = vec![0.0; m * k];
        quant::dequantise(ty, &bytes, &mut weights).unwrap();
        let columns = noise(n * k, 8);
        let row_bytes = ty.row_bytes(k).unwrap();
        let rows = Rows { ty, bytes: &bytes, stride: row_bytes, row_bytes };
        let product = |i: usize| {
            let (row, column) = (&weights[i / n * k..][..k], &columns[i % n * k..][..k]);
            row.iter().zip(column).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
        };
        let want: Vec<f64> = (0..m * n).map(product).collect();
        let norm: f64 = want.iter().map(|x| x * x).sum();
        let (mut words, mut either) = (vec![0.0; m * n], vec![0.0; m * n]);
        Ints::new(k, columns.chunks_exact(k)).dots(coder(ty).unwrap(), rows, &mut words);
        Few::new(k, &columns.chunks_exact(k).collect::<Vec<_>>()).dots(coder(ty).unwrap(), rows, &mut either);
        for (way, got) in [("words", words), ("the way of this machine", either)] {
            let error: f64 = got.iter().zip(&want).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
            assert!(error < 1e-7 * norm, "{ty} {k} {m} {n} by {way}: {:e}", error / norm);
        }
    }

    #[test]
    fn integers_multiply_every_format_that_can_be_made_quickly() {
        for &ty in TensorType::ALL {
            if coder(ty).is_some() && !quant::searches_a_grid(ty) {
                judge(ty, 512, 5, 3);
            }
        }
    }

    #[test]
    fn rows_of_any_length_are_whole() {
        // Several rows at once, one at a time, pieces of a row; runs that are not full.
        for (k, m, n) in [(32, 300, 1), (96, 7, 2), (576, 20, 1), (4096, 3, 1), (4128, 2, 5), (9024, 3, 2)] {
            judge(TensorType::Q4_0, k, m, n);
            judge(TensorType::Q5_1, k, m, n);
        }
    }
}
