//! Matrix products at the speed of the CPU. Weights in blocks become small integers and meet activations of 15 bits
//! (`cpu_ints.rs`); plain ones are multiplied as floats. A small N meet each row while it lies in the nearest cache; for
//! many, a block of rows is decoded once and multiplied tile by tile. `mul_mm` comes here too.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use fearless_simd::prelude::*;
use fearless_simd::{Simd, dispatch};
use kiln_gguf::TensorType;
use rayon::prelude::*;

use super::cpu_interleaved::{InterleavedRows, TiledActivations, has_tiles};
use super::cpu_ints::{Few, Panels, width};
use super::cpu_quants::{Coder, coder};
use super::cpu_rows::{Rows, decode, is_float_for_few};
use super::{Call, FusedProduct};
use crate::glu;
use crate::host::{HostMemory, Spare};
use crate::mul_mat::Product;
use crate::rms_norm::norm_row;
use crate::simd::{Layout, level, multiply, transpose};
use crate::tensor::Tensor;

/// Activations up to which rows are decoded again for every four of them.
const FEW: usize = 8;
/// Elements of a row that are made floats at once: they stay in the nearest caches.
const DEPTH: usize = 256;
/// Rows that are made floats at once: four tiles of the widest machine.
const BLOCK_ROWS: usize = 48;
/// Rows that may be interleaved: tasks have whole ones.
const INTERLEAVED: usize = 16;
/// Products a task computes at least about.
const TASK_PRODUCTS: usize = 1 << 15;

/// Activations that meet the same matrix: all of a batch, or those of an expert.
struct Group<'a> {
    /// The batch of the weights.
    batch: [usize; 2],
    /// Which expert's bias is added.
    expert: usize,
    /// Which rows of the result the activations make.
    to: Vec<usize>,
    /// The activations.
    columns: Vec<&'a [f32]>,
    /// The activations one after the other, where they are needed so.
    flat: Cow<'a, [f32]>,
    /// Whether they are this many that they lie side by side: panels of some activations, each with an element of all of them in
    /// a row.
    many: bool,
    /// Panels for weights that stay floats, where there are such.
    packed: Vec<f32>,
    /// For weights that become integers, where there are such.
    rounded: Rounded,
}

/// Activations for weights that become integers.
enum Rounded {
    No,
    /// The experts of a token have the same activation vector, which is rounded once.
    Few(Arc<Few>),
    /// Some of the call's panels, the first sixteen activations among those for tiles, and the activations as interleaved rows want them.
    Many {
        panels: Range<usize>,
        tiles: usize,
        interleaved: Option<Few>,
    },
}

impl<'a> Group<'a> {
    fn new(batch: [usize; 2], expert: usize, to: Vec<usize>, columns: Vec<&'a [f32]>) -> Group<'a> {
        let (packed, rounded) = (Vec::new(), Rounded::No);
        Group { batch, expert, to, columns, flat: Cow::Borrowed(&[]), many: false, packed, rounded }
    }

    /// Brings activations of `k` elements into the form that each of the types needs. Panels of integers are made for all groups together.
    fn prepare(&mut self, types: &[TensorType], k: usize) {
        let coder = |ty: &TensorType| coder_of(*ty, self.many);
        let floats = types.iter().any(|ty| coder(ty).is_none());
        if self.flat.is_empty() && (floats || !self.many) {
            self.flat = match self.columns[..] {
                [one] => Cow::Borrowed(one),
                _ => Cow::Owned(self.columns.concat()),
            };
        }
        if self.many && floats {
            self.packed = dispatch!(level(), simd => packed(simd, k, &self.flat));
        }
        if !self.many && matches!(self.rounded, Rounded::No) && types.iter().any(|ty| coder(ty).is_some()) {
            self.rounded = Rounded::Few(Arc::new(Few::new(k, &self.columns)));
        }
    }
}

/// The groups of a call, and the activations of those that have many.
struct Grouped<'a> {
    groups: Vec<Group<'a>>,
    many: Many,
}

/// Many rounded activations, as far as there are matrices that want them so.
#[derive(Default)]
struct Many {
    panels: Option<Panels>,
    /// For rows that are interleaved.
    tiles: Option<TiledActivations>,
}

/// What makes codes of a type's blocks for large N or for a few; `None` where rows become floats.
fn coder_of(ty: TensorType, many: bool) -> Option<Coder> {
    coder(ty).filter(|_| many || !is_float_for_few(ty))
}

/// Where the results of a matrix and a group lie among those of a call.
struct Place {
    values: Range<usize>,
    /// Rows of a block; the last may have fewer.
    rows: usize,
    /// Activations.
    n: usize,
}

