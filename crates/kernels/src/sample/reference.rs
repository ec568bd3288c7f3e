//! The definition of `sample`. Tokens are compared by whole numbers and by f32 numbers that are the same on every device
//! (`numbers.rs`); log-probabilities are in f64.

use std::cmp::Reverse;

use super::numbers::{gumbel, order_key, score, spread, weight};
use super::row::{WHOLE, Words, mean_distance};
use super::{Call, WORDS};
use crate::host::HostMemory;

/// token = the draw of each row; log-probabilities of the logits as they came in.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let [vocab, rows, ..] = call.logits.shape;
    let n_top = call.logprobs.map_or(0, |l| l.ids.shape[0]);
    let logits: Vec<f32> = memory.read(&call.logits).into_iter().map(|x| x as f32).collect();
    let positions = memory.read(&call.positions);
    let (mut tokens, mut chosen) = (vec![0.0; rows], vec![0.0; rows]);
    let (mut top_ids, mut top_values) = (vec![0.0; n_top * rows], vec![0.0; n_top * rows]);
    for row in 0..rows {
        let raw = &logits[row * vocab..(row + 1) * vocab];
        if positions[row] < 0.0 {
            continue;
        }
        let words: Vec<i32> = memory.read(&call.settings.narrow(1, row, 1)).iter().map(|x| *x as i32).collect();
        let words = Words::of(&words[..WORDS]);
        let position = positions[row] as u32;
        let adjusted = adjust(call, memory, row, (&words, position), raw);
        let broken = raw.iter().chain(&adjusted).any(|x| x.is_nan()) || (words.cuts() && !call.cuts);
        let Some(token) = choose(&words, position, &adjusted).filter(|_| !broken) else {
            tokens[row] = -1.0;
            continue;
        };
        tokens[row] = token as f64;
        if call.logprobs.is_some() {
            let mut order: Vec<usize> = (0..vocab).collect();
            order.sort_by_key(|&id| (Reverse(order_key(raw[id])), id));
            let most = f64::from(raw[order[0]]);
            // An infinite logit has all the probability.
            let below = |id: usize| if f64::from(raw[id]) == most { 0.0 } else { f64::from(raw[id]) - most };
            let sum: f64 = (0..vocab).map(|id| below(id).exp()).sum();
            chosen[row] = below(token) - sum.ln();
            for (i, &id) in order[..n_top].iter().enumerate() {
                top_ids[row * n_top + i] = id as f64;
                top_values[row * n_top + i] = below(id) - sum.ln();
            }
        }
    }
    memory.write(&call.token, &tokens);
    if let Some(logprobs) = call.logprobs {
        memory.write(&logprobs.chosen, &chosen);
        if n_top > 0 {
            memory.write(&logprobs.ids, &top_ids);
            memory.write(&logprobs.values, &top_values);
        }
    }
}

/// Bias, mask, penalties.
fn adjust(call: &Call, memory: &HostMemory, row: usize, (words, position): (&Words, u32), raw: &[f32]) -> Vec<f32> {
    let mut logits = raw.to_vec();
    if let Some(bias) = call.bias {
        let (ids, values) = (memory.read(&bias.ids.narrow(1, row, 1)), memory.read(&bias.values.narrow(1, row, 1)));
        for (id, logit) in logits.iter_mut().enumerate() {
            let last = (0..words.biases.min(ids.len())).rfind(|&i| ids[i] == id as f64);
            *logit += last.map_or(0.0, |i| values[i] as f32);
        }
    }
    if let Some(mask) = call.mask.filter(|_| words.masked) {
        let mask = memory.read(&mask.narrow(1, row, 1));
        for (id, logit) in logits.iter_mut().enumerate() {
            if (mask[id / 32] as i32) >> (id % 32) & 1 == 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
    if let Some(recent) = call.recent {
        let recent = memory.read(&recent.narrow(1, row, 1));
        let back = words.last_n.min(recent.len()).min(position as usize + 1);
        let last: Vec<f64> = (0..back).map(|i| recent[(position as usize - i) % recent.len()]).collect();
        for (id, logit) in logits.iter_mut().enumerate() {
            let count = last.iter().filter(|&&x| x == id as f64).count();
            if count > 0 {
                *logit *= if *logit > 0.0 { words.inverse_repetition } else { words.repetition };
                *logit -= count as f32 * words.frequency + words.presence;
            }
        }
    }
    logits
}

/// Cuts and draw.
fn choose(words: &Words, position: u32, logits: &[f32]) -> Option<usize> {
    let by_logit = |&id: &usize| (Reverse(order_key(logits[id])), id);
    let mut kept: Vec<usize> = (0..logits.len()).filter(|&id| logits[id] > f32::NEG_INFINITY).collect();
    kept.sort_by_key(by_logit);
    let most = logits[*kept.first()?];
    if words.temperature <= 0.0 {
        return kept.first().copied();
    }
    let distance = |id: usize| if logits[id] == most { 0.0 } else { most - logits[id] };
    let total = |kept: &[usize]| kept.iter().map(|&id| u64::from(weight(distance(id)))).sum::<u64>();
    // The shortest beginning with this weight.
    let beginning = |kept: &[usize], least: u64| {
        let mut sum = 0;
        let reaches = |&id: &usize| {
            sum += u64::from(weight(distance(id)));
            sum >= least
        };
        kept.iter().position(reaches).map_or(kept.len(), |i| i + 1)
    };
    if words.top_k > 0 {
        kept.truncate(words.top_k);
    }
    if words.typical_p < WHOLE {
        let mean = mean_distance(kept.iter().map(|&id| u64::from(spread(distance(id)))).sum(), total(&kept));
        kept.sort_by_key(|&id| ((distance(id) - mean).abs().to_bits(), id));
        kept.truncate(beginning(&kept, words.typical_p_of(total(&kept))));
        kept.sort_by_key(by_logit);
    }
    if words.top_p < WHOLE {
        kept.truncate(beginning(&kept, words.top_p_of(total(&kept))));
    }
    if words.ln_min_p > f32::NEG_INFINITY {
        let least = logits[kept[0]] + words.ln_min_p;
        kept.retain(|&id| logits[id] >= least);
    }
    let score = |id: usize| score(logits[id], words.temperature, gumbel(words.seed, position, id as u32));
    kept.into_iter().min_by_key(|&id| (Reverse(order_key(score(id))), id))
}
