//! `ssm_scan` on the CPU: heads over threads, in f32.

use fearless_simd::prelude::*;
use fearless_simd::{Simd, dispatch, f32x16};
use rayon::prelude::*;

use super::Call;
use crate::host::HostMemory;
use crate::recurrence::place;
use crate::simd::{exp, level, load};
use crate::tensor::Tensor;

/// Computes the results of the call.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let [channels, heads, tokens, _] = call.x.shape;
    let [states, groups, ..] = call.b.shape;
    let size = states * channels;
    let [x, dt, a, b, c] = [call.x, call.dt, call.a, call.b, call.c].map(|t| memory.floats(&t).into_owned());
    let of_heads = |t: Option<Tensor>| t.map_or(vec![0.0; heads], |t| memory.floats(&t).into_owned());
    let (bias, skip) = (of_heads(call.dt_bias), of_heads(call.skip));
    let mut y = memory.floats(&call.y).into_owned();
    let mut kept = memory.floats(&call.state).into_owned();
    let decays = a.len() / heads;
    for (sequence, range) in call.sequences.ranges(tokens, memory) {
        if range.is_empty() {
            continue;
        }
        let place = place(call.slots, sequence, call.state.shape[3], memory);
        let mut state =
            place.map_or(vec![0.0; size * heads], |place| kept[place * size * heads..][..size * heads].to_vec());
        // Each head's results for all tokens, then back in the order of tokens.
        let results: Vec<Vec<f32>> = (state.par_chunks_mut(size).enumerate())
            .map(|(h, state)| {
                let mut of_head = vec![0.0; range.len() * channels];
                for (t, y) in range.clone().zip(of_head.chunks_exact_mut(channels)) {
                    let step = dt[t * heads + h] + bias[h];
                    let step = if step > 20.0 { step } else { step.exp().ln_1p() };
                    let group = (t * groups + h / (heads / groups)) * states;
                    let (b, c) = (&b[group..][..states], &c[group..][..states]);
                    let a = &a[h * decays..][..decays];
                    let x = &x[(t * heads + h) * channels..][..channels];
                    dispatch!(level(), simd => {
                        for ((row, x), y) in state.chunks_exact_mut(states).zip(x).zip(y) {
                            *y = skip[h] * x + update(simd, row, [a, b, c], step, step * x);
                        }
                    });
                }
                of_head
            })
            .collect();
        for (h, of_head) in results.iter().enumerate() {
            for (t, from) in range.clone().zip(of_head.chunks_exact(channels)) {
                y[(t * heads + h) * channels..][..channels].copy_from_slice(from);
            }
        }
        if let Some(place) = place {
            kept[place * size * heads..][..size * heads].copy_from_slice(&state);
        }
    }
    memory.write_floats(&call.y, &y);
    memory.write_floats(&call.state, &kept);
}

/// The next state of one channel, and its sum with c.
#[inline(always)]
fn update<S: Simd>(simd: S, row: &mut [f32], [a, b, c]: [&[f32]; 3], step: f32, x: f32) -> f32 {
    let one = if let [a] = a { (step * a).exp() } else { 0.0 };
    let mut sums = f32x16::splat(simd, 0.0);
    let whole = row.len() / 16 * 16;
    for (i, s) in row.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let at = 16 * i;
        let decay = match a {
            [_] => f32x16::splat(simd, one),
            a => exp(simd, load(simd, &a[at..]) * step),
        };
        let next = decay.mul_add(f32x16::load_array_ref(simd, s), load(simd, &b[at..]) * x);
        sums = next.mul_add(load(simd, &c[at..]), sums);
        next.store_array(s);
    }
    let mut sum: f32 = sums.to_array().iter().sum();
    for i in whole..row.len() {
        let decay = if a.len() == 1 { one } else { (step * a[i]).exp() };
        row[i] = decay * row[i] + x * b[i];
        sum += row[i] * c[i];
    }
    sum
}
