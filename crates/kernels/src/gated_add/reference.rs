//! The definition of `gated_add`.

use super::Call;
use crate::host::HostMemory;

/// dst = x + f(gate) * y, element by element.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    if call.dst.is_empty() {
        return;
    }
    let (gate, y) = (memory.read(&call.gate), memory.read(&call.y));
    let mut values = memory.read(&call.x);
    for ((x, gate), y) in values.iter_mut().zip(gate).zip(y) {
        *x += call.function.of(gate) * y;
    }
    memory.write(&call.dst, &values);
}
