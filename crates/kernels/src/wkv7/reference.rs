//! The definition of `wkv7`.

use super::Call;
use crate::host::HostMemory;
use crate::recurrence::Layout;

/// S = S diag(w_t) + (S a_t) b_t + v_t k_t and y_t = S r_t, token after token.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let layout = Layout::new(super::NAME, &call.y, call.sequences, call.slots);
    let s = layout.head_size;
    let [r, w, k, v, a, b] = [call.r, call.w, call.k, call.v, call.a, call.b].map(|t| memory.read(&t));
    let mut y = memory.read(&call.y);
    for sequence in 0..call.sequences.count() {
        let mut states = layout.load(&call.state_in, sequence, memory);
        for [t, h] in layout.steps(sequence, memory) {
            let token = (t * layout.heads + h) * s;
            let state = &mut states[h * s * s..][..s * s];
            for (i, row) in state.chunks_exact_mut(s).enumerate() {
                let sa: f64 = (0..s).map(|j| a[token + j] * row[j]).sum();
                for j in 0..s {
                    row[j] = w[token + j] * row[j] + v[token + i] * k[token + j] + sa * b[token + j];
                }
                y[token + i] = (0..s).map(|j| r[token + j] * row[j]).sum();
            }
        }
        layout.store(&call.state_out, sequence, &states, memory);
    }
    memory.write(&call.y, &y);
}
