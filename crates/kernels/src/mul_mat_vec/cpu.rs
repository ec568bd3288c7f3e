//! Matrix products at the speed of the CPU. A few columns meet each row while it becomes floats in registers; for many,
//! a block of rows is made floats once and multiplied tile by tile. `mul_mm` comes here too.

use std::borrow::Cow;

use fearless_simd::prelude::*;
use fearless_simd::{Simd, dispatch};
use rayon::prelude::*;

use super::cpu_rows::{Rows, decode};
use super::{Call, Sibling};
use crate::glu;
use crate::host::HostMemory;
use crate::mul_mat::Product;
use crate::simd::{Layout, level, multiply, transpose};
use crate::tensor::Tensor;

/// Columns up to which rows are decoded again for every four of them.
const FEW: usize = 8;
/// Elements of a row that are made floats at once: they stay in the nearest caches.
const DEPTH: usize = 256;
/// Rows that are made floats at once: four tiles of the widest machine.
const BLOCK_ROWS: usize = 48;
/// Products a task computes at least about.
const TASK_PRODUCTS: usize = 1 << 15;

/// Columns that meet the same matrix: all of a batch, or those of an expert.
struct Group<'a> {
    /// The batch of the weights.
    batch: [usize; 2],
    /// Which expert's bias is added.
    expert: usize,
    /// Which rows of the result the columns make.
    to: Vec<usize>,
    /// The columns, one after the other.
    columns: Cow<'a, [f32]>,
    /// The same side by side where they are many: panels of some columns, each with an element of all of them in a row.
    packed: Vec<f32>,
}

/// One matrix times one group, before anything follows: results of a row lie side by side.
struct Results {
    values: Vec<f32>,
    /// From row to row.
    stride: usize,
}

impl Results {
    /// The results of a column side by side, one column after the other.
    fn turned(self, n: usize, m: usize) -> Vec<f32> {
        if self.stride == 1 {
            return self.values;
        }
        let mut out = vec![0.0; n * m];
        // As many columns at once as a cache line has floats: lines of rows are read once.
        out.par_chunks_mut(16 * m).enumerate().for_each(|(chunk, out)| {
            let count = out.len() / m;
            let rows: Vec<&[f32]> =
                self.values.chunks_exact(self.stride).map(|row| &row[16 * chunk..][..count]).collect();
            dispatch!(level(), simd => transpose(simd, &rows, m, out));
        });
        out
    }
}

/// Computes every result of the call.
pub(crate) fn compute(call: &Call, memory: &mut HostMemory) {
    if call.product.d.is_empty() {
        return;
    }
    if let Some(apart) = call.apart() {
        let result = summed(call, &results(&apart, memory)[0], memory);
        return memory.write_floats(&call.product.d, &result);
    }
    let results = results(call, memory);
    for (matrix, result) in call.matrices().iter().zip(results) {
        memory.write_floats(&matrix.d, &result);
    }
}

/// The results of experts, one after the other, summed over those of a token, with the residual.
fn summed(call: &Call, all: &[f32], memory: &HostMemory) -> Vec<f32> {
    let m = call.product.d.shape[0];
    let residual = call.epilogue.residual.map(|t| memory.floats(&t));
    let mut result = vec![0.0; call.product.d.len()];
    for (token, (out, all)) in result.chunks_exact_mut(m).zip(all.chunks_exact(m * call.summands())).enumerate() {
        for one in all.chunks_exact(m) {
            out.iter_mut().zip(one).for_each(|(out, x)| *out += x);
        }
        if let Some(residual) = &residual {
            out.iter_mut().zip(&residual[token * m..]).for_each(|(out, r)| *out += r);
        }
    }
    result
}

/// What every matrix of the call gives.
fn results(call: &Call, memory: &HostMemory) -> Vec<Vec<f32>> {
    let columns = normed(call, memory);
    let groups = groups(call, &columns, memory);
    let matrices = call.matrices();
    // All products of the call are one list of tasks, so that threads meet once.
    let mut jobs: Vec<(&Tensor, &Group<'_>)> = Vec::new();
    for matrix in &matrices {
        jobs.extend(groups.iter().map(|group| (&matrix.a, group)));
    }
    if let Some(gate) = &call.gate {
        jobs.extend(groups.iter().map(|group| (&gate.up, group)));
    }
    let products = products(&jobs, memory);
    let (firsts, ups) = products.split_at(groups.len() * matrices.len());
    let finished = |(matrix, products)| finish(call, matrix, &groups, [products, ups], memory);
    matrices.iter().zip(firsts.chunks(groups.len())).map(finished).collect()
}

/// The columns as floats, normed where the call says so.
fn normed<'a>(call: &Call, memory: &'a HostMemory) -> Cow<'a, [f32]> {
    let mut columns = memory.floats(&call.product.b);
    if let Some(norm) = call.norm {
        let weight = norm.weight.map(|t| memory.floats(&t));
        for column in columns.to_mut().chunks_exact_mut(call.product.b.shape[0]) {
            let mean = column.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / column.len() as f64;
            let factor = (1.0 / (mean + f64::from(norm.eps)).sqrt()) as f32;
            column.iter_mut().for_each(|x| *x *= factor);
            if let Some(weight) = &weight {
                column.iter_mut().zip(weight.iter()).for_each(|(x, w)| *x *= w);
            }
        }
    }
    columns
}

