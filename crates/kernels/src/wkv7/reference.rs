//! The definition of `wkv7`.

use super::Call;
use crate::host::HostMemory;
use crate::recurrence::Layout;

/// S = S diag(w_t) + (S a_t) b_t + v_t k_t and y_t = S r_t, token after token.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let layout = Layout::new(super::NAME, &call.y, call.sequences);
    let s = layout.head_size;
    let [r, w, k, v, a, b] = [call.r, call.w, call.k, call.v, call.a, call.b].map(|t| memory.read(&t));
    let [mut y, mut states] = [call.y, call.state_in].map(|t| memory.read(&t));
    for [sequence, t, h] in layout.steps(memory) {
        let token = (t * layout.heads + h) * s;
        let state = &mut states[(sequence * layout.heads + h) * s * s..][..s * s];
        for (i, row) in state.chunks_exact_mut(s).enumerate() {
            let sa: f64 = (0..s).map(|j| a[token + j] * row[j]).sum();
            for j in 0..s {
                row[j] = w[token + j] * row[j] + v[token + i] * k[token + j] + sa * b[token + j];
            }
            y[token + i] = (0..s).map(|j| r[token + j] * row[j]).sum();
        }
    }
    memory.write(&call.y, &y);
    memory.write(&call.state_out, &states);
}
