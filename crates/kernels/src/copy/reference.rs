//! The definition of `copy`.

use super::Call;
use crate::elementwise::row;
use crate::host::HostMemory;
use crate::operation::rows_apart;
use crate::set_rows::reference::write_row;

/// dst = src, element by element, converted by the host's rules. Blocks that stay what they are keep every bit.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    if call.dst.is_empty() {
        return;
    }
    let Call { src, dst } = call;
    if src.ty.block_len() > 1 && src.ty == dst.ty {
        for i in rows_apart(src.shape) {
            let from = src.row_offset(i);
            let row = memory.bytes(src.slot)[from..from + src.row_bytes()].to_vec();
            let to = dst.row_offset(i);
            memory.bytes_mut(dst.slot)[to..to + row.len()].copy_from_slice(&row);
        }
        return;
    }
    if dst.ty.block_len() > 1 {
        for i in rows_apart(src.shape) {
            let values = memory.read(&row(*src, i));
            write_row(memory, &row(*dst, i), &values);
        }
        return;
    }
    let values = memory.read(&call.src);
    memory.write(&call.dst, &values);
}
