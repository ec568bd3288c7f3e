//! `token_mix` on the CPU: columns over threads, in f32 but for the sums of the norm.

use rayon::prelude::*;

use super::{Call, Norm};
use crate::host::HostMemory;
use crate::norm::reference::standardise;
use crate::recurrence::place;

/// Computes the results of the call.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let [width, tokens, ..] = call.y.shape;
    let mut x = memory.floats(&call.x);
    if let Some(norm) = &call.norm {
        norm_columns(norm, x.to_mut(), memory);
    }
    let before = memory.floats(&call.before);
    // Of each token: what comes before it, or nothing if the token is of no sequence.
    let mut earlier: Vec<Option<Earlier>> = vec![None; tokens];
    let mut kept = Vec::new();
    for (b, range) in call.sequences.ranges(tokens, memory) {
        let place = place(call.slots, b, call.before.shape[1], memory);
        earlier[range.clone()].fill(Some(Earlier::Neighbour));
        if let Some(last) = range.clone().next_back() {
            earlier[range.start] = Some(Earlier::Kept(place));
            kept.extend(place.map(|place| (place, last)));
        }
    }
    let zeros = vec![0.0; width];
    let mut lerp = memory.floats(&call.lerp);
    if let Some(another) = &call.another {
        lerp.to_mut().extend_from_slice(&memory.floats(another));
    }
    let extra = call.extra.map(|t| memory.floats(&t));
    let mut y = memory.floats(&call.y).into_owned();
    y.par_chunks_mut(width).enumerate().with_min_len(4).for_each(|(row, y)| {
        let (g, t) = (row / tokens, row % tokens);
        let column = |t: usize| &x[t * width..][..width];
        let x = column(t);
        let earlier = match earlier[t] {
            None => return,
            Some(Earlier::Neighbour) => column(t - 1),
            Some(Earlier::Kept(place)) => place.map_or(&zeros[..], |place| &before[place * width..][..width]),
        };
        // What depends on the token, then the blend in its place.
        match &extra {
            Some(extra) => y.copy_from_slice(&extra[row * width..][..width]),
            None => y.fill(0.0),
        }
        let lerp = &lerp[g * width..][..width];
        for (y, ((x, earlier), lerp)) in y.iter_mut().zip(x.iter().zip(earlier).zip(lerp)) {
            *y = x + (earlier - x) * (lerp + *y);
        }
    });
    let x = x.into_owned();
    memory.write_floats(&call.y, &y);
    if let Some(normed) = call.norm.and_then(|norm| norm.y) {
        let used = (0..tokens).filter(|t| earlier[*t].is_some());
        used.for_each(|t| memory.write_float_row(&normed, [t, 0, 0], &x[t * width..][..width]));
    }
    if call.keep {
        for (place, last) in kept {
            memory.write_float_row(&call.before, [place, 0, 0], &x[last * width..][..width]);
        }
    }
}

/// What comes before a token.
#[derive(Clone, Copy)]
enum Earlier {
    /// The token before it.
    Neighbour,
    /// What is kept at this place, or zeros.
    Kept(Option<usize>),
}

fn norm_columns(norm: &Norm, x: &mut [f32], memory: &HostMemory) {
    let (weight, bias) = (memory.floats(&norm.weight), memory.floats(&norm.bias));
    x.par_chunks_mut(weight.len()).for_each(|column| {
        // Long sums want f64, and one column of it costs little.
        let mut exact: Vec<f64> = column.iter().map(|x| f64::from(*x)).collect();
        standardise(&mut exact, f64::from(norm.eps));
        for (x, (v, (weight, bias))) in column.iter_mut().zip(exact.iter().zip(weight.iter().zip(bias.iter()))) {
            *x = *v as f32 * weight + bias;
        }
    });
}
