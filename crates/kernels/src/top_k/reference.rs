//! The definition of `top_k`.

use super::Call;
use crate::argsort::{Order, sorted};
use crate::elementwise::row;
use crate::host::HostMemory;
use crate::operation::rows_apart;

/// dst = the first k indices of each row in descending order.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let k = call.dst.shape[0];
    if k == 0 {
        return;
    }
    for i in rows_apart(call.x.shape) {
        let indices = sorted(&memory.read(&row(call.x, i)), Order::Descending);
        let indices: Vec<f64> = indices[..k].iter().map(|&i| i as f64).collect();
        memory.write(&row(call.dst, i), &indices);
    }
}
