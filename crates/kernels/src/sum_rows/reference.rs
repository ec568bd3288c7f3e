//! The definition of `sum_rows`.

use super::Call;
use crate::host::HostMemory;

/// dst = sum of the row, weighed where there are weights.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let cols = call.x.shape[0];
    let sums = if cols == 0 {
        vec![0.0; call.dst.len()]
    } else {
        let weights = call.weights.map(|weights| memory.read(&weights));
        let weight = |row: usize, i: usize| weights.as_ref().map_or(1.0, |w| w[row / call.x.shape[1] * cols + i]);
        let sum = |(n, row): (usize, &[f64])| row.iter().enumerate().map(|(i, x)| x * weight(n, i)).sum();
        memory.read(&call.x).chunks_exact(cols).enumerate().map(sum).collect()
    };
    memory.write(&call.dst, &sums);
}
