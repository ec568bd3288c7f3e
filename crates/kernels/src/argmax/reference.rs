//! The definition of `argmax`.

use super::Call;
use crate::host::HostMemory;

/// dst = index of the largest element of the row, the first of equal ones; NaN never wins.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let best = |row: &[f64]| {
        let mut best: Option<usize> = None;
        for (i, v) in row.iter().enumerate() {
            if !v.is_nan() && best.is_none_or(|b| *v > row[b]) {
                best = Some(i);
            }
        }
        best.unwrap_or(0) as f64
    };
    let indices: Vec<f64> = memory.read(&call.x).chunks_exact(call.x.shape[0]).map(best).collect();
    memory.write(&call.dst, &indices);
}
