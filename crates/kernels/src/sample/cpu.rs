//! `sample` at the speed of the CPU: rows on all threads, and no sorting of more tokens than the cuts leave.

use std::cmp::Reverse;

use fearless_simd::prelude::*;
use fearless_simd::{dispatch, f32x16};
use rayon::prelude::*;

use super::numbers::{MOST_GUMBEL, gumbel_of, order_key, score, spread, stream, weight};
use super::row::{WHOLE, Words, mean_distance};
use super::{Call, Row};
use crate::host::HostMemory;
use crate::simd::level;
use crate::tensor::Tensor;

/// What became of a row.
struct Drawn {
    token: i32,
    chosen: f64,
    top: Vec<(u32, f64)>,
}

/// token = the draw of each row.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let rows = call.logits.shape[1];
    let n_top = call.logprobs.map_or(0, |l| l.ids.shape[0]);
    let from = &*memory;
    let drawn: Vec<Drawn> = (0..rows).into_par_iter().map(|row| one(call, from, row, n_top)).collect();
    let tokens: Vec<f64> = drawn.iter().map(|d| f64::from(d.token)).collect();
    memory.write(&call.token, &tokens);
    let Some(logprobs) = call.logprobs else { return };
    memory.write(&logprobs.chosen, &drawn.iter().map(|d| d.chosen).collect::<Vec<_>>());
    if n_top > 0 {
        let top = || drawn.iter().flat_map(|d| &d.top);
        memory.write(&logprobs.ids, &top().map(|(id, _)| f64::from(*id)).collect::<Vec<_>>());
        memory.write(&logprobs.values, &top().map(|(_, value)| *value).collect::<Vec<_>>());
    }
}

/// A row of an I32 tensor.
fn integers(memory: &HostMemory, t: Option<Tensor>, row: usize) -> Vec<i32> {
    t.map_or(Vec::new(), |t| memory.read(&t.narrow(1, row, 1)).into_iter().map(|x| x as i32).collect())
}

fn one(call: &Call, memory: &HostMemory, row: usize, n_top: usize) -> Drawn {
    let nothing = |token| Drawn { token, chosen: 0.0, top: vec![(0, 0.0); n_top] };
    let position = memory.read(&call.positions.narrow(0, row, 1))[0];
    if position < 0.0 {
        return nothing(0);
    }
    let position = position as u32;
    let words = Words::of(&integers(memory, Some(call.settings), row));
    let mut logits = vec![0.0; call.logits.shape[0]];
    memory.float_row(&call.logits, [row, 0, 0], &mut logits);
    if has_nan(&logits) || (words.cuts() && !call.cuts) {
        return nothing(-1);
    }
    let raw = call.logprobs.map(|_| logits.clone());
    if let Some(bias) = call.bias {
        let ids = integers(memory, Some(bias.ids), row);
        add_bias(&mut logits, &words, &ids, &memory.read(&bias.values.narrow(1, row, 1)));
    }
    if let Some(mask) = call.mask.filter(|_| words.masked) {
        for (allowed, logits) in integers(memory, Some(mask), row).into_iter().zip(logits.chunks_mut(32)) {
            let forbidden = logits.iter_mut().enumerate().filter(|(bit, _)| allowed >> bit & 1 == 0);
            forbidden.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
        }
    }
    let recent = integers(memory, call.recent, row);
    let back = words.last_n.min(recent.len()).min(position as usize + 1);
    let last = (0..back).map(|i| recent[(position as usize - i) % recent.len()]).collect();
    penalise(&mut logits, &words, last);
    if has_nan(&logits) {
        return nothing(-1);
    }
    let Some(token) = choose(&words, position, &logits) else { return nothing(-1) };
    let (chosen, top) = raw.map_or((0.0, Vec::new()), |raw| log_probabilities(&raw, token, n_top));
    Drawn { token: token as i32, chosen, top }
}

fn add_bias(logits: &mut [f32], words: &Words, ids: &[i32], values: &[f64]) {
    let n = words.biases.min(ids.len());
    let mut entries: Vec<(i32, usize)> = ids[..n].iter().copied().zip(0..).collect();
    entries.sort_unstable();
    for same in entries.chunk_by(|a, b| a.0 == b.0) {
        let (id, last) = same[same.len() - 1];
        if let Some(logit) = usize::try_from(id).ok().and_then(|id| logits.get_mut(id)) {
            *logit += values[last] as f32;
        }
    }
}

fn penalise(logits: &mut [f32], words: &Words, mut last: Vec<i32>) {
    last.sort_unstable();
    for same in last.chunk_by(|a, b| a == b) {
        let Some(logit) = usize::try_from(same[0]).ok().and_then(|id| logits.get_mut(id)) else { continue };
        *logit *= if *logit > 0.0 { words.inverse_repetition } else { words.repetition };
        *logit -= same.len() as f32 * words.frequency + words.presence;
    }
}

/// Draws a token from logits to which bias, mask and penalties have been applied already, as the GPU does: cuts, temperature and
/// seed of the row. None where no token is allowed (every logit is minus infinity) or one is NaN.
pub fn draw(row: &Row, position: u32, logits: &[f32]) -> Option<u32> {
    if has_nan(logits) {
        return None;
    }
    choose(&Words::of(&row.encode()), position, logits)
}

/// Orders tokens by logit, best first, of equal ones the lowest id first.
fn rank(logits: &[f32], id: u32) -> (Reverse<u32>, u32) {
    (Reverse(order_key(logits[id as usize])), id)
}

