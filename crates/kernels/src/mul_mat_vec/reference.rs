//! The definition of `mul_mat_vec`: norm, products, gate and what follows, in f64.

use rayon::prelude::*;

use super::{Call, FusedProduct, Norm};
use crate::glu::reference::gated;
use crate::host::HostMemory;
use crate::mul_mat::{Product, dequantised_row};
use crate::operation::rows_apart;
use crate::tensor::Tensor;

/// Computes every result of the call.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let b = call.product.b;
    let mut columns = memory.read(&b);
    if let Some(norm) = call.norm {
        for column in columns.chunks_exact_mut(b.shape[0]) {
            normed(column, &norm, memory);
        }
    }
    if let Some(apart) = call.apart() {
        let result = summed_result(call, &apart, &columns, memory);
        return memory.write(&call.product.d, &result);
    }
    // All results are computed before the first is written: the residual may be a result.
    let results: Vec<Vec<f64>> =
        call.matrices().iter().map(|matrix| matrix_result(call, matrix, &columns, memory)).collect();
    for (matrix, result) in call.matrices().iter().zip(results) {
        memory.write(&matrix.d, &result);
    }
}

fn normed(column: &mut [f64], norm: &Norm, memory: &HostMemory) {
    let mean = column.iter().map(|x| x * x).sum::<f64>() / column.len() as f64;
    let factor = 1.0 / (mean + f64::from(norm.eps)).sqrt();
    let weight = norm.weight.map(|t| memory.read(&t));
    for (i, x) in column.iter_mut().enumerate() {
        *x *= factor * weight.as_ref().map_or(1.0, |w| w[i]);
    }
}

/// The results of experts apart, summed over those of a token, and what follows.
fn summed_result(call: &Call, apart: &Call, columns: &[f64], memory: &HostMemory) -> Vec<f64> {
    let matrix = &apart.matrices()[0];
    let all = matrix_result(apart, matrix, columns, memory);
    let (m, used) = (matrix.d.shape[0], matrix.d.shape[1]);
    let mut result = call.epilogue.residual.map_or_else(|| vec![0.0; call.product.d.len()], |t| memory.read(&t));
    for (at, value) in all.iter().enumerate() {
        result[at / (m * used) * m + at % m] += value;
    }
    result
}

/// One matrix times the activations, with everything that follows.
fn matrix_result(call: &Call, matrix: &FusedProduct, columns: &[f64], memory: &HostMemory) -> Vec<f64> {
    let Product { a, b, .. } = call.product;
    let (k, m) = (a.shape[0], matrix.d.shape[0]);
    let bias = matrix.bias.map(|t| memory.read(&t));
    let residual = call.epilogue.residual.map(|t| memory.read(&t));
    let factor = call.factor.map(|factor| (factor.function, memory.read(&factor.gate)));
    let up_bias = call.gate.and_then(|gate| gate.bias).map(|t| memory.read(&t));
    let ids = call.experts.map(|experts| memory.read(&experts.ids));
    let router = call.experts.and_then(|experts| experts.weights).map(|t| memory.read(&t));
    let mut result = vec![0.0; matrix.d.len()];
    for (at, [n, i2, i3]) in rows_apart(matrix.d.shape).enumerate() {
        // Which matrix of `a`, and which activation vector.
        let (a2, a3, expert, column) = match &ids {
            Some(ids) => {
                let expert = ids[at] as usize;
                (expert, 0, expert, i2 * b.shape[1] + n % b.shape[1])
            }
            None => {
                let product = Product { a: matrix.a, ..call.product };
                let [a2, a3] = product.a_batch(i2, i3);
                (a2, a3, 0, at)
            }
        };
        let x = &columns[column * k..(column + 1) * k];
        let scale = f64::from(call.epilogue.scale);
        let first = rows_dot(&matrix.a, [a2, a3], x, memory);
        let second = call.gate.map(|gate| rows_dot(&gate.up, [a2, a3], x, memory));
        for row in 0..m {
            let mut value = scale * first[row] + bias.as_ref().map_or(0.0, |b| b[expert * m + row]);
            if let (Some(gate), Some(second)) = (call.gate, &second) {
                let up = scale * second[row] + up_bias.as_ref().map_or(0.0, |b| b[expert * m + row]);
                value = gated(gate.kind, value, up);
            }
            if let Some(function) = call.function {
                value = function.of(value);
            }
            value *= router.as_ref().map_or(1.0, |r| r[at]);
            value *= factor.as_ref().map_or(1.0, |(function, gate)| function.of(gate[at * m + row]));
            result[at * m + row] = value + residual.as_ref().map_or(0.0, |r| r[at * m + row]);
        }
    }
    result
}

/// Every row of a matrix times one activation vector. Rows are spread over threads; each result is one plain sum.
fn rows_dot(a: &Tensor, [a2, a3]: [usize; 2], x: &[f64], memory: &HostMemory) -> Vec<f64> {
    let bytes = memory.bytes(a.slot);
    let dot = |row: usize| {
        let weights = dequantised_row(a, &bytes[a.row_offset([row, a2, a3])..]);
        weights.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()
    };
    (0..a.shape[1]).into_par_iter().map(dot).collect()
}
