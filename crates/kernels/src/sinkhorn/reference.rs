//! The definition of `sinkhorn`.

use super::Call;
use crate::host::HostMemory;

/// Softmax of rows, then columns and rows divided by their sums.
pub(crate) fn reference(call: &Call, memory: &mut HostMemory) {
    let (n, eps) = (call.y.shape[0], f64::from(call.eps));
    let mut out = Vec::new();
    for matrix in memory.read(&call.x).chunks_exact(n * n) {
        let mut m: Vec<Vec<f64>> = matrix.chunks_exact(n).map(|row| softmax(row, eps)).collect();
        for time in 0..call.times {
            if time > 0 {
                for row in &mut m {
                    let sum = row.iter().sum::<f64>() + eps;
                    row.iter_mut().for_each(|v| *v /= sum);
                }
            }
            for column in 0..n {
                let sum = m.iter().map(|row| row[column]).sum::<f64>() + eps;
                m.iter_mut().for_each(|row| row[column] /= sum);
            }
        }
        (0..n).for_each(|column| out.extend(m.iter().map(|row| row[column])));
    }
    memory.write(&call.y, &out);
}

fn softmax(row: &[f64], eps: f64) -> Vec<f64> {
    let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = row.iter().map(|v| (v - top).exp()).sum();
    row.iter().map(|v| (v - top).exp() / sum + eps).collect()
}
