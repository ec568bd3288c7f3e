//! `gated_delta_net` on the CPU: heads over threads, in f32.

use fearless_simd::prelude::*;
use fearless_simd::{Simd, dispatch, f32x16};
use rayon::prelude::*;

use super::{Call, Gate};
use crate::host::HostMemory;
use crate::recurrence::place;
use crate::simd::{level, load};

/// Computes the results of the call.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let [size, heads, tokens, _] = call.v.shape;
    let (key_heads, gates) = (call.q.shape[1], call.g.shape[0]);
    let [q, k, v, g, beta] = [call.q, call.k, call.v, call.g, call.beta].map(|t| memory.floats(&t).into_owned());
    let of_gate: Vec<Vec<f32>> = call.gate.operands().map(|t| memory.floats(&t).into_owned()).collect();
    let mut y = memory.floats(&call.y).into_owned();
    let mut kept = memory.floats(&call.state).into_owned();
    let all = size * size * heads;
    for (sequence, range) in call.sequences.ranges(tokens, memory) {
        if range.is_empty() {
            continue;
        }
        let place = place(call.slots, sequence, call.state.shape[3], memory);
        let mut states = place.map_or(vec![0.0; all], |place| kept[place * all..][..all].to_vec());
        // Each head's results for all tokens, then back in the order of tokens.
        let results: Vec<Vec<f32>> = (states.par_chunks_mut(size * size).enumerate())
            .map(|(h, state)| {
                let mut of_head = vec![0.0; range.len() * size];
                let mut decays = vec![0.0; size];
                for (t, y) in range.clone().zip(of_head.chunks_exact_mut(size)) {
                    let from = (t * key_heads + call.key_head(h)) * size;
                    let at = t * heads + h;
                    let rate = 1.0 / (1.0 + (-beta[at]).exp());
                    let of = |n: usize, i: usize| of_gate.get(n).map_or(0.0, |values| values[i]);
                    let decay_of = |i: usize| decay(call.gate, g[at * gates + i], of(0, h), of(1, h * gates + i));
                    match gates {
                        1 => decays.fill(decay_of(0)),
                        _ => decays.iter_mut().enumerate().for_each(|(i, to)| *to = decay_of(i)),
                    }
                    let (q, k, v) = (&q[from..][..size], &k[from..][..size], &v[at * size..][..size]);
                    dispatch!(level(), simd => {
                        for ((row, v), y) in state.chunks_exact_mut(size).zip(v).zip(y) {
                            *y = call.scale * update(simd, row, [&decays, q, k], rate, *v);
                        }
                    });
                }
                of_head
            })
            .collect();
        for (h, of_head) in results.iter().enumerate() {
            for (t, from) in range.clone().zip(of_head.chunks_exact(size)) {
                y[(t * heads + h) * size..][..size].copy_from_slice(from);
            }
        }
        if let Some(place) = place {
            kept[place * all..][..all].copy_from_slice(&states);
        }
    }
    memory.write_floats(&call.y, &y);
    memory.write_floats(&call.state, &kept);
}

/// The next row of a state, and its sum with q.
#[inline(always)]
fn update<S: Simd>(simd: S, row: &mut [f32], [decays, q, k]: [&[f32]; 3], rate: f32, v: f32) -> f32 {
    let (whole, zero) = (row.len() / 16 * 16, f32x16::splat(simd, 0.0));
    let mut sums = zero;
    for (i, z) in row.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let decayed = f32x16::load_array_ref(simd, z) * load(simd, &decays[16 * i..]);
        sums = decayed.mul_add(load(simd, &k[16 * i..]), sums);
        decayed.store_array(z);
    }
    let mut known: f32 = sums.to_array().iter().sum();
    for i in whole..row.len() {
        row[i] *= decays[i];
        known += row[i] * k[i];
    }
    let change = rate * (v - known);
    let mut sums = zero;
    for (i, z) in row.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let next = load(simd, &k[16 * i..]).mul_add(f32x16::splat(simd, change), f32x16::load_array_ref(simd, z));
        sums = next.mul_add(load(simd, &q[16 * i..]), sums);
        next.store_array(z);
    }
    let mut sum: f32 = sums.to_array().iter().sum();
    for i in whole..row.len() {
        row[i] += k[i] * change;
        sum += row[i] * q[i];
    }
    sum
}

fn decay(gate: Gate, g: f32, a: f32, bias: f32) -> f32 {
    let softplus = |x: f32| if x > 20.0 { x } else { x.exp().ln_1p() };
    match gate {
        Gate::Log => g.exp(),
        Gate::Softplus { .. } => (a * softplus(g + bias)).exp(),
        Gate::Bounded { bound, .. } => (bound / (1.0 + (-(a * (g + bias))).exp())).exp(),
    }
}
