//! Matrix products at the speed of the CPU: rows are spread over threads, each row's blocks are made floats once and
//! multiplied with every column. `mul_mm` comes here too, through `mul_mat`.

use kiln_gguf::quant;
use rayon::prelude::*;

use super::cpu_rows::{Column, row_dot};
use super::reference::gated;
use super::{Call, Sibling};
use crate::host::HostMemory;
use crate::mul_mat::Product;
use crate::operation::rows_apart;
use crate::tensor::Tensor;

/// Elements of a row that are made floats at once: they stay in the nearest cache.
const CHUNK: usize = 512;
/// Rows that meet a column together: it is loaded once for them.
const ROWS: usize = 4;
/// Columns up to which codes are multiplied as they are, again for each column.
const FEW: usize = 4;
/// Products a task computes about.
const TASK_PRODUCTS: usize = 1 << 15;

/// Computes every result of the call.
pub(crate) fn compute(call: &Call, memory: &mut HostMemory) {
    let columns = floats(call, memory);
    let results: Vec<Vec<f32>> =
        call.matrices().iter().map(|matrix| matrix_result(call, matrix, &columns, memory)).collect();
    for (matrix, result) in call.matrices().iter().zip(results) {
        write(&matrix.d, &result, memory);
    }
}

/// The columns as floats, normed where the call says so.
fn floats(call: &Call, memory: &HostMemory) -> Vec<f32> {
    let mut columns = read(&call.product.b, memory);
    if let Some(norm) = call.norm {
        let weight = norm.weight.map(|t| read(&t, memory));
        for column in columns.chunks_exact_mut(call.product.b.shape[0]) {
            let mean = column.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / column.len() as f64;
            let factor = (1.0 / (mean + f64::from(norm.eps)).sqrt()) as f32;
            column.iter_mut().for_each(|x| *x *= factor);
            for (x, w) in column.iter_mut().zip(weight.iter().flatten()) {
                *x *= w;
            }
        }
    }
    columns
}

fn read(t: &Tensor, memory: &HostMemory) -> Vec<f32> {
    memory.read(t).into_iter().map(|x| x as f32).collect()
}

fn write(t: &Tensor, values: &[f32], memory: &mut HostMemory) {
    let bytes = memory.bytes_mut(t.slot);
    for (i, row) in rows_apart(t.shape).zip(values.chunks_exact(t.shape[0].max(1))) {
        let to = &mut bytes[t.row_offset(i)..][..4 * row.len()];
        for (to, x) in to.chunks_exact_mut(4).zip(row) {
            to.copy_from_slice(&x.to_le_bytes());
        }
    }
}

/// One matrix times the columns, with everything that follows.
fn matrix_result(call: &Call, matrix: &Sibling, columns: &[f32], memory: &HostMemory) -> Vec<f32> {
    let Product { a, b, .. } = call.product;
    let (k, m, n) = (a.shape[0], matrix.d.shape[0], matrix.d.shape[1]);
    let bias = matrix.bias.map(|t| read(&t, memory));
    let up_bias = call.gate.and_then(|gate| gate.bias).map(|t| read(&t, memory));
    let residual = call.epilogue.residual.map(|t| read(&t, memory));
    let ids = call.experts.map(|experts| read(&experts.ids, memory));
    let router = call.experts.and_then(|experts| experts.weights).map(|t| read(&t, memory));
    let product = Product { a: matrix.a, ..call.product };
    let mut result = vec![0.0; matrix.d.len()];
    // Columns that meet the same matrix are multiplied together: all of a batch, or one of an expert.
    let together = if ids.is_some() { 1 } else { n };
    for first in (0..matrix.d.rows()).step_by(together) {
        let (i1, i2, i3) = (first % n, first / n % b.shape[2], first / n / b.shape[2]);
        let (batch, expert, column) = match &ids {
            Some(ids) => {
                let expert = ids[first] as usize;
                ([expert, 0], expert, i2 * b.shape[1] + i1 % b.shape[1])
            }
            None => (product.a_batch(i2, i3), 0, first),
        };
        let x = &columns[column * k..(column + together) * k];
        let one = rows_times(&matrix.a, batch, x, memory);
        let two = call.gate.map(|gate| rows_times(&gate.up, batch, x, memory));
        for c in 0..together {
            let out = &mut result[(first + c) * m..(first + c + 1) * m];
            for (row, out) in out.iter_mut().enumerate() {
                let at = row * together + c;
                let mut value = call.epilogue.scale * one[at] + bias.as_ref().map_or(0.0, |b| b[expert * m + row]);
                if let (Some(gate), Some(two)) = (call.gate, &two) {
                    let up = call.epilogue.scale * two[at] + up_bias.as_ref().map_or(0.0, |b| b[expert * m + row]);
                    value = gated(gate.kind, f64::from(value), f64::from(up)) as f32;
                }
                *out = value * router.as_ref().map_or(1.0, |r| r[first + c]);
            }
            if let Some(residual) = &residual {
                out.iter_mut().zip(&residual[(first + c) * m..]).for_each(|(out, r)| *out += r);
            }
        }
    }
    result
}