/// The `n` best of the tokens, in order.
fn best(mut ids: Vec<u32>, n: usize, logits: &[f32]) -> Vec<u32> {
    if n < ids.len() {
        ids.select_nth_unstable_by_key(n, |&id| rank(logits, id));
        ids.truncate(n);
    }
    ids.sort_unstable_by_key(|&id| rank(logits, id));
    ids
}

/// The token with the largest logit, the first of several; none where all are minus infinity. There should be no NaN.
fn likeliest(logits: &[f32]) -> Option<u32> {
    let most = dispatch!(level(), simd => {
        let (vectors, rest) = logits.as_chunks::<16>();
        let mut most = f32x16::splat(simd, f32::NEG_INFINITY);
        for logits in vectors {
            most = most.max(f32x16::load_array_ref(simd, logits));
        }
        rest.iter().copied().fold(most.reduce_max(), f32::max)
    });
    if most == f32::NEG_INFINITY {
        return None;
    }
    // Zeros are equal, whatever their sign.
    logits.iter().position(|logit| *logit == most).map(|at| at as u32)
}

/// Whether one of them is no number.
fn has_nan(logits: &[f32]) -> bool {
    dispatch!(level(), _ => {
        // Looking at some at once needs no branch for each.
        logits.chunks(256).any(|some| some.iter().fold(false, |found, logit| found | logit.is_nan()))
    })
}

/// Cuts and draw.
fn choose(words: &Words, position: u32, logits: &[f32]) -> Option<u32> {
    let all = || (0..logits.len() as u32).filter(|&id| logits[id as usize] > f32::NEG_INFINITY);
    let first = likeliest(logits)?;
    if words.temperature <= 0.0 {
        return Some(first);
    }
    let most = logits[first as usize];
    if !words.cuts() {
        return Some(drawn(words, position, logits, first, all()));
    }
    let distance = |id: u32| if logits[id as usize] == most { 0.0 } else { most - logits[id as usize] };
    let weigh = |id: u32| u64::from(weight(distance(id)));
    let beginning = |kept: &[u32], least: u64| {
        let sums = kept.iter().scan(0, |sum, &id| {
            *sum += weigh(id);
            Some(*sum)
        });
        (sums.take_while(|sum| *sum < least).count() + 1).min(kept.len())
    };
    let mut kept: Vec<u32>;
    if words.top_k > 0 {
        kept = best(all().collect(), words.top_k, logits);
    } else if words.typical_p < WHOLE || words.top_p == WHOLE {
        kept = all().collect();
    } else {
        // Only the tokens near the best one are put into order, if they weigh enough.
        let least = words.top_p_of(all().map(weigh).sum());
        let near = [2.0, 4.0, 7.0, 11.0].into_iter().find_map(|most| {
            let ids: Vec<u32> = all().filter(|&id| distance(id) <= most).collect();
            (ids.iter().map(|&id| weigh(id)).sum::<u64>() >= least).then_some(ids)
        });
        kept = near.unwrap_or_else(|| all().collect());
        kept.sort_unstable_by_key(|&id| rank(logits, id));
        kept.truncate(beginning(&kept, least));
    }
    let total = |kept: &[u32]| kept.iter().map(|&id| weigh(id)).sum::<u64>();
    if words.typical_p < WHOLE {
        let mean = mean_distance(kept.iter().map(|&id| u64::from(spread(distance(id)))).sum(), total(&kept));
        kept.sort_unstable_by_key(|&id| ((distance(id) - mean).abs().to_bits(), id));
        kept.truncate(beginning(&kept, words.typical_p_of(total(&kept))));
    }
    if words.top_p < WHOLE && (words.top_k > 0 || words.typical_p < WHOLE) {
        kept.sort_unstable_by_key(|&id| rank(logits, id));
        kept.truncate(beginning(&kept, words.top_p_of(total(&kept))));
    }
    let first = kept.iter().copied().min_by_key(|&id| rank(logits, id))?;
    if words.ln_min_p > f32::NEG_INFINITY {
        let least = logits[first as usize] + words.ln_min_p;
        kept.retain(|&id| logits[id as usize] >= least);
    }
    Some(drawn(words, position, logits, first, kept.into_iter()))
}

/// The draw among tokens; `first` is one of them, best the one of the largest logit.
fn drawn(words: &Words, position: u32, logits: &[f32], first: u32, ids: impl Iterator<Item = u32>) -> u32 {
    let stream = stream(words.seed, position);
    let score = |id: u32| score(logits[id as usize], words.temperature, gumbel_of(stream, id));
    let (mut token, mut most) = (first, score(first));
    for id in ids {
        // A token that even the largest Gumbel number does not carry so far needs none.
        if logits[id as usize] + words.temperature * MOST_GUMBEL < most {
            continue;
        }
        let score = score(id);
        if (Reverse(order_key(score)), id) < (Reverse(order_key(most)), token) {
            (token, most) = (id, score);
        }
    }
    token
}

/// That of the token, and the most likely tokens with theirs.
fn log_probabilities(raw: &[f32], token: u32, n_top: usize) -> (f64, Vec<(u32, f64)>) {
    let most = raw.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let below = |id: u32| if raw[id as usize] == most { 0.0 } else { f64::from(raw[id as usize]) - f64::from(most) };
    let sum = raw.iter().map(|&x| if x == most { 1.0 } else { f64::from((x - most).exp()) }).sum::<f64>().ln();
    let top = best((0..raw.len() as u32).collect(), n_top, raw);
    (below(token) - sum, top.into_iter().map(|id| (id, below(id) - sum)).collect())
}
