//! The definition of `token_mix`.

use super::Call;
use crate::host::HostMemory;
use crate::norm::reference::standardise;
use crate::recurrence::place;

/// y[t, g] = x[t] + (x[t - 1] - x[t]) * (lerp[g] + extra[t, g]), with `before` for the token before the first of a sequence. The norm,
/// where there is one, goes before all of that.
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
    let mut normed = call.norm.and_then(|norm| norm.y).map_or(x.clone(), |y| memory.read(&y));
    let mut lerp = memory.read(&call.lerp);
    lerp.extend(call.another.iter().flat_map(|t| memory.read(t)));
    let extra = call.extra.map(|t| memory.read(&t));
    let (mut y, mut kept) = (memory.read(&call.y), before.clone());
    for (b, range) in call.sequences.ranges(tokens, memory) {
        let place = place(call.slots, b, call.before.shape[1], memory);
        for (g, t) in (0..groups).flat_map(|g| range.clone().map(move |t| (g, t))) {
            for c in 0..width {
                let at = (g * tokens + t) * width + c;
                let first = place.map_or(0.0, |place| before[place * width + c]);
                let earlier = if t > range.start { x[(t - 1) * width + c] } else { first };
                let factor = lerp[g * width + c] + extra.as_ref().map_or(0.0, |extra| extra[at]);
                y[at] = x[t * width + c] + (earlier - x[t * width + c]) * factor;
            }
        }
        if let (Some(place), Some(last)) = (place, range.clone().next_back()) {
            kept[place * width..][..width].copy_from_slice(&x[last * width..][..width]);
        }
        normed[range.start * width..range.end * width].copy_from_slice(&x[range.start * width..range.end * width]);
    }
    memory.write(&call.y, &y);
    if let Some(written) = call.norm.and_then(|norm| norm.y) {
        memory.write(&written, &normed);
    }
    if call.keep {
        memory.write(&call.before, &kept);
    }
}
