//! The definition of `gated_delta_net`.

use super::{Call, Gate};
use crate::host::HostMemory;
use crate::recurrence::place;

/// Z = e^g Z, then Z += k beta (v - Z k), then y = scale Z q: token after token, Z the state of a head, a row of keys for each value.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let [size, heads, tokens, _] = call.v.shape;
    let (key_heads, gates) = (call.q.shape[1], call.g.shape[0]);
    let [q, k, v, g, beta] = [call.q, call.k, call.v, call.g, call.beta].map(|t| memory.read(&t));
    let of_gate: Vec<Vec<f64>> = call.gate.operands().map(|t| memory.read(&t)).collect();
    let (mut y, mut kept) = (memory.read(&call.y), memory.read(&call.state));
    let all = size * size * heads;
    for (sequence, range) in call.sequences.ranges(tokens, memory) {
        let place = place(call.slots, sequence, call.state.shape[3], memory);
        let mut states = place.map_or(vec![0.0; all], |place| kept[place * all..][..all].to_vec());
        for (t, h) in range.flat_map(|t| (0..heads).map(move |h| (t, h))) {
            let state = &mut states[h * size * size..][..size * size];
            let from = (t * key_heads + call.key_head(h)) * size;
            let (q, k) = (&q[from..][..size], &k[from..][..size]);
            let rate = 1.0 / (1.0 + (-beta[t * heads + h]).exp());
            let decay = |i: usize| {
                let at = (t * heads + h) * gates + i % gates;
                let of = |n: usize, i: usize| of_gate.get(n).map_or(0.0, |values| values[i]);
                decay(call.gate, g[at], of(0, h), of(1, h * gates + i % gates))
            };
            for j in 0..size {
                let row = &mut state[j * size..][..size];
                (0..size).for_each(|i| row[i] *= decay(i));
                let at = (t * heads + h) * size + j;
                let known: f64 = (0..size).map(|i| row[i] * k[i]).sum();
                let change = rate * (v[at] - known);
                (0..size).for_each(|i| row[i] += k[i] * change);
                y[at] = f64::from(call.scale) * (0..size).map(|i| row[i] * q[i]).sum::<f64>();
            }
        }
        if let Some(place) = place {
            kept[place * all..][..all].copy_from_slice(&states);
        }
    }
    memory.write(&call.y, &y);
    memory.write(&call.state, &kept);
}

/// What is left of a state.
fn decay(gate: Gate, g: f64, a: f64, bias: f64) -> f64 {
    let softplus = |x: f64| if x > 20.0 { x } else { x.exp().ln_1p() };
    match gate {
        Gate::Log => g.exp(),
        Gate::Softplus { .. } => (a * softplus(g + bias)).exp(),
        Gate::Bounded { bound, .. } => (f64::from(bound) / (1.0 + (-(a * (g + bias))).exp())).exp(),
    }
}

/// The same in chunks of this many tokens, as `chunked.comp` has it: the changes that a chunk's tokens make to the state solve a triangular
/// system. Exponentials are of differences alone.
#[cfg(test)]
pub(super) fn in_chunks(call: &Call, memory: &mut HostMemory, chunk: usize) {
    let [size, heads, tokens, _] = call.v.shape;
    let (key_heads, gates) = (call.q.shape[1], call.g.shape[0]);
    let [q, k, v, g, beta] = [call.q, call.k, call.v, call.g, call.beta].map(|t| memory.read(&t));
    let of_gate: Vec<Vec<f64>> = call.gate.operands().map(|t| memory.read(&t)).collect();
    let (mut y, mut kept) = (memory.read(&call.y), memory.read(&call.state));
    let all = size * size * heads;
    for (sequence, range) in call.sequences.ranges(tokens, memory) {
        let place = place(call.slots, sequence, call.state.shape[3], memory);
        let mut states = place.map_or(vec![0.0; all], |place| kept[place * all..][..all].to_vec());
        for (h, first) in (0..heads).flat_map(|h| range.clone().step_by(chunk).map(move |first| (h, first))) {
            let state = &mut states[h * size * size..][..size * size];
            let count = chunk.min(range.end - first);
            let row = |of: &[f64], t: usize, i: usize| of[((first + t) * key_heads + call.key_head(h)) * size + i];
            // Sums of logarithms over the tokens of the chunk up to each.
            let own_log = |t: usize, i: usize| {
                let at = ((first + t) * heads + h) * gates + i % gates;
                let of = |n: usize, i: usize| of_gate.get(n).map_or(0.0, |values| values[i]);
                decay(call.gate, g[at], of(0, h), of(1, h * gates + i % gates)).ln()
            };
            let up_to = |t: usize| (0..size).map(|i| (0..=t).map(|u| own_log(u, i)).sum()).collect();
            let logs: Vec<Vec<f64>> = (0..count).map(up_to).collect();
            let weight = |of: &[f64], t: usize, u: usize| -> f64 {
                (0..size).map(|i| row(of, t, i) * row(&k, u, i) * (logs[t][i] - logs[u][i]).exp()).sum()
            };
            let rate = |t: usize| 1.0 / (1.0 + (-beta[(first + t) * heads + h]).exp());
            for j in 0..size {
                let z = &mut state[j * size..][..size];
                let before = |of: &[f64], z: &[f64], t: usize| -> f64 {
                    (0..size).map(|i| z[i] * logs[t][i].exp() * row(of, t, i)).sum()
                };
                let at = |t: usize| ((first + t) * heads + h) * size + j;
                let mut changes = vec![0.0; count];
                for t in 0..count {
                    let known = before(&k, z, t) + (0..t).map(|u| weight(&k, t, u) * changes[u]).sum::<f64>();
                    changes[t] = rate(t) * (v[at(t)] - known);
                    let own: f64 = (0..=t).map(|u| weight(&q, t, u) * changes[u]).sum();
                    y[at(t)] = f64::from(call.scale) * (before(&q, z, t) + own);
                }
                let last = &logs[count - 1];
                for i in 0..size {
                    let added = (0..count).map(|u| changes[u] * (last[i] - logs[u][i]).exp() * row(&k, u, i));
                    z[i] = last[i].exp() * z[i] + added.sum::<f64>();
                }
            }
        }
        if let Some(place) = place {
            kept[place * all..][..all].copy_from_slice(&states);
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
        // The weights of pairs are computed for every value again: small heads are enough.
        for case in super::super::cases::cases(Level::Small).into_iter().filter(|case| !case.name.contains("S=128")) {
            let (call, _, memory) = case.build();
            let crate::Call::GatedDeltaNet(call) = call else { panic!("{} is another operation", case.name) };
            for chunk in [1, 7, 32] {
                assert_same(&memory, &case.name, &call.into(), |memory| in_chunks(&call, memory, chunk));
            }
        }
    }
}
