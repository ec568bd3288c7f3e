//! `token_mix` on the CPU: columns over threads, in f32 but for the sums of the norm.

use rayon::prelude::*;

use super::{Call, Norm};
use crate::host::HostMemory;
use crate::norm::reference::standardise;

/// Computes the results of the call.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let [width, tokens, ..] = call.y.shape;
    let mut x = memory.floats(&call.x);
    if let Some(norm) = &call.norm {
        norm_columns(norm, x.to_mut(), memory);
    }
    let before = memory.floats(&call.before);
    let mut lerp = memory.floats(&call.lerp);
    if let Some(another) = &call.another {
        lerp.to_mut().extend_from_slice(&memory.floats(another));
    }
    let extra = call.extra.map(|t| memory.floats(&t));
    let mut y = vec![0.0; call.y.len()];
    y.par_chunks_mut(width).enumerate().with_min_len(4).for_each(|(row, y)| {
        let (g, t) = (row / tokens, row % tokens);
        let column = |t: usize| &x[t * width..][..width];
        let (x, earlier) = (column(t), if t > 0 { column(t - 1) } else { &before });
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
        memory.write_floats(&normed, &x);
    }
    if call.keep {
        memory.write_floats(&call.before, &x[(tokens - 1) * width..]);
    }
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
