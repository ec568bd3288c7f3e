//! The definition of `ssm_scan`.

use super::Call;
use crate::host::HostMemory;
use crate::recurrence::place;

/// D = softplus(dt + bias), s = exp(D a) s + D x b, y = sum of s c, plus skip x: token after token, for each head and each of its channels.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let [channels, heads, tokens, _] = call.x.shape;
    let [states, groups, ..] = call.b.shape;
    let decays = call.a.shape[0];
    let [x, dt, a, b, c] = [call.x, call.dt, call.a, call.b, call.c].map(|t| memory.read(&t));
    let of_heads = |t: Option<crate::tensor::Tensor>| t.map_or(vec![0.0; heads], |t| memory.read(&t));
    let (bias, skip) = (of_heads(call.dt_bias), of_heads(call.skip));
    let (mut y, mut kept) = (memory.read(&call.y), memory.read(&call.state));
    let size = states * channels * heads;
    for (sequence, range) in call.sequences.ranges(tokens, memory) {
        let place = place(call.slots, sequence, call.state.shape[3], memory);
        let mut state = place.map_or(vec![0.0; size], |place| kept[place * size..][..size].to_vec());
        for t in range {
            for h in 0..heads {
                let step = dt[t * heads + h] + bias[h];
                let step = if step > 20.0 { step } else { step.exp().ln_1p() };
                let group = (t * groups + h / (heads / groups)) * states;
                for p in 0..channels {
                    let at = (t * heads + h) * channels + p;
                    let row = &mut state[(h * channels + p) * states..][..states];
                    y[at] = skip[h] * x[at];
                    for n in 0..states {
                        let decay = (step * a[h * decays + n % decays]).exp();
                        row[n] = decay * row[n] + step * x[at] * b[group + n];
                        y[at] += row[n] * c[group + n];
                    }
                }
            }
        }
        if let Some(place) = place {
            kept[place * size..][..size].copy_from_slice(&state);
        }
    }
    memory.write(&call.y, &y);
    memory.write(&call.state, &kept);
}
