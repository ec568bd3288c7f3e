//! The definition of `sum_rows`.

use super::Call;
use crate::host::HostMemory;

/// dst = sum of the row.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let cols = call.x.shape[0];
    let sums = if cols == 0 {
        vec![0.0; call.dst.len()]
    } else {
        memory.read(&call.x).chunks_exact(cols).map(|row| row.iter().sum()).collect()
    };
    memory.write(&call.dst, &sums);
}
