//! The definition of `get_rows`.

use super::Call;
use crate::host::HostMemory;
use crate::operation::rows_apart;

/// dst(.., i) = src(.., ids(i)), zeros where there is no such row.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let Call { src, ids, dst } = call;
    for i in rows_apart(dst.shape) {
        let id = memory.read(&ids.narrow(0, i[0], 1).narrow(1, i[1], 1).narrow(2, i[2], 1))[0];
        let values = if id >= 0.0 && id < src.shape[1] as f64 {
            memory.read(&crate::elementwise::row(*src, [id as usize, i[1], i[2]]))
        } else {
            vec![0.0; dst.shape[0]]
        };
        memory.write(&crate::elementwise::row(*dst, i), &values);
    }
}
