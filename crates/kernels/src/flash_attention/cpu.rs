//! `flash_attention` at the speed of the CPU: tasks take some queries of one head of the cache and a run of keys, of which
//! only those are read that one of the queries sees. Scores and results are small matrix products; the maximum and the
//! sum of the softmax run along.

use std::ops::Range;

use fearless_simd::prelude::*;
use fearless_simd::{Simd, dispatch, f32x16};
use rayon::prelude::*;

use super::cpu_one::{self, MOST_SHARED};
use super::reference::slope;
use super::{Call, Mask};
use crate::floats::read_dense;
use crate::host::HostMemory;
use crate::simd::{Layout, exp, level, multiply, transpose};
use crate::tensor::Tensor;

/// Queries of a task, over all heads that share keys: as many as make it worth turning the keys round.
const ROWS: usize = 48;
/// Keys whose scores are computed at once.
pub(super) const KEYS: usize = 64;
/// Keys of a task: long contexts are shared by several.
const RUN: usize = 1024;

/// Fewer products than these are done before another thread would wake up.
const FEW_PRODUCTS: usize = 1 << 16;

/// Queries that meet the same keys: tokens of one sequence, all heads that share a head of the cache.
pub(super) struct Task {
    pub(super) batch: usize,
    pub(super) kv_head: usize,
    /// The sequence, and its batch of the cache.
    pub(super) sequence: usize,
    pub(super) kv_batch: usize,
    pub(super) tokens: Range<usize>,
    pub(super) keys: Range<usize>,
}

/// What a task found out for each of its rows: the maximum, the sum, and the values.
pub(super) struct Part {
    pub(super) top: Vec<f32>,
    sum: Vec<f32>,
    pub(super) values: Vec<f32>,
}

impl Part {
    /// Rows that have seen nothing yet, with room for `wide` values each.
    pub(super) fn new(rows: usize, wide: usize) -> Part {
        Part { top: vec![f32::NEG_INFINITY; rows], sum: vec![0.0; rows], values: vec![0.0; rows * wide] }
    }
}

/// Integers and the like, read once.
pub(super) struct Inputs {
    positions: Vec<f64>,
    lengths: Vec<f64>,
    sequences: Option<Vec<f64>>,
    table: Option<Vec<f64>>,
    mask: Option<(Tensor, Vec<f64>)>,
    sinks: Option<Vec<f64>>,
    distances: Option<Vec<f64>>,
}

impl Inputs {
    fn new(call: &Call, memory: &HostMemory) -> Inputs {
        let (mask, positions, lengths) = match &call.mask {
            Mask::None => (None, Vec::new(), Vec::new()),
            Mask::Explicit(mask) => (Some((*mask, memory.read(mask))), Vec::new(), Vec::new()),
            Mask::Causal { positions, length, .. } => (None, memory.read(positions), memory.read(length)),
        };
        Inputs {
            positions,
            lengths,
            sequences: call.sequences.map(|t| memory.read(&t)),
            table: call.pages.map(|p| memory.read(&p.table)),
            mask,
            sinks: call.sinks.map(|t| memory.read(&t)),
            distances: call.distances.map(|t| memory.read(&t)),
        }
    }

    /// The keys a token may see: those outside are hidden.
    fn seen(&self, call: &Call, batch: usize, token: usize, sequence: usize) -> Range<usize> {
        let Mask::Causal { window, both, .. } = call.mask else { return 0..call.keys() };
        let [_, tokens, _, batches] = call.q.shape;
        let position = self.positions[batch * tokens + token];
        let length = self.lengths[if self.lengths.len() > 1 { sequence } else { 0 }];
        // After the query, a token sees as far as before it, as far as is said of it, or nothing.
        let ahead = match (both && position >= 0.0, window) {
            (false, _) if call.sees_ahead() => self.positions[(batches + batch) * tokens + token] - position + 1.0,
            (false, _) => 1.0,
            (true, Some(w)) => w.size() as f64,
            (true, None) => f64::INFINITY,
        };
        let end = (position + ahead).min(length).clamp(0.0, call.keys() as f64) as usize;
        let start = window.map_or(0, |w| w.first(position as i64)) as usize;
        start.min(end)..end
    }
}

