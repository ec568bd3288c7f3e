//! `sum_rows` at the speed of the CPU. Sums over experts have rows whose elements lie far apart and whose neighbours lie side by side:
//! there, all rows of a token are summed at once, one element of each after the other.

use rayon::prelude::*;

use super::Call;
use crate::floats::by_rows;
use crate::host::HostMemory;
use crate::tensor::Tensor;
use kiln_gguf::TensorType;

/// Sums a task should at least have.
const TASK_SUMS: usize = 1 << 12;

/// dst = sum of the row, weighed where there are weights.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let Call { x, dst, weights } = call;
    let beside = |t: &Tensor| t.ty == TensorType::F32 && t.stride[1] == 4;
    let weights_fit = weights.is_none_or(|t| t.ty == TensorType::F32 && t.has_dense_rows());
    if x.is_empty() || !beside(x) || !beside(dst) || !weights_fit {
        return general(call, memory);
    }
    let [cols, rows, n2, n3] = x.shape;
    let mut sums = vec![0.0; rows * n2 * n3];
    let from = memory.bytes(x.slot);
    let task = |(at, sums): (usize, &mut [f32])| {
        let (i2, i3) = (at % n2, at / n2);
        let mut factors = vec![1.0; cols];
        if let Some(weights) = weights {
            memory.float_row(weights, [0, i2, i3], &mut factors);
        }
        for (i, factor) in factors.into_iter().enumerate() {
            let first = x.row_offset([0, i2, i3]) + i * x.stride[0];
            let values = from[first..][..4 * rows].as_chunks::<4>().0;
            sums.iter_mut().zip(values).for_each(|(sum, x)| *sum += factor * f32::from_le_bytes(*x));
        }
    };
    sums.par_chunks_exact_mut(rows).with_min_len(TASK_SUMS.div_ceil(rows)).enumerate().for_each(task);
    let to = memory.bytes_mut(dst.slot);
    for (at, sums) in sums.chunks_exact(rows).enumerate() {
        let first = dst.row_offset([0, at % n2, at / n2]);
        to[first..][..4 * rows].copy_from_slice(bytemuck::cast_slice(sums));
    }
}

/// Rows that lie in any other way.
fn general(call: &Call, memory: &mut HostMemory) {
    let Call { x, dst, weights } = call;
    if x.is_empty() || !x.has_dense_rows() || x.ty != TensorType::F32 || dst.ty != TensorType::F32 {
        return super::reference::reference(call, memory);
    }
    by_rows(memory, dst, |memory, i, out| {
        let (mut row, mut factors) = (vec![0.0; x.shape[0]], vec![1.0; x.shape[0]]);
        memory.float_row(x, i, &mut row);
        if let Some(weights) = weights {
            memory.float_row(weights, [0, i[1], i[2]], &mut factors);
        }
        out[0] = row.iter().zip(factors).map(|(x, factor)| f64::from(*x) * f64::from(factor)).sum::<f64>() as f32;
    });
}
