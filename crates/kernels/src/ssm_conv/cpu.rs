//! `ssm_conv` on the CPU: tokens over threads, in f32.

use rayon::prelude::*;

use super::Call;
use crate::host::HostMemory;
use crate::recurrence::place;

/// Computes the results of the call.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let [taps, channels, ..] = call.weight.shape;
    let (kept, tokens) = (taps - 1, call.x.shape[1]);
    let x = memory.floats(&call.x);
    let states = memory.floats(&call.state);
    let weight = memory.floats(&call.weight);
    // Tap by tap, so that the channels of a tap are neighbours.
    let by_tap: Vec<Vec<f32>> = (0..taps).map(|j| weight.iter().skip(j).step_by(taps).copied().collect()).collect();
    let bias = call.bias.map(|bias| memory.floats(&bias));
    let zeros = vec![0.0; kept * channels];
    let sequences: Vec<_> = (call.sequences.ranges(tokens, memory).into_iter())
        .map(|(b, range)| (place(call.slots, b, call.state.shape[2], memory), range))
        .collect();
    // The sequence of each token.
    let mut owner = vec![None; tokens];
    sequences.iter().enumerate().for_each(|(s, (_, range))| owner[range.clone()].fill(Some(s)));
    // Column number n of a sequence's state and tokens together.
    let column = |(place, range): &(Option<usize>, std::ops::Range<usize>), n: usize| match n.checked_sub(kept) {
        Some(t) => &x[(range.start + t) * channels..][..channels],
        None => {
            let before = place.map_or(&zeros[..], |place| &states[place * kept * channels..][..kept * channels]);
            &before[n * channels..][..channels]
        }
    };
    let mut y = memory.floats(&call.y).into_owned();
    y.par_chunks_mut(channels).enumerate().for_each(|(t, y)| {
        let Some(owner) = owner[t] else { return };
        let sequence = &sequences[owner];
        match &bias {
            Some(bias) => y.copy_from_slice(bias),
            None => y.fill(0.0),
        }
        for (j, weight) in by_tap.iter().enumerate() {
            let x = column(sequence, t - sequence.1.start + j);
            y.iter_mut().zip(weight.iter().zip(x)).for_each(|(y, (w, x))| *y += w * x);
        }
        if call.silu {
            y.iter_mut().for_each(|y| *y /= 1.0 + (-*y).exp());
        }
    });
    let mut after = Vec::new();
    for sequence in sequences.iter().filter(|(place, range)| place.is_some() && !range.is_empty()) {
        let place = sequence.0.unwrap_or(0);
        after.extend((0..kept).map(|j| ([j, place, 0], column(sequence, sequence.1.len() + j).to_vec())));
    }
    memory.write_floats(&call.y, &y);
    after.iter().for_each(|(at, values)| memory.write_float_row(&call.state, *at, values));
}