/// Computes the result of the call.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let inputs = Inputs::new(call, memory);
    let tasks = tasks(call, &inputs);
    let mut out = memory.spare.take(call.out.len());
    let from = &*memory;
    let few = products(call, &tasks) < FEW_PRODUCTS;
    let parts: Vec<Part> = if few {
        tasks.iter().map(|task| part(call, task, &inputs, from)).collect()
    } else {
        tasks.par_iter().with_max_len(1).map(|task| part(call, task, &inputs, from)).collect()
    };
    let runs = runs(call, &tasks, &mut out);
    let finish = |(tasks_of_run, out): (Range<usize>, &mut [f32])| {
        join_all(call, &tasks[tasks_of_run.clone()], &parts[tasks_of_run], &inputs, out);
    };
    if few {
        runs.into_iter().for_each(finish);
    } else {
        runs.into_par_iter().for_each(finish);
    }
    memory.write_floats(&call.out, &out);
    memory.spare.give(out);
}

/// The tasks of each run of tokens, which lie one after the other, with the results of these tokens. Tokens that see no key have no task, and
/// results of zero.
fn runs<'o>(call: &Call, tasks: &[Task], mut out: &'o mut [f32]) -> Vec<(Range<usize>, &'o mut [f32])> {
    let [hsv, heads, tokens, _] = call.out.shape;
    let mut runs = Vec::new();
    let (mut first, mut at) = (0, 0);
    while first < tasks.len() {
        let task = &tasks[first];
        let same = |other: &Task| (other.batch, &other.tokens) == (task.batch, &task.tokens);
        let count = tasks[first..].iter().take_while(|other| same(other)).count();
        let begin = (task.batch * tokens + task.tokens.start) * heads * hsv;
        let (unseen, rest) = std::mem::take(&mut out).split_at_mut(begin - at);
        unseen.fill(0.0);
        let (own, rest) = rest.split_at_mut(task.tokens.len() * heads * hsv);
        at = begin + own.len();
        out = rest;
        runs.push((first..first + count, own));
        first += count;
    }
    out.fill(0.0);
    runs
}

/// The results of a run of tokens. Tasks over the same queries lie one after the other: runs of keys in order.
fn join_all(call: &Call, tasks: &[Task], parts: &[Part], inputs: &Inputs, out: &mut [f32]) {
    let [hsv, heads, ..] = call.out.shape;
    let shared = heads / call.v.shape[2];
    out.fill(0.0);
    let mut first = 0;
    while first < tasks.len() {
        let task = &tasks[first];
        let count = tasks[first..].iter().take_while(|other| other.kv_head == task.kv_head).count();
        for row in 0..task.tokens.len() * shared {
            let head = task.kv_head * shared + row % shared;
            let sink = inputs.sinks.as_ref().map_or(f32::NEG_INFINITY, |s| s[head] as f32);
            let out = &mut out[(row / shared * heads + head) * hsv..][..hsv];
            join(&parts[first..first + count], row, sink, out);
        }
        first += count;
    }
}

/// About how many products of a query and a key, element by element, all tasks have.
fn products(call: &Call, tasks: &[Task]) -> usize {
    let shared = call.q.shape[2] / call.v.shape[2];
    tasks.iter().map(|task| task.tokens.len() * shared * task.keys.len() * call.q.shape[0]).sum()
}

/// Adds up the parts of one row. A row that saw no key stays zero.
fn join(parts: &[Part], row: usize, sink: f32, out: &mut [f32]) {
    if parts.iter().any(|p| p.top[row].is_nan()) {
        return out.fill(f32::NAN);
    }
    let top = parts.iter().map(|p| p.top[row]).fold(sink, f32::max);
    if top == f32::NEG_INFINITY {
        return;
    }
    let factor = |part: &Part| (part.top[row] - top).exp();
    let sum = parts.iter().map(|p| p.sum[row] * factor(p)).sum::<f32>() + (sink - top).exp();
    for part in parts {
        let factor = factor(part) / sum;
        let stride = part.values.len() / part.top.len();
        out.iter_mut().zip(&part.values[row * stride..]).for_each(|(out, v)| *out += factor * v);
    }
}

