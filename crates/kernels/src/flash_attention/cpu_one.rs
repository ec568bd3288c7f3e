//! Attention of one token on the CPU. Keys and values are read where they lie, in vector registers, and become floats once for all heads
//! that share them: turning keys round, which is worth it for many queries, would cost more than the products. Scores of sixteen keys are
//! summed up together, because a sum across one vector alone takes as long as all its products.

use std::array::from_fn;

use fearless_simd::prelude::*;
use fearless_simd::{Simd, dispatch, f32x16};
use kiln_gguf::TensorType;
use kiln_system::instructions::fetch;

use super::Call;
use super::cpu::{Inputs, KEYS, Part, Task, adjust, row_of, soften};
use crate::floats::read_dense;
use crate::host::HostMemory;
use crate::simd::{half, level, load, native_halves};
use crate::tensor::Tensor;

/// Most heads that share keys here: more are enough queries for a product of matrices.
pub(super) const MOST_SHARED: usize = 16;

/// Keys whose scores become one vector.
const SIDE: usize = 16;
/// Keys ahead of which rows are fetched: those of one head lie apart, on pages that lie anywhere, so that machines guess late.
const AHEAD: usize = 16;

/// Some rows of keys or values.
trait Rows {
    /// Elements `at .. at + 16 N` of row `i`.
    fn vectors<S: Simd, const N: usize>(&self, simd: S, i: usize, at: usize) -> [f32x16<S>; N];

    /// Row `i` will be read soon, if there is one.
    fn fetch(&self, i: usize);
}

/// Rows of half floats as they lie.
struct Halves<'a> {
    bytes: &'a [u8],
    /// Where each row begins; there may be more rows than are read.
    starts: &'a [usize],
    row_bytes: usize,
}

impl Rows for Halves<'_> {
    #[inline(always)]
    fn vectors<S: Simd, const N: usize>(&self, simd: S, i: usize, at: usize) -> [f32x16<S>; N] {
        let (some, _) = self.bytes[self.starts[i] + 2 * at..][..32 * N].as_chunks::<32>();
        from_fn(
            #[inline(always)]
            |i| {
                let bytes = &some[i];
                native_halves(simd, bytes).unwrap_or_else(|| {
                    f32x16::load_array(simd, from_fn(|i| half(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]))))
                })
            },
        )
    }

    #[inline(always)]
    fn fetch(&self, i: usize) {
        if let Some(start) = self.starts.get(i) {
            (0..self.row_bytes).step_by(64).for_each(|at| fetch(self.bytes, start + at));
        }
    }
}

/// Rows that have become floats, `wide` each.
struct Floats<'a> {
    values: &'a [f32],
    wide: usize,
}

impl Rows for Floats<'_> {
    #[inline(always)]
    fn vectors<S: Simd, const N: usize>(&self, simd: S, i: usize, at: usize) -> [f32x16<S>; N] {
        let (some, _) = self.values[i * self.wide + at..][..16 * N].as_chunks::<16>();
        from_fn(
            #[inline(always)]
            |i| f32x16::load_array_ref(simd, &some[i]),
        )
    }

    #[inline(always)]
    fn fetch(&self, _: usize) {}
}