impl Place {
    fn among(self, values: &[f32]) -> Results<'_> {
        Results { values: &values[self.values], rows: self.rows, n: self.n }
    }
}

/// One matrix times one group, before anything follows: blocks of some rows of the matrix, each with the results of one
/// activation vector after the other.
struct Results<'a> {
    values: &'a [f32],
    rows: usize,
    n: usize,
}

impl Results<'_> {
    /// What the rows of the matrix give with activation vector `c`, in runs.
    fn column(&self, c: usize) -> impl Iterator<Item = &[f32]> {
        self.values.chunks(self.rows * self.n).map(move |block| {
            let rows = block.len() / self.n;
            &block[c * rows..][..rows]
        })
    }
}

/// Computes every result of the call.
pub(crate) fn compute(call: &Call, memory: &mut HostMemory) {
    if call.product.d.is_empty() {
        return;
    }
    let mut spare = std::mem::take(&mut memory.spare);
    let results = results(call, memory, &mut spare);
    for (matrix, result) in call.matrices().iter().zip(results) {
        memory.write_floats(&matrix.d, &result);
        spare.give(result);
    }
    memory.spare = spare;
}

/// What every matrix of the call gives.
fn results(call: &Call, memory: &HostMemory, spare: &mut Spare) -> Vec<Vec<f32>> {
    // Where results of experts are summed, each has a place among the results that are not.
    let apart = call.apart();
    let columns = normed(call, memory);
    let Grouped { groups, many } = groups(apart.as_ref().unwrap_or(call), &columns, memory, spare);
    let matrices = call.matrices();
    // All products of the call are one list of tasks, so that threads meet once.
    let mut jobs: Vec<(&Tensor, &Group<'_>)> = Vec::new();
    for matrix in &matrices {
        jobs.extend(groups.iter().map(|group| (&matrix.a, group)));
    }
    if let Some(gate) = &call.gate {
        jobs.extend(groups.iter().map(|group| (&gate.up, group)));
    }
    let (values, places) = products(&jobs, &many, memory, spare);
    let all: Vec<Results<'_>> = places.into_iter().map(|place| place.among(&values)).collect();
    let (firsts, ups) = all.split_at(groups.len() * matrices.len());
    let mut finished = Vec::new();
    for (matrix, products) in matrices.iter().zip(firsts.chunks(groups.len())) {
        let mut result = spare.take(matrix.d.len());
        finish(call, matrix, &groups, [products, ups], memory, &mut result);
        finished.push(result);
    }
    spare.give(values);
    if let Some(panels) = many.panels {
        panels.end(spare);
    }
    if let Some(tiles) = many.tiles {
        tiles.end(spare);
    }
    finished
}

/// The activations as floats, normed where the call says so.
fn normed<'a>(call: &Call, memory: &'a HostMemory) -> Cow<'a, [f32]> {
    let mut columns = memory.floats(&call.product.b);
    if let Some(norm) = call.norm {
        let weight = norm.weight.map(|t| memory.floats(&t));
        let one = |column: &mut [f32]| norm_row(column, weight.as_deref(), norm.eps);
        let k = call.product.b.shape[0];
        let columns = columns.to_mut();
        if columns.len() / k > FEW {
            columns.par_chunks_exact_mut(k).for_each(one);
        } else {
            columns.chunks_exact_mut(k).for_each(one);
        }
    }
    columns
}