fn tasks(call: &Call, inputs: &Inputs) -> Vec<Task> {
    let [_, tokens, heads, batches] = call.q.shape;
    let [_, _, kv_heads, kv_batches] = call.v.shape;
    let most = (ROWS / (heads / kv_heads)).max(1);
    let mut tasks = Vec::new();
    for batch in 0..batches {
        let sequence = |token: usize| inputs.sequences.as_ref().map_or(batch, |s| s[token] as usize);
        let mut start = 0;
        while start < tokens {
            let sequence_of_all = sequence(start);
            let same_sequence =
                (start..tokens.min(start + most)).take_while(|t| sequence(*t) == sequence_of_all).count();
            let range = start..start + same_sequence;
            let seen = range.clone().map(|t| inputs.seen(call, batch, t, sequence_of_all)).filter(|r| !r.is_empty());
            let seen = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
            let kv_batch = if call.pages.is_some() { 0 } else { sequence_of_all * kv_batches / call.sequence_count() };
            for kv_head in 0..kv_heads {
                for first in seen.clone().step_by(RUN) {
                    let keys = first..seen.end.min(first + RUN);
                    let tokens = range.clone();
                    tasks.push(Task { batch, kv_head, sequence: sequence_of_all, kv_batch, tokens, keys });
                }
            }
            start = range.end;
        }
    }
    tasks
}

/// The attention of a task's rows over its keys.
fn part(call: &Call, task: &Task, inputs: &Inputs, memory: &HostMemory) -> Part {
    let [hsk, _, heads, _] = call.q.shape;
    let [hsv, _, kv_heads, _] = call.v.shape;
    let shared = heads / kv_heads;
    // What one token goes through must not depend on others: none of them is counted here.
    if task.tokens.len() == 1 && shared <= MOST_SHARED {
        return cpu_one::part(call, task, inputs, memory);
    }
    let rows = task.tokens.len() * shared;
    let wide = hsv.next_multiple_of(16);
    let mut queries = vec![0.0; rows * hsk];
    for (row, q) in queries.chunks_exact_mut(hsk).enumerate() {
        let at = [task.tokens.start + row / shared, task.kv_head * shared + row % shared, task.batch];
        memory.float_row(&call.q, at, q);
    }
    let mut part = Part::new(rows, wide);
    let (mut keys, mut turned) = (vec![0.0; KEYS * hsk], vec![0.0; hsk * KEYS]);
    let (mut values, mut scores) = (vec![0.0; KEYS * wide], vec![0.0; rows * KEYS]);
    for first in task.keys.clone().step_by(KEYS) {
        let count = KEYS.min(task.keys.end - first);
        let mut row = 0;
        for j in 0..count {
            // Keys of a page lie side by side.
            let follows = j > 0 && call.pages.is_none_or(|pages| !(first + j).is_multiple_of(pages.size));
            row = if follows { row + 1 } else { row_of(call, inputs, task.sequence, first + j) };
            let at = [row, task.kv_head, task.kv_batch];
            dense_row(&call.k, at, memory, &mut keys[j * hsk..][..hsk]);
            dense_row(&call.v, at, memory, &mut values[j * wide..][..hsv]);
        }
        dispatch!(level(), simd => {
            let columns: Vec<&[f32]> = keys.chunks_exact(hsk).take(count).collect();
            transpose(simd, &columns, KEYS, &mut turned);
            let layout = Layout { depth: hsk, a_stride: hsk, b_stride: KEYS, c_stride: KEYS, add: false };
            multiply(simd, [rows, count.next_multiple_of(16)], layout, &queries, &turned, &mut scores);
        });
        for (row, scores) in scores.chunks_exact_mut(KEYS).enumerate() {
            let token = task.tokens.start + row / shared;
            let head = task.kv_head * shared + row % shared;
            adjust(call, task, inputs, [token, head], first, &mut scores[..count]);
        }
        dispatch!(level(), simd => {
            soften(simd, &mut scores, count, &mut part, wide);
            let layout = Layout { depth: count, a_stride: KEYS, b_stride: wide, c_stride: wide, add: true };
            multiply(simd, [rows, wide], layout, &scores, &values, &mut part.values);
        });
    }
    part
}

/// The row of the cache that holds key `j`.
pub(super) fn row_of(call: &Call, inputs: &Inputs, sequence: usize, j: usize) -> usize {
    match (&inputs.table, call.pages) {
        (Some(table), Some(pages)) => {
            table[sequence * pages.table.shape[0] + j / pages.size] as usize * pages.size + j % pages.size
        }
        _ => j,
    }
}

