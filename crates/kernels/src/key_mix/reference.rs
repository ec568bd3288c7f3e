//! The definition of `key_mix`.

use super::Call;
use crate::host::HostMemory;
use crate::unary::Function::{ExpNegSigmoid, Sigmoid};

/// a = sigmoid(rate), kk = k k_k of length one in each head: lookup = -kk, replaced = kk a, k += k k_a (a - 1),
/// w = exp(-sigmoid(w) / sqrt(e)), v += (first - v) sigmoid(share).
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let [size, heads, ..] = call.k.shape;
    let [mut k, rate, mut w] = [call.k, call.rate, call.w].map(|t| memory.read(&t));
    let (k_k, k_a) = (memory.read(&call.k_k), memory.read(&call.k_a));
    let mut lookup = vec![0.0; k.len()];
    let mut replaced = vec![0.0; k.len()];
    for (row, head) in k.chunks_exact_mut(size).enumerate() {
        let channel = row % heads * size;
        let length = (0..size).map(|i| (head[i] * k_k[channel + i]).powi(2)).sum::<f64>().sqrt();
        for (i, k) in head.iter_mut().enumerate() {
            let (at, a) = (row * size + i, Sigmoid.of(rate[row * size + i]));
            let kk = *k * k_k[channel + i] / length.max(f64::from(call.eps));
            (lookup[at], replaced[at]) = (-kk, kk * a);
            *k += *k * k_a[channel + i] * (a - 1.0);
        }
    }
    w.iter_mut().for_each(|w| *w = ExpNegSigmoid.of(*w));
    if let Some(value) = call.value {
        let [mut v, first, share] = [value.v, value.first, value.share].map(|t| memory.read(&t));
        for ((v, first), share) in v.iter_mut().zip(first).zip(share) {
            *v += (first - *v) * Sigmoid.of(share);
        }
        memory.write(&value.v, &v);
    }
    memory.write(&call.k, &k);
    memory.write(&call.w, &w);
    memory.write(&call.lookup, &lookup);
    memory.write(&call.replaced, &replaced);
}
