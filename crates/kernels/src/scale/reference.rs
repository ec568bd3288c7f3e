//! The definition of `scale`.

use super::Call;
use crate::host::HostMemory;

/// dst = factor * x + bias, element by element.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    if call.dst.is_empty() {
        return;
    }
    let mut values = memory.read(&call.x);
    for v in &mut values {
        *v = f64::from(call.factor) * *v + f64::from(call.bias);
    }
    memory.write(&call.dst, &values);
}
