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

/// The same in chunks of this many tokens, as `chunked.comp` has it: what a chunk takes from itself, what it takes from the state before it,
/// and the state after it, with exponentials of differences alone.
#[cfg(test)]
pub(super) fn in_chunks(call: &Call, memory: &mut HostMemory, chunk: usize) {
    let [channels, heads, tokens, _] = call.x.shape;
    let [states, groups, ..] = call.b.shape;
    let [x, dt, a, b, c] = [call.x, call.dt, call.a, call.b, call.c].map(|t| memory.read(&t));
    let of_heads = |t: Option<crate::tensor::Tensor>| t.map_or(vec![0.0; heads], |t| memory.read(&t));
    let (bias, skip) = (of_heads(call.dt_bias), of_heads(call.skip));
    let (mut y, mut kept) = (memory.read(&call.y), memory.read(&call.state));
    let size = states * channels * heads;
    for (sequence, range) in call.sequences.ranges(tokens, memory) {
        let place = place(call.slots, sequence, call.state.shape[3], memory);
        let mut all = place.map_or(vec![0.0; size], |place| kept[place * size..][..size].to_vec());
        for h in 0..heads {
            let state = &mut all[h * states * channels..][..states * channels];
            for first in range.clone().step_by(chunk) {
                let of_chunk = first..(first + chunk).min(range.end);
                let step = |t: usize| {
                    let step = dt[t * heads + h] + bias[h];
                    if step > 20.0 { step } else { step.exp().ln_1p() }
                };
                let log = |t: usize| (first..=t).map(|u| step(u) * a[h]).sum::<f64>();
                let row = |of: &[f64], t: usize, n: usize| of[(t * groups + h / (heads / groups)) * states + n];
                for t in of_chunk.clone() {
                    for p in 0..channels {
                        let at = |t: usize| (t * heads + h) * channels + p;
                        let own = (first..=t).map(|u| {
                            let product: f64 = (0..states).map(|n| row(&c, t, n) * row(&b, u, n)).sum();
                            product * (log(t) - log(u)).exp() * step(u) * x[at(u)]
                        });
                        let before: f64 = (0..states).map(|n| state[p * states + n] * row(&c, t, n)).sum();
                        y[at(t)] = own.sum::<f64>() + log(t).exp() * before + skip[h] * x[at(t)];
                    }
                }
                let last = log(of_chunk.end - 1);
                for (i, s) in state.iter_mut().enumerate() {
                    let (p, n) = (i / states, i % states);
                    let added = of_chunk
                        .clone()
                        .map(|u| (last - log(u)).exp() * step(u) * x[(u * heads + h) * channels + p] * row(&b, u, n));
                    *s = last.exp() * *s + added.sum::<f64>();
                }
            }
        }
        if let Some(place) = place {
            kept[place * size..][..size].copy_from_slice(&all);
        }
    }
    memory.write(&call.y, &y);
    memory.write(&call.state, &kept);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Level;
    use crate::chunks::assert_same;

    #[test]
    fn chunks_give_what_tokens_one_by_one_give() {
        for case in super::super::cases::cases(Level::Small) {
            let (call, _, memory) = case.build();
            let crate::Call::SsmScan(call) = call else { panic!("{} is another operation", case.name) };
            if call.a.shape[0] > 1 {
                continue;
            }
            for chunk in [1, 7, 16, 64] {
                assert_same(&memory, &case.name, &call.into(), |memory| in_chunks(&call, memory, chunk));
            }
        }
    }
}
