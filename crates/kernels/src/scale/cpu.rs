//! `scale` at the speed of the CPU: rows of f32 on all threads.

use super::Call;
use crate::floats::{by_rows, is_float};
use crate::host::HostMemory;

/// dst = factor * x + bias, element by element.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    if !is_float(&call.x) || !is_float(&call.dst) {
        return super::reference::reference(call, memory);
    }
    by_rows(memory, &call.dst, |memory, i, out| {
        memory.float_row(&call.x, i, out);
        out.iter_mut().for_each(|x| *x = call.factor * *x + call.bias);
    });
}