#[inline]
fn dense_row(t: &Tensor, at: [usize; 3], memory: &HostMemory, out: &mut [f32]) {
    read_dense(t.ty, &memory.bytes(t.slot)[t.row_offset(at)..][..t.row_bytes()], out);
}

/// Scale, softcap and mask of one row's scores, for keys from `first` on.
pub(super) fn adjust(
    call: &Call,
    task: &Task,
    inputs: &Inputs,
    [token, head]: [usize; 2],
    first: usize,
    scores: &mut [f32],
) {
    scores.iter_mut().for_each(|s| *s *= call.scale);
    if call.logit_softcap != 0.0 {
        let cap = call.logit_softcap;
        scores.iter_mut().for_each(|s| *s = cap * (*s / cap).tanh());
    }
    let slope = slope(head, call.q.shape[2], f64::from(call.max_bias)) as f32;
    if let Some((mask, terms)) = &inputs.mask {
        let [keys, rows, m2, m3] = mask.shape;
        let terms = &terms[(((task.batch % m3) * m2 + head % m2) * rows + token) * keys + first..];
        return scores.iter_mut().zip(terms).for_each(|(s, term)| {
            *s = if *term == f64::NEG_INFINITY { f32::NEG_INFINITY } else { *s + slope * *term as f32 };
        });
    }
    if call.max_bias > 0.0 && !inputs.positions.is_empty() {
        let position = inputs.positions[task.batch * call.q.shape[1] + token] as f32;
        scores.iter_mut().enumerate().for_each(|(j, s)| *s -= slope * ((first + j) as f32 - position).abs());
    }
    if let (Some(distances), Some(reach)) = (&inputs.distances, call.reach()) {
        let (position, heads) = (inputs.positions[task.batch * call.q.shape[1] + token] as isize, call.q.shape[2]);
        let reach = reach as isize;
        scores.iter_mut().enumerate().for_each(|(j, s)| {
            let row = ((first + j) as isize - position).clamp(-reach, reach) + reach;
            *s += distances[row as usize * heads + head] as f32;
        });
    }
    let seen = inputs.seen(call, task.batch, token, task.sequence);
    let len = scores.len();
    let (start, end) = (seen.start.saturating_sub(first).min(len), seen.end.saturating_sub(first).min(len));
    scores[..start].fill(f32::NEG_INFINITY);
    scores[end.max(start)..].fill(f32::NEG_INFINITY);
}

/// Scores become weights against the row's maximum so far; where that grows, what was summed up before shrinks.
#[inline(always)]
pub(super) fn soften<S: Simd>(simd: S, scores: &mut [f32], count: usize, part: &mut Part, wide: usize) {
    let hidden = f32x16::splat(simd, f32::NEG_INFINITY);
    for (row, scores) in scores.chunks_exact_mut(KEYS).enumerate() {
        let scores = &mut scores[..count.next_multiple_of(16)];
        scores[count..].fill(f32::NEG_INFINITY);
        let vectors = scores.as_chunks_mut::<16>().0;
        let (mut most, mut numbers) = (hidden, true);
        for scores in vectors.iter() {
            let scores = f32x16::load_array_ref(simd, scores);
            // The maximum passes NaN over: without this look a row of NaN would count as one that saw no key.
            numbers &= scores.simd_eq(scores).all_true();
            most = most.max(scores);
        }
        if !numbers {
            part.top[row] = f32::NAN;
        }
        if part.top[row].is_nan() {
            scores.fill(f32::NAN);
            continue;
        }
        let top = most.reduce_max().max(part.top[row]);
        if top == f32::NEG_INFINITY {
            scores.fill(0.0);
            continue;
        }
        if top > part.top[row] {
            let factor = (part.top[row] - top).exp();
            part.sum[row] *= factor;
            part.values[row * wide..][..wide].iter_mut().for_each(|v| *v *= factor);
            part.top[row] = top;
        }
        // Hidden keys weigh nothing; the exponential alone would leave a little.
        let (most, least) = (f32x16::splat(simd, top), f32x16::splat(simd, -87.0));
        let mut sum = f32x16::splat(simd, 0.0);
        for scores in vectors {
            let power = f32x16::load_array_ref(simd, scores) - most;
            let weights = power.simd_gt(least).select(exp(simd, power), f32x16::splat(simd, 0.0));
            weights.store_array(scores);
            sum += weights;
        }
        part.sum[row] += sum.reduce_sum();
    }
}