fn groups<'a>(call: &Call, columns: &'a [f32], memory: &HostMemory) -> Vec<Group<'a>> {
    let Product { a, b, d } = call.product;
    let (k, n) = (a.shape[0], d.shape[1]);
    let mut groups: Vec<Group<'a>> = match call.experts {
        None => (0..b.shape[2] * b.shape[3])
            .map(|batch| Group {
                batch: call.product.a_batch(batch % b.shape[2], batch / b.shape[2]),
                expert: 0,
                to: (batch * n..(batch + 1) * n).collect(),
                columns: Cow::Borrowed(&columns[batch * n * k..(batch + 1) * n * k]),
                packed: Vec::new(),
            })
            .collect(),
        Some(experts) => {
            let ids = memory.read(&experts.ids);
            let mut of_expert = vec![Vec::new(); a.shape[2]];
            ids.iter().enumerate().for_each(|(at, id)| of_expert[*id as usize].push(at));
            let used = of_expert.into_iter().enumerate().filter(|(_, to)| !to.is_empty());
            used.map(|(expert, to)| {
                let column = |at: &usize| (at / n) * b.shape[1] + at % n % b.shape[1];
                let columns = to.iter().flat_map(|at| columns[column(at) * k..][..k].iter().copied()).collect();
                Group { batch: [expert, 0], expert, to, columns: Cow::Owned(columns), packed: Vec::new() }
            })
            .collect()
        }
    };
    // Tiles add up in another order than columns that are multiplied one by one.
    for group in groups.iter_mut().filter(|group| group.to.len() > FEW && !call.alike) {
        group.packed = dispatch!(level(), simd => packed(simd, k, &group.columns));
    }
    groups
}

/// Columns of a panel: two vectors.
#[inline(always)]
fn panel<S: Simd>(_: S) -> usize {
    2 * S::f32s::LEN
}

/// The columns in panels; the last one is filled up with zeros.
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

/// The products of every job, those of a column side by side.
fn products(jobs: &[(&Tensor, &Group<'_>)], memory: &HostMemory) -> Vec<Vec<f32>> {
    let width = dispatch!(level(), simd => panel(simd));
    let mut results: Vec<Results> = jobs
        .iter()
        .map(|(a, group)| {
            let n = group.to.len();
            let stride = if group.packed.is_empty() { n } else { n.next_multiple_of(width) };
            Results { values: vec![0.0; a.shape[1] * stride], stride }
        })
        .collect();
    let mut tasks = Vec::new();
    for (&(a, group), results) in jobs.iter().zip(&mut results) {
        let (k, n) = (a.shape[0], group.to.len());
        let rows = if group.packed.is_empty() { (TASK_PRODUCTS / (k * n)).max(1) } else { BLOCK_ROWS };
        let stride = results.stride;
        for (task, out) in results.values.chunks_mut(rows * stride).enumerate() {
            tasks.push((a, group, task * rows, out, stride));
        }
    }
    let run = |(a, group, first, out, stride): (&Tensor, &Group<'_>, usize, &mut [f32], usize)| {
        let [a2, a3] = group.batch;
        let bytes = &memory.bytes(a.slot)[a.row_offset([first, a2, a3])..];
        let rows = Rows { ty: a.ty, bytes, stride: a.stride[1], row_bytes: a.row_bytes() };
        if group.packed.is_empty() {
            rows.dots(a.shape[0], &group.columns, out);
        } else {
            tiles(rows, a.shape[0], &group.packed, out, stride);
        }
    };
    if let [_] = &tasks[..] {
        tasks.into_iter().for_each(run);
    } else {
        // Every task may go to another thread: one that is held up holds up no other.
        tasks.into_par_iter().with_max_len(1).for_each(run);
    }
    results.into_iter().zip(jobs).map(|(results, (a, group))| results.turned(group.to.len(), a.shape[1])).collect()
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

/// What follows the products of a matrix.
fn finish(
    call: &Call,
    matrix: &Sibling,
    groups: &[Group<'_>],
    [products, ups]: [&[Vec<f32>]; 2],
    memory: &HostMemory,
) -> Vec<f32> {
    let m = matrix.d.shape[0];
    let scale = call.epilogue.scale;
    let bias = matrix.bias.map(|t| memory.floats(&t));
    let up_bias = call.gate.and_then(|gate| gate.bias).map(|t| memory.floats(&t));
    let residual = call.epilogue.residual.map(|t| memory.floats(&t));
    let factor = call.factor.map(|factor| (factor.function, memory.floats(&factor.gate)));
    let router = call.experts.and_then(|experts| experts.weights).map(|t| memory.floats(&t));
    // Where each row of the result comes from.
    let mut from = vec![(0, 0); matrix.d.rows()];
    for (g, group) in groups.iter().enumerate() {
        group.to.iter().enumerate().for_each(|(c, to)| from[*to] = (g, c));
    }
    let scaled = |product: &[f32], c: usize, bias: Option<&[f32]>, out: &mut [f32]| {
        out.iter_mut().zip(&product[c * m..]).for_each(|(out, x)| *out = scale * x);
        if let Some(bias) = bias {
            out.iter_mut().zip(bias).for_each(|(out, b)| *out += b);
        }
    };
    let mut result = vec![0.0; matrix.d.len()];
    let row = |(at, out): (usize, &mut [f32])| {
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
        if let Some((function, gate)) = &factor {
            let factors = gate[at * m..].iter().map(|gate| function.of(f64::from(*gate)) as f32);
            out.iter_mut().zip(factors).for_each(|(out, factor)| *out *= factor);
        }
        if let Some(residual) = &residual {
            out.iter_mut().zip(&residual[at * m..]).for_each(|(out, r)| *out += r);
        }
    };
    if matrix.d.rows() == 1 {
        row((0, &mut result));
    } else {
        result.par_chunks_mut(m).enumerate().with_min_len(4).for_each(row);
    }
    result
}