/// Does something with `count` rows of a tensor, of which all begin at given places: as half floats if they are such and vectors of them
/// are whole, else as floats, each row filled up with zeros.
macro_rules! with_rows {
    ($t:expr, $starts:expr, $count:expr, $memory:expr, |$some:ident| $body:expr) => {{
        let (t, starts): (&Tensor, &[usize]) = ($t, $starts);
        let bytes = $memory.bytes(t.slot);
        if t.ty == TensorType::F16 && t.shape[0].is_multiple_of(16) {
            let $some = Halves { bytes, starts, row_bytes: t.row_bytes() };
            $body
        } else {
            let wide = t.shape[0].next_multiple_of(16);
            let mut values = vec![0.0; $count * wide];
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
    let rows = cache_rows(call, task, inputs);
    let starts = |t: &Tensor| -> Vec<usize> {
        let first = t.row_offset([0, task.kv_head, task.kv_batch]);
        rows.iter().map(|row| first + row * t.stride[1]).collect()
    };
    let (key_starts, value_starts) = (starts(&call.k), starts(&call.v));
    let mut part = Part::new(shared, wide);
    let mut scores = vec![0.0; shared * KEYS];
    for at in (0..rows.len()).step_by(KEYS) {
        let count = KEYS.min(rows.len() - at);
        with_rows!(&call.k, &key_starts[at..], count, memory, |keys| {
            dispatch!(level(), simd => score(simd, &keys, count, &queries, &mut scores));
        });
        let first = task.keys.start + at;
        for (row, scores) in scores.chunks_exact_mut(KEYS).enumerate() {
            adjust(call, task, inputs, [task.tokens.start, task.kv_head * shared + row], first, &mut scores[..count]);
        }
        with_rows!(&call.v, &value_starts[at..], count, memory, |values| {
            dispatch!(level(), simd => weigh(simd, &values, count, &mut scores, &mut part));
        });
    }
    part
}

/// The rows of the cache that hold a task's keys.
fn cache_rows(call: &Call, task: &Task, inputs: &Inputs) -> Vec<usize> {
    let mut rows: Vec<usize> = Vec::with_capacity(task.keys.len());
    for j in task.keys.clone() {
        // Keys of a page lie side by side.
        let follows = call.pages.is_none_or(|pages| !j.is_multiple_of(pages.size));
        let row = match rows.last() {
            Some(last) if follows => last + 1,
            _ => row_of(call, inputs, task.sequence, j),
        };
        rows.push(row);
    }
    rows
}

/// Calls a generic function with a number of rows up to four.
macro_rules! with_count {
    ($rows:expr, |$r:ident| $body:expr) => {
        match $rows {
            4 => {
                const $r: usize = 4;
                $body
            }
            3 => {
                const $r: usize = 3;
                $body
            }
            2 => {
                const $r: usize = 2;
                $body
            }
            _ => {
                const $r: usize = 1;
                $body
            }
        }
    };
}

/// scores(r, j) = queries(r) . keys(j), [`KEYS`] from row to row. A row's bits do not depend on the rows beside it. Behind the last of
/// `count` scores may be anything.
#[inline(always)]
fn score<S: Simd, K: Rows>(simd: S, keys: &K, count: usize, queries: &[f32], scores: &mut [f32]) {
    let wide = queries.len() / (scores.len() / KEYS);
    for (queries, scores) in queries.chunks(4 * wide).zip(scores.chunks_mut(4 * KEYS)) {
        let rows = queries.len() / wide;
        if wide.is_multiple_of(64) {
            with_count!(rows, |R| score_rows::<S, K, R, 4>(simd, keys, count, queries, scores));
        } else {
            with_count!(rows, |R| score_rows::<S, K, R, 1>(simd, keys, count, queries, scores));
        }
    }
}

/// The same with `R` queries, `N` vectors of them at a time.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "queries and sums go together")]
fn score_rows<S: Simd, K: Rows, const R: usize, const N: usize>(
    simd: S,
    keys: &K,
    count: usize,
    queries: &[f32],
    scores: &mut [f32],
) {
    let wide = queries.len() / R;
    let none = f32x16::splat(simd, 0.0);
    for first in (0..count).step_by(SIDE) {
        // Four keys at a time, so that sums stay in registers: each vector has four partial sums of four keys.
        let mut quarters = [[none; 4]; R];
        for quarter in 0..4 {
            let mut sums = [[none; 4]; R];
            for at in (0..wide).step_by(16 * N) {
                let mut some = [[none; N]; R];
                for r in 0..R {
                    for i in 0..N {
                        some[r][i] = load(simd, &queries[r * wide + at + 16 * i..]);
                    }
                }
                for j in 0..4 {
                    // Lanes past the last key repeat it; their results are ignored.
                    let key = (first + 4 * quarter + j).min(count - 1);
                    keys.fetch(key + AHEAD);
                    let key: [f32x16<S>; N] = keys.vectors(simd, key, at);
                    for r in 0..R {
                        for i in 0..N {
                            sums[r][j] = key[i].mul_add(some[r][i], sums[r][j]);
                        }
                    }
                }
            }
            for r in 0..R {
                quarters[r][quarter] = merged(sums[r]);
            }
        }
        for r in 0..R {
            merged(quarters[r]).store_slice(&mut scores[r * KEYS + first..][..SIDE]);
        }
    }
}

/// Sums of four neighbours each, of one vector after the other.
#[inline(always)]
fn merged<S: Simd>([a, b, c, d]: [f32x16<S>; 4]) -> f32x16<S> {
    let of_two = |a: f32x16<S>, b: f32x16<S>| a.unzip_low(b) + a.unzip_high(b);
    of_two(of_two(a, b), of_two(c, d))
}

/// Scores become weights, and values are added by them.
#[inline(always)]
fn weigh<S: Simd, V: Rows>(simd: S, values: &V, count: usize, scores: &mut [f32], part: &mut Part) {
    let wide = part.values.len() / part.top.len();
    soften(simd, scores, count, part, wide);
    for (scores, sums) in scores.chunks(4 * KEYS).zip(part.values.chunks_mut(4 * wide)) {
        let rows = sums.len() / wide;
        let whole = wide / 64 * 64;
        for at in (0..whole).step_by(64) {
            with_count!(rows, |R| add::<S, V, R, 4>(simd, values, count, scores, at, sums));
        }
        for at in (whole..wide).step_by(16) {
            with_count!(rows, |R| add::<S, V, R, 1>(simd, values, count, scores, at, sums));
        }
    }
}

/// Adds elements of all values from `at` on, `N` vectors, to sums of `R` rows by their weights.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "weights and sums go together")]
fn add<S: Simd, V: Rows, const R: usize, const N: usize>(
    simd: S,
    values: &V,
    count: usize,
    weights: &[f32],
    at: usize,
    sums: &mut [f32],
) {
    let wide = sums.len() / R;
    let mut vectors = [[f32x16::splat(simd, 0.0); N]; R];
    for r in 0..R {
        for i in 0..N {
            vectors[r][i] = load(simd, &sums[r * wide + at + 16 * i..]);
        }
    }
    for j in 0..count {
        values.fetch(j + AHEAD);
        let value: [f32x16<S>; N] = values.vectors(simd, j, at);
        for r in 0..R {
            let weight = f32x16::splat(simd, weights[r * KEYS + j]);
            for i in 0..N {
                vectors[r][i] = value[i].mul_add(weight, vectors[r][i]);
            }
        }
    }
    for r in 0..R {
        for i in 0..N {
            vectors[r][i].store_slice(&mut sums[r * wide + at + 16 * i..][..16]);
        }
    }
}
