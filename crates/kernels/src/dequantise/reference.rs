//! The definition of `dequantise`.

use super::Call;
use crate::host::HostMemory;

/// dst = src; what the bits of a format mean is the host's to say.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    if call.dst.is_empty() {
        return;
    }
    let values = memory.read(&call.src);
    memory.write(&call.dst, &values);
}
