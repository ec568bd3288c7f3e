//! `set_rows` at the speed of the CPU: only the rows that ids name are touched.

use kiln_gguf::TensorType;

use super::Call;
use crate::host::HostMemory;
use crate::operation::rows_apart;

/// dst(.., ids(i)) = src(.., i); a row whose id names no row of dst is dropped.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let Call { src, ids, dst } = call;
    if dst.ty == TensorType::IQ4_NL {
        // Its blocks are written by the rules of the shaders, in f64.
        return super::reference::reference(call, memory);
    }
    let [n1, n2, n3, _] = ids.shape;
    let ids = memory.read(ids);
    let mut values = vec![0.0; src.shape[0]];
    for i in rows_apart(src.shape) {
        let id = ids[i[0] + n1 * (i[1] % n2 + n2 * (i[2] % n3))];
        if id >= 0.0 && id < dst.shape[1] as f64 {
            memory.float_row(src, i, &mut values);
            memory.write_cache_row(dst, [id as usize, i[1], i[2]], &mut values);
        }
    }
}
