//! The definition of `concat`.

use super::Call;
use crate::host::HostMemory;

/// dst = a, then b along dimension `dim`.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let split = call.a.shape[call.dim];
    for (src, start) in [(call.a, 0), (call.b, split)] {
        if !src.is_empty() {
            let values = memory.read(&src);
            memory.write(&call.dst.narrow(call.dim, start, src.shape[call.dim]), &values);
        }
    }
}
