//! The definition of `head_mix`.

use super::Call;
use crate::host::HostMemory;

/// y = ((x - mean) / sqrt(variance + eps) * weight + bias + v sum(r k weight)) * f(gate) for every head.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let [size, heads, ..] = call.x.shape;
    let mut y = memory.read(&call.x);
    let (weight, bias) = (memory.read(&call.weight), memory.read(&call.bias));
    let bonus = call.bonus.map(|b| [b.r, b.k, b.v, b.weight].map(|t| memory.read(&t)));
    let gate = call.gate.map(|(t, function)| (memory.read(&t), function));
    for (row, head) in y.chunks_exact_mut(size).enumerate() {
        let channel = row % heads * size;
        let mean = head.iter().sum::<f64>() / size as f64;
        let variance = head.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / size as f64;
        let scale = (variance + f64::from(call.eps)).sqrt().recip();
        let sum = bonus.as_ref().map_or(0.0, |[r, k, _, weight]| {
            (0..size).map(|i| r[row * size + i] * k[row * size + i] * weight[channel + i]).sum()
        });
        for (i, x) in head.iter_mut().enumerate() {
            let at = row * size + i;
            *x = (*x - mean) * scale * weight[channel + i] + bias[channel + i];
            *x += bonus.as_ref().map_or(0.0, |[_, _, v, _]| v[at] * sum);
            *x *= gate.as_ref().map_or(1.0, |(gate, function)| function.map_or(gate[at], |f| f.of(gate[at])));
        }
    }
    memory.write(&call.y, &y);
}