/// Every row of a matrix times the columns `x`: the results of a row lie side by side.
fn rows_times(a: &Tensor, [a2, a3]: [usize; 2], x: &[f32], memory: &HostMemory) -> Vec<f32> {
    let k = a.shape[0];
    let n = x.len() / k.max(1);
    let bytes = memory.bytes(a.slot);
    let mut out = vec![0.0; a.shape[1] * n];
    if let (Some(dot), 1..=FEW) = (row_dot(a.ty), n) {
        let columns: Vec<Column<'_>> = x.chunks_exact(k).map(Column::new).collect();
        let rows = (TASK_PRODUCTS / k).max(1);
        out.par_chunks_mut(rows * n).enumerate().for_each(|(task, out)| {
            for (i, out) in out.chunks_exact_mut(n).enumerate() {
                let row = &bytes[a.row_offset([task * rows + i, a2, a3])..][..a.row_bytes()];
                out.iter_mut().zip(&columns).for_each(|(out, column)| *out = dot(row, column));
            }
        });
        return out;
    }
    let rows = (TASK_PRODUCTS / k.max(1)).next_multiple_of(ROWS);
    let step = CHUNK / a.ty.block_len() * a.ty.block_bytes();
    out.par_chunks_mut(rows * n).enumerate().for_each(|(task, out)| {
        let mut values = [[0.0f32; CHUNK]; ROWS];
        for (i, out) in out.chunks_mut(ROWS * n).enumerate() {
            let first = task * rows + i * ROWS;
            for (part, start) in (0..a.row_bytes()).step_by(step).enumerate() {
                let end = (start + step).min(a.row_bytes());
                let len = (end - start) / a.ty.block_bytes() * a.ty.block_len();
                for (r, values) in values[..out.len() / n].iter_mut().enumerate() {
                    let row = &bytes[a.row_offset([first + r, a2, a3])..];
                    quant::dequantise(a.ty, &row[start..end], &mut values[..len]).expect("rows are whole blocks");
                }
                for c in 0..n {
                    let sums = dots(&values, &x[c * k + part * CHUNK..][..len]);
                    out.iter_mut().skip(c).step_by(n).zip(sums).for_each(|(out, sum)| *out += sum);
                }
            }
        }
    });
    out
}

/// A few rows times one column, each in eight sums that the compiler keeps in vector registers. A row's bits do not depend
/// on its neighbours.
fn dots(rows: &[[f32; CHUNK]; ROWS], x: &[f32]) -> [f32; ROWS] {
    let mut sums = [[0.0f32; 8]; ROWS];
    let (eights, rest) = x.as_chunks::<8>();
    for (i, x) in eights.iter().enumerate() {
        for (sums, row) in sums.iter_mut().zip(rows) {
            let w: &[f32; 8] = row[8 * i..].first_chunk().expect("rows are as long as columns");
            for j in 0..8 {
                sums[j] += w[j] * x[j];
            }
        }
    }
    let start = x.len() - rest.len();
    std::array::from_fn(|r| {
        let rest: f32 = rest.iter().zip(&rows[r][start..]).map(|(x, w)| x * w).sum();
        sums[r].iter().sum::<f32>() + rest
    })
}

#[cfg(test)]
mod tests {
    use crate::case::{Level, Tolerance};
    use crate::mul_mat_vec::cases::cases;

    #[test]
    fn the_cpu_agrees_with_the_reference() {
        for case in cases(Level::Small) {
            let (call, tolerance, memory) = case.build();
            let (mut got, mut want) = (memory.clone(), memory);
            call.operation().cpu(&mut got);
            call.operation().reference(&mut want);
            assert!(matches!(tolerance, Tolerance::Nmse(_)));
            for t in call.operation().writes() {
                let (got, want) = (got.read(&t), want.read(&t));
                let error: f64 = got.iter().zip(&want).map(|(a, b)| (a - b).powi(2)).sum();
                let norm: f64 = want.iter().map(|b| b * b).sum();
                // The CPU never rounds columns, whatever a case allows.
                assert!(error <= 1e-10 * norm, "{}: {:.2e}", case.name, error / norm);
            }
        }
    }
}
