//! The definition of `flash_attention`.

use super::{Call, Mask, Window};
use crate::host::HostMemory;

/// What a query may see: the additive term of key j, or nothing.
struct View<'a> {
    call: &'a Call,
    mask: Vec<f64>,
    positions: Vec<f64>,
    lengths: Vec<f64>,
}

impl View<'_> {
    fn new<'a>(call: &'a Call, memory: &HostMemory) -> View<'a> {
        let (mask, positions, lengths) = match &call.mask {
            Mask::None => (Vec::new(), Vec::new(), Vec::new()),
            Mask::Explicit(mask) => (memory.read(mask), Vec::new(), Vec::new()),
            Mask::Causal { positions, length, .. } => (Vec::new(), memory.read(positions), memory.read(length)),
        };
        View { call, mask, positions, lengths }
    }

    /// The term added to the score of key `j`, before the slope; `None` where the key is hidden.
    fn term(&self, j: usize, [n, h, b]: [usize; 3], sequence: usize) -> Option<f64> {
        match &self.call.mask {
            Mask::None => Some(0.0),
            Mask::Explicit(mask) => {
                let [kv, rows, m2, m3] = mask.shape;
                let term = self.mask[(((b % m3) * m2 + h % m2) * rows + n) * kv + j];
                (term != f64::NEG_INFINITY).then_some(term)
            }
            Mask::Causal { window, both, .. } => {
                let [tokens, batch] = [self.call.q.shape[1], self.call.q.shape[3]];
                let p = self.positions[b * tokens + n] as i64;
                let last = if self.call.sees_ahead() { self.positions[(batch + b) * tokens + n] as i64 } else { p };
                let length = self.lengths[if self.lengths.len() > 1 { sequence } else { 0 }] as i64;
                let j = j as i64;
                let away = if *both { (p - j).abs() } else { p - j };
                let near = window.is_none_or(|w| match w {
                    Window::Last(size) => away < size as i64,
                    Window::Chunk(size) => j / size as i64 == p / size as i64,
                });
                let seen = p >= 0 && (*both || j <= last) && j < length && near;
                seen.then(|| if self.call.max_bias > 0.0 { -away as f64 } else { 0.0 })
            }
        }
    }

    /// The row of the biases of distances that key `j` gets.
    fn distance(&self, j: usize, [n, b]: [usize; 2], reach: usize) -> usize {
        let (p, reach) = (self.positions[b * self.call.q.shape[1] + n] as i64, reach as i64);
        ((j as i64 - p).clamp(-reach, reach) + reach) as usize
    }
}

/// Softmax of scaled scores times values, one query row after the other; a row that sees no key gives zeros.
pub(crate) fn reference(call: &Call, memory: &mut HostMemory) {
    let [hsk, tokens, heads, batch] = call.q.shape;
    let [hsv, _, kv_heads, kv_batch] = call.v.shape;
    let rows = call.k.shape[1];
    let (q, k, v) = (memory.read(&call.q), memory.read(&call.k), memory.read(&call.v));
    let sinks = call.sinks.map(|s| memory.read(&s));
    let distances = call.distances.map(|t| memory.read(&t));
    let sequences = call.sequences.map(|s| memory.read(&s));
    let table = call.pages.map(|p| memory.read(&p.table));
    let view = View::new(call, memory);
    let mut out = vec![0.0; call.out.len()];
    for b in 0..batch {
        for n in 0..tokens {
            let sequence = sequences.as_ref().map_or(b, |s| s[n] as usize);
            let kv_b = if call.pages.is_some() { 0 } else { sequence * kv_batch / call.sequence_count() };
            let row_of = |j: usize| match (&table, call.pages) {
                (Some(table), Some(pages)) => {
                    table[sequence * pages.table.shape[0] + j / pages.size] as usize * pages.size + j % pages.size
                }
                _ => j,
            };
            for h in 0..heads {
                let slope = slope(h, heads, f64::from(call.max_bias));
                let kv_head = kv_b * kv_heads + h / (heads / kv_heads);
                let q_row = &q[((b * heads + h) * tokens + n) * hsk..][..hsk];
                let mut scores = Vec::new();
                for j in 0..call.keys() {
                    let Some(term) = view.term(j, [n, h, b], sequence) else { continue };
                    let row = kv_head * rows + row_of(j);
                    let dot: f64 = q_row.iter().zip(&k[row * hsk..]).map(|(a, b)| a * b).sum();
                    let cap = f64::from(call.logit_softcap);
                    let score = f64::from(call.scale) * dot;
                    let score = if cap != 0.0 { cap * (score / cap).tanh() } else { score };
                    let lean = match (&distances, call.reach()) {
                        (Some(distances), Some(reach)) => distances[view.distance(j, [n, b], reach) * heads + h],
                        _ => 0.0,
                    };
                    scores.push((row, score + slope * term + lean));
                }
                let sink = sinks.as_ref().map_or(f64::NEG_INFINITY, |s| s[h]);
                let result = &mut out[((b * tokens + n) * heads + h) * hsv..][..hsv];
                // The maximum passes NaN over; what is no number stays none.
                if scores.iter().any(|s| s.1.is_nan()) {
                    result.fill(f64::NAN);
                    continue;
                }
                let top = scores.iter().map(|s| s.1).fold(sink, f64::max);
                if scores.is_empty() || top == f64::NEG_INFINITY {
                    continue;
                }
                let sum = scores.iter().map(|s| (s.1 - top).exp()).sum::<f64>() + (sink - top).exp();
                for (row, score) in scores {
                    let weight = (score - top).exp() / sum;
                    result.iter_mut().zip(&v[row * hsv..]).for_each(|(o, v)| *o += weight * v);
                }
            }
        }
    }
    memory.write(&call.out, &out);
}

/// The slope of ALiBi for a head: a geometric series, with the heads past a power of two in between.
pub(super) fn slope(head: usize, heads: usize, max_bias: f64) -> f64 {
    if max_bias == 0.0 {
        return 1.0;
    }
    let n = 1usize << heads.max(1).ilog2();
    let steps = if head < n { (head + 1) as f64 } else { (head - n) as f64 + 0.5 };
    2f64.powf(-max_bias * steps / n as f64)
}
