//! The definition of `kv_write`: `rms_norm` where there is one, `rope` and `set_rows`, one after the other.

use super::Call;
use crate::host::HostMemory;
use crate::operation::Operation as _;

/// Writes the caches and turns the queries.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    // Keys are turned on the way only: what was projected stays.
    let before = memory.bytes(call.k.slot).to_vec();
    if let Some(norm) = call.normed_k() {
        norm.reference(memory);
    }
    call.turn_k().reference(memory);
    call.write_k().reference(memory);
    memory.bytes_mut(call.k.slot).copy_from_slice(&before);
    call.write_v().reference(memory);
    if let Some(norm) = call.normed_q() {
        norm.reference(memory);
    }
    call.q.reference(memory);
}