/// The activations of a call by the matrix that they meet.
fn groups<'a>(call: &Call, columns: &'a [f32], memory: &HostMemory, spare: &mut Spare) -> Grouped<'a> {
    let Product { a, b, d } = call.product;
    let (k, n) = (a.shape[0], d.shape[1]);
    let mut groups: Vec<Group<'a>> = match call.experts {
        None => (0..b.shape[2] * b.shape[3])
            .map(|batch| {
                let a_batch = call.product.a_batch(batch % b.shape[2], batch / b.shape[2]);
                let columns = &columns[batch * n * k..(batch + 1) * n * k];
                let to = (batch * n..(batch + 1) * n).collect();
                let group = Group::new(a_batch, 0, to, columns.chunks_exact(k).collect());
                Group { flat: Cow::Borrowed(columns), ..group }
            })
            .collect(),
        Some(experts) => {
            let ids = memory.read(&experts.ids);
            let mut of_expert = vec![Vec::new(); a.shape[2]];
            ids.iter().enumerate().for_each(|(at, id)| of_expert[*id as usize].push(at));
            let used = of_expert.into_iter().enumerate().filter(|(_, to)| !to.is_empty());
            used.map(|(expert, to)| {
                let column = |at: &usize| (at / n) * b.shape[1] + at % n % b.shape[1];
                let columns = to.iter().map(|at| &columns[column(at) * k..][..k]).collect();
                Group::new([expert, 0], expert, to, columns)
            })
            .collect()
        }
    };
    let gate = call.gate.iter().map(|gate| gate.up);
    let matrices: Vec<Tensor> = call.matrices().iter().map(|matrix| matrix.a).chain(gate).collect();
    let types: Vec<TensorType> = matrices.iter().map(|a| a.ty).collect();
    // Tiles add up in another order than activations that are multiplied one by one.
    groups.iter_mut().for_each(|group| group.many = group.to.len() > FEW && !call.batch_invariant);
    if columns.len() == k && groups.len() > 1 && types.iter().any(|ty| coder_of(*ty, false).is_some()) {
        // All experts have the one activation vector there is.
        let few = Arc::new(Few::new(k, &[columns]));
        let once = groups.iter_mut().filter(|group| group.to.len() == 1);
        once.for_each(|group| group.rounded = Rounded::Few(Arc::clone(&few)));
    }
    if groups.len() == 1 || columns.len() == k {
        groups.iter_mut().for_each(|group| group.prepare(&types, k));
    } else {
        groups.par_iter_mut().for_each(|group| group.prepare(&types, k));
    }
    let many = many(&mut groups, &matrices, memory, spare);
    Grouped { groups, many }
}

