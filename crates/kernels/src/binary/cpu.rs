//! `binary` at the speed of the CPU: rows of f32 on all threads.

use super::{Call, Operator};
use crate::floats::{by_rows, is_float};
use crate::host::HostMemory;

/// dst = a op b, element by element; b's indices are taken modulo its extents.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let Call { a, b, dst, operator } = call;
    if ![a, b, dst].into_iter().all(is_float) {
        return super::reference::reference(call, memory);
    }
    let [b0, b1, b2, b3] = b.shape;
    by_rows(memory, dst, |memory, [i1, i2, i3], out| {
        let mut row = vec![0.0; b0];
        memory.float_row(b, [i1 % b1, i2 % b2, i3 % b3], &mut row);
        memory.float_row(a, [i1, i2, i3], out);
        for out in out.chunks_mut(b0) {
            let pairs = out.iter_mut().zip(&row);
            match operator {
                Operator::Add => pairs.for_each(|(a, b)| *a += b),
                Operator::Sub => pairs.for_each(|(a, b)| *a -= b),
                Operator::Mul => pairs.for_each(|(a, b)| *a *= b),
                Operator::Div => pairs.for_each(|(a, b)| *a /= b),
            }
        }
    });
}
