//! The definition of `token_mix`.

use super::Call;
use crate::host::HostMemory;

/// y[t, g] = x[t] + (x[t - 1] - x[t]) * (lerp[g] + extra[t, g]), with `before` for the token before the first.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let [width, tokens, groups, _] = call.y.shape;
    let (x, before) = (memory.read(&call.x), memory.read(&call.before));
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
    if call.keep {
        memory.write(&call.before, &x[(tokens - 1) * width..]);
    }
}
