//! The definition of `token_mix`.

use super::Call;
use crate::host::HostMemory;
use crate::norm::reference::standardise;

/// y[t, g] = x[t] + (x[t - 1] - x[t]) * (lerp[g] + extra[t, g]), with `before` for the token before the first. The norm, where there is
/// one, goes before all of that.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let [width, tokens, groups, _] = call.y.shape;
    let (mut x, before) = (memory.read(&call.x), memory.read(&call.before));
    if let Some(norm) = call.norm {
        let (weight, bias) = (memory.read(&norm.weight), memory.read(&norm.bias));
        for column in x.chunks_exact_mut(width) {
            standardise(column, f64::from(norm.eps));
            for c in 0..width {
                column[c] = column[c] * weight[c] + bias[c];
            }
        }
    }
    let mut lerp = memory.read(&call.lerp);
    lerp.extend(call.another.iter().flat_map(|t| memory.read(t)));
    let extra = call.extra.map(|t| memory.read(&t));
    let mut y = vec![0.0; call.y.len()];
    for g in 0..groups {
        for t in 0..tokens {
            for c in 0..width {
                let at = (g * tokens + t) * width + c;
                let earlier = if t > 0 { x[(t - 1) * width + c] } else { before[c] };
                let factor = lerp[g * width + c] + extra.as_ref().map_or(0.0, |extra| extra[at]);
                y[at] = x[t * width + c] + (earlier - x[t * width + c]) * factor;
            }
        }
    }
    memory.write(&call.y, &y);
    if let Some(normed) = call.norm.and_then(|norm| norm.y) {
        memory.write(&normed, &x);
    }
    if call.keep {
        memory.write(&call.before, &x[(tokens - 1) * width..]);
    }
}
