//! The definition of `ssm_conv`.

use super::Call;
use crate::host::HostMemory;
use crate::recurrence::place;

/// y[c, t] = act(bias[c] + sum over j of weight[j, c] * x[c, t - (W - 1) + j]), with the columns of the state before the first token.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let [taps, channels, ..] = call.weight.shape;
    let (kept, tokens) = (taps - 1, call.x.shape[1]);
    let (x, weight) = (memory.read(&call.x), memory.read(&call.weight));
    let bias = call.bias.map_or(vec![0.0; channels], |bias| memory.read(&bias));
    let (mut y, mut states) = (memory.read(&call.y), memory.read(&call.state));
    for (b, range) in call.sequences.ranges(tokens, memory) {
        if range.is_empty() {
            continue;
        }
        let place = place(call.slots, b, call.state.shape[2], memory);
        let mut before = vec![0.0; kept * channels];
        if let Some(place) = place {
            before.copy_from_slice(&states[place * kept * channels..][..kept * channels]);
        }
        // Column number n of the state and the tokens together.
        let column = |n: usize, c: usize| match n.checked_sub(kept) {
            None => before[n * channels + c],
            Some(t) => x[(range.start + t) * channels + c],
        };
        for (n, t) in range.clone().enumerate() {
            for c in 0..channels {
                let sum: f64 = (0..taps).map(|j| weight[c * taps + j] * column(n + j, c)).sum();
                let sum = sum + bias[c];
                y[t * channels + c] = if call.silu { sum / (1.0 + (-sum).exp()) } else { sum };
            }
        }
        if let Some(place) = place {
            for j in 0..kept {
                for c in 0..channels {
                    states[(place * kept + j) * channels + c] = column(range.len() + j, c);
                }
            }
        }
    }
    memory.write(&call.y, &y);
    memory.write(&call.state, &states);
}
