//! `get_rows` at the speed of the CPU: each row is made floats where it goes.

use super::Call;
use crate::floats::{by_rows, is_float};
use crate::host::HostMemory;

/// dst(.., i) = src(.., ids(i)), zeros where there is no such row.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let Call { src, ids, dst } = call;
    if !is_float(src) {
        return super::reference::reference(call, memory);
    }
    let [n1, n2, _, _] = ids.shape;
    let ids = memory.read(ids);
    by_rows(memory, dst, |memory, i, out| {
        let id = ids[i[0] + n1 * (i[1] + n2 * i[2])];
        // Rows start as zeros.
        if id >= 0.0 && id < src.shape[1] as f64 {
            memory.float_row(src, [id as usize, i[1], i[2]], out);
        }
    });
}
