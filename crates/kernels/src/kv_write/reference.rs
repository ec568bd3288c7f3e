//! The definition of `kv_write`: `rope` and `set_rows`, one after the other.

use super::Call;
use crate::host::HostMemory;
use crate::operation::Operation as _;

/// Writes the caches and turns the queries.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    // Keys are turned on the way only: what was projected stays.
    let before = memory.bytes(call.k.slot).to_vec();
    call.turn_k().reference(memory);
    call.write_k().reference(memory);
    memory.bytes_mut(call.k.slot).copy_from_slice(&before);
    call.write_v().reference(memory);
    call.q.reference(memory);
}
