//! Attention of one token on the CPU. Keys and values are read where they lie, in vector registers: turning keys round, which is
//! worth it for many queries, would cost more than the products.

use std::array::from_fn;

use fearless_simd::prelude::*;
use fearless_simd::{Simd, dispatch, f32x16};
use kiln_gguf::TensorType;

use super::Call;
use super::cpu::{Inputs, KEYS, Part, Task, adjust, row_of, soften};
use crate::floats::read_dense;
use crate::host::HostMemory;
use crate::simd::{half, level, load, native_halves};
use crate::tensor::Tensor;

/// Most heads that share keys here: more are enough queries for a product of matrices.
pub(super) const MOST_SHARED: usize = 16;

/// Some rows of keys or values.
trait Rows {
    /// Elements `at .. at + 16` of row `i`.
    fn sixteen<S: Simd>(&self, simd: S, i: usize, at: usize) -> f32x16<S>;
}

/// Rows of half floats as they lie.
struct Halves<'a> {
    bytes: &'a [u8],
    /// Where each row begins.
    starts: &'a [usize],
}

impl Rows for Halves<'_> {
    #[inline(always)]
    fn sixteen<S: Simd>(&self, simd: S, i: usize, at: usize) -> f32x16<S> {
        let bytes: &[u8; 32] = self.bytes[self.starts[i] + 2 * at..].first_chunk().expect("sixteen half floats");
        native_halves(simd, bytes).unwrap_or_else(|| {
            f32x16::load_array(simd, from_fn(|i| half(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]))))
        })
    }
}

/// Rows that have become floats, `wide` each.
struct Floats<'a> {
    values: &'a [f32],
    wide: usize,
}

impl Rows for Floats<'_> {
    #[inline(always)]
    fn sixteen<S: Simd>(&self, simd: S, i: usize, at: usize) -> f32x16<S> {
        load(simd, &self.values[i * self.wide + at..])
    }
}

/// Does something with some rows of a tensor: as half floats if they are such and vectors of them are whole, else as floats, each row
/// filled up with zeros.
macro_rules! with_rows {
    ($t:expr, $task:expr, $rows:expr, $memory:expr, |$some:ident| $body:expr) => {{
        let (t, bytes): (&Tensor, _) = ($t, $memory.bytes($t.slot));
        let first = t.row_offset([0, $task.kv_head, $task.kv_batch]);
        let mut starts = [0; KEYS];
        starts.iter_mut().zip($rows).for_each(|(start, row)| *start = first + row * t.stride[1]);
        let starts = &starts[..$rows.len()];
        if t.ty == TensorType::F16 && t.shape[0].is_multiple_of(16) {
            let $some = Halves { bytes, starts };
            $body
        } else {
            let wide = t.shape[0].next_multiple_of(16);
            let mut values = vec![0.0; starts.len() * wide];
            for (start, values) in starts.iter().zip(values.chunks_exact_mut(wide)) {
                read_dense(t.ty, &bytes[*start..][..t.row_bytes()], &mut values[..t.shape[0]]);
            }
            let $some = Floats { values: &values, wide };
            $body
        }
    }};
}

/// The attention of the heads of one token over a task's keys.
pub(super) fn part(call: &Call, task: &Task, inputs: &Inputs, memory: &HostMemory) -> Part {
    let [hsk, _, heads, _] = call.q.shape;
    let [hsv, _, kv_heads, _] = call.v.shape;
    let shared = heads / kv_heads;
    let (wide_k, wide) = (hsk.next_multiple_of(16), hsv.next_multiple_of(16));
    let mut queries = vec![0.0; shared * wide_k];
    for (row, q) in queries.chunks_exact_mut(wide_k).enumerate() {
        memory.float_row(&call.q, [task.tokens.start, task.kv_head * shared + row, task.batch], &mut q[..hsk]);
    }
    let mut part = Part::new(shared, wide);
    let mut scores = vec![0.0; shared * KEYS];
    for first in task.keys.clone().step_by(KEYS) {
        let count = KEYS.min(task.keys.end - first);
        let mut rows = [0; KEYS];
        for j in 0..count {
            // Keys of a page lie side by side.
            let follows = j > 0 && call.pages.is_none_or(|pages| !(first + j).is_multiple_of(pages.size));
            rows[j] = if follows { rows[j - 1] + 1 } else { row_of(call, inputs, task.sequence, first + j) };
        }
        let rows = &rows[..count];
        with_rows!(&call.k, task, rows, memory, |keys| {
            dispatch!(level(), simd => score(simd, &keys, count, &queries, &mut scores));
        });
        for (row, scores) in scores.chunks_exact_mut(KEYS).enumerate() {
            adjust(call, task, inputs, [task.tokens.start, task.kv_head * shared + row], first, &mut scores[..count]);
        }
        with_rows!(&call.v, task, rows, memory, |values| {
            dispatch!(level(), simd => weigh(simd, &values, count, &mut scores, &mut part));
        });
    }
    part
}