/// The activations of all groups that have many, in every form that a matrix wants.
fn many(groups: &mut [Group<'_>], matrices: &[Tensor], memory: &HostMemory, spare: &mut Spare) -> Many {
    let k = matrices[0].shape[0];
    let coded = matrices.iter().filter(|a| coder_of(a.ty, true).is_some());
    let (interleaved, others): (Vec<&Tensor>, _) = coded.partition(|a| memory.interleaved(a).is_some());
    let as_runs = !interleaved.is_empty() && !has_tiles();
    let (mut panels, mut tiles) = (Vec::new(), Vec::<&[&[f32]]>::new());
    for group in groups.iter_mut().filter(|group| group.many) {
        let first = panels.len();
        panels.extend(group.columns.chunks(width()).map(<[&[f32]]>::to_vec));
        let interleaved = as_runs.then(|| Few::new(k, &group.columns));
        group.rounded = Rounded::Many { panels: first..panels.len(), tiles: tiles.len(), interleaved };
        tiles.extend(group.columns.chunks(16));
    }
    let mut many = Many::default();
    if !panels.is_empty() && !others.is_empty() {
        many.panels = Some(Panels::new(k, &panels, spare));
    }
    if !tiles.is_empty() && !interleaved.is_empty() {
        many.tiles = TiledActivations::new(k, &tiles, spare);
    }
    many
}

/// Activations of a panel: two vectors.
#[inline(always)]
fn panel<S: Simd>(_: S) -> usize {
    2 * S::f32s::LEN
}

/// The activations in panels; the last one is filled up with zeros.
#[inline(always)]
fn packed<S: Simd>(simd: S, k: usize, columns: &[f32]) -> Vec<f32> {
    let width = panel(simd);
    let mut out = vec![0.0; (columns.len() / k).next_multiple_of(width) * k];
    let pack = |(out, columns): (&mut [f32], &[f32])| {
        let columns: Vec<&[f32]> = columns.chunks_exact(k).collect();
        dispatch!(level(), simd => transpose(simd, &columns, width, out));
    };
    out.par_chunks_mut(width * k).zip(columns.par_chunks(width * k)).for_each(pack);
    out
}

/// The products of every job, and where each has its own.
fn products(
    jobs: &[(&Tensor, &Group<'_>)],
    many: &Many,
    memory: &HostMemory,
    spare: &mut Spare,
) -> (Vec<f32>, Vec<Place>) {
    let threads = rayon::current_num_threads();
    let whole: usize = jobs.iter().map(|(a, group)| a.shape[0] * a.shape[1] * group.to.len()).sum();
    // Several tasks for each thread, so that a slow thread delays no other; a single thread needs one task.
    let task = if threads == 1 { whole } else { (whole / (8 * threads)).max(TASK_PRODUCTS) };
    let mut end = 0;
    let mut place = |(a, group): &(&Tensor, &Group<'_>)| {
        let (k, n) = (a.shape[0], group.to.len());
        let rows = if group.many { BLOCK_ROWS } else { (task / (k * n)).max(1).next_multiple_of(INTERLEAVED) };
        let first = end;
        end += a.shape[1] * n;
        Place { values: first..end, rows, n }
    };
    let places: Vec<Place> = jobs.iter().map(&mut place).collect();
    let mut values = spare.take(end);
    let mut tasks = Vec::new();
    let mut rest = &mut values[..];
    for (&(a, group), place) in jobs.iter().zip(&places) {
        let (own, others) = rest.split_at_mut(place.values.len());
        rest = others;
        for (task, out) in own.chunks_mut(place.rows * place.n).enumerate() {
            tasks.push((a, group, task * place.rows, out));
        }
    }
    let run = |(a, group, first, out): (&Tensor, &Group<'_>, usize, &mut [f32])| {
        let [a2, a3] = group.batch;
        let offset = a.row_offset([first, a2, a3]);
        let bytes = &memory.bytes(a.slot)[offset..];
        let rows = Rows { ty: a.ty, bytes, stride: a.stride[1], row_bytes: a.row_bytes() };
        let interleaved = memory.interleaved(a).map(|interleaved| interleaved.rows(offset / rows.row_bytes));
        block(Matrix { rows, interleaved, k: a.shape[0] }, group, many, out);
    };
    if threads == 1 || tasks.len() == 1 {
        tasks.into_iter().for_each(run);
    } else {
        // Every task may go to another thread.
        tasks.into_par_iter().with_max_len(1).for_each(run);
    }
    (values, places)
}

/// Rows of `k` elements.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    rows: Rows<'a>,
    /// The same interleaved, where they are: a multiple of sixteen then.
    interleaved: Option<InterleavedRows<'a>>,
    k: usize,
}

/// Rows times the activations of a group, as a block of results.
fn block(a: Matrix<'_>, group: &Group<'_>, many: &Many, out: &mut [f32]) {
    let n = group.to.len();
    let count = out.len() / n;
    let unfit = a.interleaved.and_then(|interleaved| meet_interleaved(interleaved, group, many, out));
    if let Some(unfit) = unfit {
        // What lies in the file is read for these activations alone, so that the system need not keep it in memory.
        return unfit.iter().for_each(|&c| a.rows.dots(a.k, group.columns[c], &mut out[c * count..][..count]));
    }
    if n == 1 {
        return multiply_rows(a, group, many, out, 1);
    }
    let width = dispatch!(level(), simd => panel(simd));
    let stride = if group.many { n.next_multiple_of(width) } else { n };
    let mut results = vec![0.0; count * stride];
    multiply_rows(a, group, many, &mut results, stride);
    let rows: Vec<&[f32]> = results.chunks_exact(stride).map(|row| &row[..n]).collect();
    dispatch!(level(), simd => transpose(simd, &rows, count, out));
}

/// Rows that are interleaved times the activations of a group, one activation vector's results after the other; gives the activations that should
/// be multiplied as floats. `None` if no activations have the form for it.
fn meet_interleaved(rows: InterleavedRows<'_>, group: &Group<'_>, many: &Many, out: &mut [f32]) -> Option<Vec<usize>> {
    let n = group.to.len();
    let few: &Few = match &group.rounded {
        Rounded::No => return None,
        Rounded::Few(few) => few,
        Rounded::Many { interleaved: Some(few), .. } => few,
        Rounded::Many { tiles: first, .. } => {
            let tiles = many.tiles.as_ref()?;
            tiles.dots(*first, n, rows, out);
            return Some(tiles.unfit(*first, n).collect());
        }
    };
    few.interleaved_dots(rows, out);
    Some(few.unfit().to_vec())
}

/// Rows times the activations of a group: the results of a row lie side by side, `stride` from row to row.
fn multiply_rows(a: Matrix<'_>, group: &Group<'_>, many: &Many, out: &mut [f32], stride: usize) {
    let Matrix { rows, k, .. } = a;
    let unfit: Vec<usize> = match (coder_of(rows.ty, group.many), &group.rounded, &many.panels) {
        (Some(coder), Rounded::Few(few), _) => {
            few.dots(coder, rows, out);
            few.unfit().to_vec()
        }
        (Some(coder), Rounded::Many { panels: own, .. }, Some(panels)) => {
            panels.tiles(own.clone(), group.to.len(), coder, rows, out, stride);
            panels.unfit(own.clone()).collect()
        }
        _ if group.many => return tiles(rows, k, &group.packed, out, stride),
        _ => return rows.dots(k, &group.flat, out),
    };
    for c in unfit {
        let mut results = vec![0.0; out.len() / stride];
        rows.dots(k, group.columns[c], &mut results);
        out.iter_mut().skip(c).step_by(stride).zip(results).for_each(|(out, result)| *out = result);
    }
}

/// Rows times all panels: a piece of each row at a time becomes floats, and meets the same piece of every panel.
fn tiles(rows: Rows<'_>, k: usize, packed: &[f32], out: &mut [f32], stride: usize) {
    let n_rows = out.len() / stride;
    // Only types packed for devices have longer blocks.
    let most = DEPTH.max(rows.ty.block_len());
    let mut values = vec![0.0f32; BLOCK_ROWS * most];
    for start in (0..k).step_by(most) {
        let depth = most.min(k - start);
        let per_byte = |elements: usize| elements / rows.ty.block_len() * rows.ty.block_bytes();
        for (i, values) in values.chunks_exact_mut(most).take(n_rows).enumerate() {
            let row = &rows.row(i)[per_byte(start)..per_byte(start + depth)];
            decode(rows.ty, row, &mut values[..depth]);
        }
        dispatch!(level(), simd => {
            let width = panel(simd);
            let layout = Layout { depth, a_stride: most, b_stride: width, c_stride: stride, add: start > 0 };
            for (p, panel) in packed.chunks_exact(width * k).enumerate() {
                let out = &mut out[p * width..];
                multiply(simd, [n_rows, width], layout, &values, &panel[start * width..], out);
            }
        });
    }
}

/// What follows the products of a matrix. Where the results of experts are summed, every row is such a sum.
fn finish(
    call: &Call,
    matrix: &FusedProduct,
    groups: &[Group<'_>],
    [products, ups]: [&[Results<'_>]; 2],
    memory: &HostMemory,
    result: &mut [f32],
) {
    let m = matrix.d.shape[0];
    let scale = call.epilogue.scale;
    let bias = matrix.bias.map(|t| memory.floats(&t));
    let up_bias = call.gate.and_then(|gate| gate.bias).map(|t| memory.floats(&t));
    let residual = call.epilogue.residual.map(|t| memory.floats(&t));
    let factor = call.factor.map(|factor| (factor.function, memory.floats(&factor.gate)));
    let router = call.experts.and_then(|experts| experts.weights).map(|t| memory.floats(&t));
    // Where each row of the result, or each row of those that are summed, comes from.
    let summands = call.summands();
    let mut from = vec![(0, 0); matrix.d.rows() * summands];
    for (g, group) in groups.iter().enumerate() {
        group.to.iter().enumerate().for_each(|(c, to)| from[*to] = (g, c));
    }
    let scaled = |product: &Results<'_>, c: usize, bias: Option<&[f32]>, out: &mut [f32]| {
        for (out, run) in out.chunks_mut(product.rows).zip(product.column(c)) {
            out.iter_mut().zip(run).for_each(|(out, x)| *out = scale * x);
        }
        if let Some(bias) = bias {
            out.iter_mut().zip(bias).for_each(|(out, b)| *out += b);
        }
    };
    let one = |at: usize, out: &mut [f32]| {
        let (g, c) = from[at];
        let first = groups[g].expert * m;
        scaled(&products[g], c, bias.as_ref().map(|b| &b[first..][..m]), out);
        if let Some(gate) = call.gate {
            let mut up = vec![0.0; m];
            scaled(&ups[g], c, up_bias.as_ref().map(|b| &b[first..][..m]), &mut up);
            glu::cpu::gate_row(gate.kind, out, &up);
        }
        if let Some(function) = call.function {
            out.iter_mut().for_each(|out| *out = function.of(f64::from(*out)) as f32);
        }
        if let Some(router) = &router {
            out.iter_mut().for_each(|out| *out *= router[at]);
        }
    };
    let row = |(at, out): (usize, &mut [f32])| {
        one(at * summands, out);
        let mut summand = vec![0.0; if summands > 1 { m } else { 0 }];
        for other in 1..summands {
            one(at * summands + other, &mut summand);
            out.iter_mut().zip(&summand).for_each(|(out, x)| *out += x);
        }
        if let Some((function, gate)) = &factor {
            let factors = gate[at * m..].iter().map(|gate| function.of(f64::from(*gate)) as f32);
            out.iter_mut().zip(factors).for_each(|(out, factor)| *out *= factor);
        }
        if let Some(residual) = &residual {
            out.iter_mut().zip(&residual[at * m..]).for_each(|(out, r)| *out += r);
        }
    };
    if matrix.d.rows() == 1 {
        row((0, result));
    } else {
        result.par_chunks_mut(m).enumerate().with_min_len(4 / summands.min(4)).for_each(row);
    }
}
