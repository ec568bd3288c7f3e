//! The definition of `rms_norm`.

use super::Call;
use crate::host::HostMemory;

/// y = x / sqrt(mean(x^2) + eps) * weight, row by row.
pub fn reference(call: &Call, memory: &mut HostMemory) {
    let cols = call.x.shape[0];
    let weight = call.weight.map(|w| memory.read(&w));
    let mut y = memory.read(&call.x);
    for row in y.chunks_exact_mut(cols) {
        let mean = row.iter().map(|v| v * v).sum::<f64>() / cols as f64;
        let scale = 1.0 / (mean + f64::from(call.eps)).sqrt();
        for (i, v) in row.iter_mut().enumerate() {
            *v *= scale * weight.as_ref().map_or(1.0, |w| w[i]);
        }
    }
    memory.write(&call.y, &y);
}