/// scores(r, j) = queries(r) . keys(j), [`KEYS`] from row to row. A row's bits do not depend on the rows beside it.
#[inline(always)]
fn score<S: Simd, K: Rows>(simd: S, keys: &K, count: usize, queries: &[f32], scores: &mut [f32]) {
    let wide = queries.len() / (scores.len() / KEYS);
    let (mut queries, mut scores) = (queries, scores);
    while !queries.is_empty() {
        let rows = (queries.len() / wide).min(4);
        let (some, others) = queries.split_at(rows * wide);
        let (to, after) = scores.split_at_mut(rows * KEYS);
        match rows {
            4 => score_rows::<S, K, 4>(simd, keys, count, some, to),
            3 => score_rows::<S, K, 3>(simd, keys, count, some, to),
            2 => score_rows::<S, K, 2>(simd, keys, count, some, to),
            _ => score_rows::<S, K, 1>(simd, keys, count, some, to),
        }
        (queries, scores) = (others, after);
    }
}

#[inline(always)]
fn score_rows<S: Simd, K: Rows, const R: usize>(
    simd: S,
    keys: &K,
    count: usize,
    queries: &[f32],
    scores: &mut [f32],
) {
    let wide = queries.len() / R;
    let queries: [&[f32]; R] = from_fn(|r| &queries[r * wide..][..wide]);
    for j in 0..count {
        let mut sums = [f32x16::splat(simd, 0.0); R];
        for at in (0..wide).step_by(16) {
            let key = keys.sixteen(simd, j, at);
            for r in 0..R {
                sums[r] = key.mul_add(load(simd, &queries[r][at..]), sums[r]);
            }
        }
        for r in 0..R {
            scores[r * KEYS + j] = sums[r].reduce_sum();
        }
    }
}

/// Scores become weights, and values are added by them.
#[inline(always)]
fn weigh<S: Simd, V: Rows>(simd: S, values: &V, count: usize, scores: &mut [f32], part: &mut Part) {
    let wide = part.values.len() / part.top.len();
    soften(simd, scores, count, part, wide);
    for (scores, sums) in scores.chunks_exact(KEYS).zip(part.values.chunks_exact_mut(wide)) {
        let (fours, rest) = sums.as_chunks_mut::<64>();
        let first = 64 * fours.len();
        for (i, sums) in fours.iter_mut().enumerate() {
            add::<S, V, 4>(simd, values, &scores[..count], 64 * i, sums);
        }
        for (i, sums) in rest.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            add::<S, V, 1>(simd, values, &scores[..count], first + 16 * i, sums);
        }
    }
}

/// Adds elements of all values from `at` on, `N` vectors.
#[inline(always)]
fn add<S: Simd, V: Rows, const N: usize>(simd: S, values: &V, weights: &[f32], at: usize, sums: &mut [f32]) {
    let mut vectors: [f32x16<S>; N] = from_fn(|i| load(simd, &sums[16 * i..]));
    for (j, weight) in weights.iter().enumerate() {
        let weight = f32x16::splat(simd, *weight);
        for (i, vector) in vectors.iter_mut().enumerate() {
            *vector = values.sixteen(simd, j, at + 16 * i).mul_add(weight, *vector);
        }
    }
    for (vector, sums) in vectors.into_iter().zip(sums.as_chunks_mut::<16>().0) {
        vector.store_array(sums);
    }
}
