//! The definition of `binary`.

use super::{Call, Operator};
use crate::host::HostMemory;
use crate::operation::rows_apart;

/// dst = a op b, element by element; b's indices are taken modulo its extents.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    if call.dst.is_empty() {
        return;
    }
    let [b0, b1, b2, b3] = call.b.shape;
    let b = memory.read(&call.b);
    let mut dst = memory.read(&call.a);
    let rows = dst.chunks_exact_mut(call.dst.shape[0]);
    for (row, [i1, i2, i3]) in rows.zip(rows_apart(call.dst.shape)) {
        let b_row = b0 * (i1 % b1 + b1 * (i2 % b2 + b2 * (i3 % b3)));
        for (i0, v) in row.iter_mut().enumerate() {
            let b = b[b_row + i0 % b0];
            *v = match call.operator {
                Operator::Add => *v + b,
                Operator::Sub => *v - b,
                Operator::Mul => *v * b,
                Operator::Div => *v / b,
            };
        }
    }
    memory.write(&call.dst, &dst);
}
