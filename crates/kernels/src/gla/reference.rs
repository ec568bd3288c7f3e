//! The definition of `gla`.

use super::Call;
use crate::host::HostMemory;
use crate::recurrence::Layout;

/// S = td_t S + k_t v_t and y_t = scale r_t S, token after token.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let layout = Layout::new(super::NAME, &call.y, call.sequences, call.slots);
    let s = layout.head_size;
    let [k, v, r, td] = [call.k, call.v, call.r, call.td].map(|t| memory.read(&t));
    let mut y = memory.read(&call.y);
    for sequence in 0..call.sequences.count() {
        let mut states = layout.load(&call.state_in, sequence, memory);
        for [t, h] in layout.steps(sequence, memory) {
            let token = (t * layout.heads + h) * s;
            let state = &mut states[h * s * s..][..s * s];
            y[token..token + s].fill(0.0);
            for i in 0..s {
                for j in 0..s {
                    let kv = k[token + i] * v[token + j];
                    let updated = td[token + i] * state[i * s + j] + kv;
                    y[token + j] += f64::from(call.scale) * r[token + i] * updated;
                    state[i * s + j] = updated;
                }
            }
        }
        layout.store(&call.state_out, sequence, &states, memory);
    }
    memory.write(&call.y, &y);
}
