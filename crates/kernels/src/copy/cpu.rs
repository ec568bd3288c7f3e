//! `copy` at the speed of the CPU: elements that stay what they are move as bytes, floats by rows of f32.

use kiln_gguf::TensorType;

use super::Call;
use crate::floats::{by_rows, is_float};
use crate::host::HostMemory;
use crate::operation::rows_apart;

/// dst = src, element by element.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let Call { src, dst } = call;
    if dst.is_empty() {
        return;
    }
    if src.ty == dst.ty {
        return move_bytes(call, memory);
    }
    if !is_float(src) || !is_float(dst) || dst.ty == TensorType::IQ4_NL {
        return super::reference::reference(call, memory);
    }
    by_rows(memory, dst, |memory, i, out| memory.float_row(src, i, out));
}

/// The same elements at other strides. All are read before the first is written.
fn move_bytes(Call { src, dst }: &Call, memory: &mut HostMemory) {
    let (size, row_bytes) = (src.ty.block_bytes(), src.row_bytes());
    let mut moved = Vec::with_capacity(src.rows() * row_bytes);
    let bytes = memory.bytes(src.slot);
    for i in rows_apart(src.shape) {
        let row = &bytes[src.row_offset(i)..];
        if src.has_dense_rows() {
            moved.extend_from_slice(&row[..row_bytes]);
        } else {
            (0..row_bytes / size).for_each(|j| moved.extend_from_slice(&row[j * src.stride[0]..][..size]));
        }
    }
    let bytes = memory.bytes_mut(dst.slot);
    for (i, from) in rows_apart(dst.shape).zip(moved.chunks_exact(row_bytes)) {
        let row = &mut bytes[dst.row_offset(i)..];
        if dst.has_dense_rows() {
            row[..row_bytes].copy_from_slice(from);
        } else {
            for (j, element) in from.chunks_exact(size).enumerate() {
                row[j * dst.stride[0]..][..size].copy_from_slice(element);
            }
        }
    }
}
