//! Cases of `flash_attention`.

mod bench;

use kiln_gguf::TensorType::{self, BF16, F16, F32, I8, I32, IQ4_NL, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use kiln_gpu::FragmentLayout;

use super::Window::{Chunk, Last};
use super::{Call, Mask, Pages, Split, Window, kv_append_cases};
use crate::case::{Case, Data, Level, Tolerance};
use crate::packed_b::{self, PackedB};
use crate::rounded::{self, Rounding};
use crate::tensor::Tensor;

/// The matrix paths round Q, K, V and the weights to f16 (2^-11 each), and errors of many keys average out; sums are f32.
/// The scalar path rounds nothing and is at 1e-13.
pub(super) const CLOSE: Tolerance = Tolerance::Nmse(1e-6);

/// The integer path rounds Q to 8 bits, 32 elements a scale: off by 1.5e-5 of its energy, and so are scores. Weights, and
/// with them a sum of values that average out, move by that times the variance of a score, about 0.1 here.
const ROUNDED_Q: Tolerance = Tolerance::Nmse(5e-6);

fn tolerance(k: TensorType) -> Tolerance {
    if k.is_quantised() { ROUNDED_Q } else { CLOSE }
}

/// How queries see keys in a case.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sight {
    All,
    /// An explicit mask that repeats over these extents.
    Mask([usize; 2]),
    /// Causal, the last token at the end; this many rows of the cache are unused and hold NaN.
    Causal {
        unused: usize,
        window: Option<Window>,
    },
    /// The same with keys on both sides of tokens at any position of the sequence.
    Both {
        unused: usize,
        window: Option<Window>,
    },
    /// The same as `Causal` with runs of tokens that see each other.
    Ahead {
        unused: usize,
        window: Option<Window>,
    },
}

#[derive(Clone, Copy, Debug)]
struct Kind {
    k: TensorType,
    v: TensorType,
    head: [usize; 2],
    /// Tokens, heads, batch.
    queries: [usize; 3],
    keys: usize,
    kv_heads: usize,
    kv_batch: usize,
    sight: Sight,
    sinks: bool,
    max_bias: f32,
    softcap: f32,
    /// Biases of distances up to this one; 0 for none.
    reach: usize,
}

const PLAIN: Kind = Kind {
    k: F16,
    v: F16,
    head: [64, 64],
    queries: [1, 4, 1],
    keys: 113,
    kv_heads: 2,
    kv_batch: 1,
    sight: Sight::All,
    sinks: false,
    max_bias: 0.0,
    softcap: 0.0,
    reach: 0,
};

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Kind { k, v, head, queries: [tokens, heads, batch], keys, kv_heads, kv_batch, sight, .. } = self;
        write!(f, "{k}/{v} head {head:?} {tokens} tokens, {heads}/{kv_heads} heads, batch {batch}/{kv_batch}, ")?;
        write!(f, "{keys} keys, {sight:?}")?;
        if self.sinks {
            write!(f, ", sinks")?;
        }
        if self.max_bias > 0.0 {
            write!(f, ", max_bias {}", self.max_bias)?;
        }
        if self.softcap > 0.0 {
            write!(f, ", softcap {}", self.softcap)?;
        }
        if self.reach > 0 {
            write!(f, ", distances to {}", self.reach)?;
        }
        Ok(())
    }
}

/// A cache `[head, keys, kv_heads, batch]` as models keep it: all heads of a key side by side.
fn cache(data: &mut Data, ty: TensorType, head: usize, kind: &Kind) -> Tensor {
    let whole = data.input(ty, [head, kind.kv_heads, kind.keys, kind.kv_batch]);
    whole.permute([0, 2, 1, 3])
}

/// Fills the rows of a cache from `first` on with NaN.
fn spoil(data: &mut Data, cache: &Tensor, first: usize) {
    for b in 0..cache.shape[3] {
        for j in first..cache.shape[1] {
            for h in 0..cache.shape[2] {
                let at = cache.row_offset([j, h, b]);
                data.memory.bytes_mut(cache.slot)[at..at + cache.row_bytes()].fill(crate::case::POISON);
            }
        }
    }
}

pub(super) fn whole(data: &mut Data, values: &[i32]) -> Tensor {
    data.input_with(I32, [values.len(), 1, 1, 1], |_, i| f64::from(values[i]))
}

/// A mask: a fifth hidden in rectangles, a fifth without a term, the rest uniform.
fn explicit(data: &mut Data, keys: usize, tokens: usize, repeats: [usize; 2]) -> Tensor {
    let mask = data.input(F16, [keys, tokens, repeats[0], repeats[1]]);
    let mut values = data.memory.read(&mask);
    let rectangles = (keys * tokens * repeats[0] * repeats[1] / 5).div_ceil(64 * 128).max(2);
    for i in 0..rectangles {
        let (key, row) = (data.random.below(keys), data.random.below(values.len() / keys));
        let fill = if i % 2 == 0 { f64::NEG_INFINITY } else { 0.0 };
        for r in row..(row + 64).min(values.len() / keys) {
            values[r * keys + key..r * keys + (key + 128).min(keys)].fill(fill);
        }
    }
    data.memory.write(&mask, &values);
    mask
}

/// Tokens of a run that see each other.
const RUN: usize = 7;

/// Positions of `tokens` from each of these on, and which key is the last that each of them sees: every other run of [`RUN`] tokens sees itself
/// whole, others end where they stand. Without a first token all are padding.
fn ahead(data: &mut Data, tokens: usize, firsts: &[Option<usize>]) -> Tensor {
    let last = |n: usize| if (n / RUN).is_multiple_of(2) { ((n / RUN + 1) * RUN).min(tokens) - 1 } else { n };
    let all = |of: &dyn Fn(usize) -> usize| -> Vec<i32> {
        let at = |first: &Option<usize>, n: usize| first.map_or(-1, |first| (first + of(n)) as i32);
        firsts.iter().flat_map(|first| (0..tokens).map(move |n| (first, n))).map(|(first, n)| at(first, n)).collect()
    };
    let (positions, last) = (all(&|n| n), all(&last));
    let n = positions.len();
    whole(data, &[positions, last].concat()).reshape([n, 2, 1, 1])
}

fn sight(data: &mut Data, kind: &Kind) -> Mask {
    let [tokens, _, batch] = kind.queries;
    match kind.sight {
        Sight::All => Mask::None,
        Sight::Mask(repeats) => Mask::Explicit(explicit(data, kind.keys, tokens, repeats)),
        Sight::Causal { unused, window } => {
            let length = kind.keys - unused;
            let first = length as i32 - tokens as i32;
            let positions: Vec<i32> = (0..batch).flat_map(|_| (0..tokens as i32).map(|n| first + n)).collect();
            let positions = whole(data, &positions);
            Mask::Causal { positions, length: whole(data, &[length as i32]), window, both: false }
        }
        Sight::Ahead { unused, window } => {
            let length = kind.keys - unused;
            let positions = ahead(data, tokens, &vec![Some(length - tokens); batch]);
            Mask::Causal { positions, length: whole(data, &[length as i32]), window, both: false }
        }
        Sight::Both { unused, window } => {
            let length = kind.keys - unused;
            let positions: Vec<i32> = (0..batch * tokens).map(|i| (i % tokens * length / tokens) as i32).collect();
            let positions = whole(data, &positions);
            Mask::Causal { positions, length: whole(data, &[length as i32]), window, both: true }
        }
    }
}

fn call(data: &mut Data, kind: &Kind) -> Call {
    let [tokens, heads, batch] = kind.queries;
    let q = data.input(F32, [kind.head[0], heads, tokens, batch]).permute([0, 2, 1, 3]);
    let k = cache(data, kind.k, kind.head[0], kind);
    let v = cache(data, kind.v, kind.head[1], kind);
    if let Sight::Causal { unused, .. } | Sight::Both { unused, .. } = kind.sight {
        for t in [&k, &v] {
            spoil(data, t, kind.keys - unused);
        }
    }
    let mask = sight(data, kind);
    let sinks = kind.sinks.then(|| data.input_with(F32, [heads, 1, 1, 1], |random, _| random.uniform(-3.0, 3.0)));
    let out = data.output(F32, [kind.head[1], heads, tokens, batch]);
    let scale = 1.0 / (kind.head[0] as f32).sqrt();
    let (max_bias, logit_softcap) = (kind.max_bias, kind.softcap);
    let distances = (kind.reach > 0).then(|| distances(data, heads, kind.reach));
    Call { mask, sinks, distances, max_bias, logit_softcap, ..Call::plain(q, k, v, out, scale) }
}

/// Biases as large as scores differ, another one for each distance and head.
fn distances(data: &mut Data, heads: usize, reach: usize) -> Tensor {
    data.input_with(F32, [heads, 2 * reach + 1, 1, 1], |random, _| random.uniform(-3.0, 3.0))
}

fn case(kind: Kind) -> Case {
    Case::new(format!("flash_attention {kind}"), move |data| (call(data, &kind).into(), tolerance(kind.k)))
}

/// The same in runs of keys, added up by another dispatch or by the last run.
fn split(kind: Kind, count: usize, counted: bool) -> Case {
    Case::new(format!("flash_attention {kind}, {count} splits, counted={counted}"), move |data| {
        let call = call(data, &kind);
        (Call { split: Some(splits(data, &call, count, counted)), ..call }.into(), tolerance(kind.k))
    })
}

pub(super) fn splits(data: &mut Data, call: &Call, count: usize, counted: bool) -> Split {
    let scratch = data.output(F32, [call.scratch_bytes(count) / 4, 1, 1, 1]);
    let counters = counted.then(|| whole(data, &vec![0; call.counters()]));
    Split { count, short: count, scratch, counters }
}

/// Memory for the result as products take it.
pub(super) fn rounding(data: &mut Data, out: &Tensor) -> Rounding {
    Rounding { to: data.output(I8, [rounded::bytes(out.len()), 1, 1, 1]), weight: None }
}

/// The result left rounded, by one workgroup for each head or by the last of several.
fn left_rounded(kind: Kind, count: usize) -> Case {
    Case::new(format!("flash_attention {kind}, {count} splits, left rounded"), move |data| {
        let call = call(data, &kind);
        let split = (count > 1).then(|| splits(data, &call, count, true));
        let rounding = Some(rounding(data, &call.out));
        (Call { split, rounding, ..call }.into(), tolerance(kind.k))
    })
}

/// Results of one token that are left rounded.
fn left() -> Vec<Case> {
    let causal = Sight::Causal { unused: 9, window: None };
    vec![
        left_rounded(PLAIN, 1),
        left_rounded(Kind { sight: causal, keys: 600, ..PLAIN }, 4),
        // Many workgroups with no keys, heads that share a key in groups that are not full, heads of keys and values that differ.
        left_rounded(Kind { sight: causal, keys: 200, queries: [1, 12, 1], kv_heads: 1, ..PLAIN }, 16),
        left_rounded(Kind { head: [80, 96], queries: [1, 3, 1], kv_heads: 3, sinks: true, ..PLAIN }, 2),
        left_rounded(Kind { head: [128, 128], k: Q8_0, v: Q8_0, sight: causal, keys: 300, ..PLAIN }, 2),
        // No key is visible: a result of zeros.
        left_rounded(Kind { sight: Sight::Causal { unused: 113, window: None }, ..PLAIN }, 1),
    ]
}

/// Two tokens of sequences with 5, 70 and 128 keys whose pages of 16 lie in any order, one shared by two sequences.
fn paged(ragged: bool) -> Case {
    Case::new(format!("flash_attention pages of 16, ragged={ragged}"), move |data| {
        const SIZE: usize = 16;
        let lengths = [5, 70, 128];
        let table = [[19, -1, -1, -1, -1, -1, -1, -1], [3, 0, 12, 7, 18, -1, -1, -1], [3, 1, 17, 2, 9, 11, 10, 6]];
        let kind = Kind { keys: 20 * SIZE, ..PLAIN };
        let (k, v) = (cache(data, F16, 64, &kind), cache(data, F16, 64, &kind));
        let table: Vec<i32> = table.into_iter().flatten().collect();
        let table = whole(data, &table).reshape([8, 3, 1, 1]);
        let length = whole(data, &lengths);
        // Ragged: three, one and two tokens. Otherwise one token of each sequence.
        let (positions, sequences, tokens, batch) = if ragged {
            (vec![2, 3, 4, 69, 126, 127], Some(whole(data, &[0, 0, 0, 1, 2, 2])), 6, 1)
        } else {
            (vec![4, 69, 127], None, 1, 3)
        };
        let mask = Mask::Causal { positions: whole(data, &positions), length, window: None, both: false };
        let q = data.input(F32, [64, 4, tokens, batch]).permute([0, 2, 1, 3]);
        let out = data.output(F32, [64, 4, tokens, batch]);
        let pages = Some(Pages { table, size: SIZE });
        (Call { mask, pages, sequences, ..Call::plain(q, k, v, out, 0.125) }.into(), CLOSE)
    })
}

/// A batch as an engine makes it: sequences of different lengths, some of them padding (no key, position -1), whose pages lie in any
/// order in one cache of these types.
#[derive(Clone, Copy, Debug)]
struct Batch {
    types: [TensorType; 2],
    head: usize,
    /// Heads, and those of the cache.
    heads: [usize; 2],
    sequences: usize,
    page: usize,
    /// Rows for each sequence in token form, of as many sequences; none for one token of each sequence in batch form.
    prompts: Option<usize>,
    window: Option<Window>,
    both: bool,
    /// Whether runs of tokens see each other.
    ahead: bool,
    reach: usize,
    /// Splits, and those of them that may be short.
    splits: usize,
    short: usize,
    /// Most keys of a sequence.
    longest: usize,
    /// Pages that sequences have in common, those of every second one others than those between, where they are so long.
    shared: usize,
    /// Whether results are left as matrix units of this order take them.
    left: Option<FragmentLayout>,
}

const DECODE: Batch = Batch {
    types: [F16, F16],
    head: 64,
    heads: [8, 2],
    sequences: 64,
    page: 32,
    prompts: None,
    window: None,
    both: false,
    ahead: false,
    reach: 0,
    splits: 1,
    short: 2,
    longest: 160,
    shared: 0,
    left: None,
};

impl Batch {
    fn case(self) -> Case {
        Case::new(format!("flash_attention {self:?}"), move |data| {
            let Batch { types: [k, v], head, heads: [heads, kv_heads], sequences, page, .. } = self;
            let pages = self.longest.div_ceil(page) + 1;
            let per = self.prompts.unwrap_or(1);
            // Every fifth sequence is padding; the others have at least their own tokens.
            let longest = self.longest - per;
            let some = |s: usize| (37 * s + s * s) * self.longest / 160 % longest;
            let lengths: Vec<usize> = (0..sequences).map(|s| if s % 5 == 3 { 0 } else { per + some(s) }).collect();
            // Each sequence has pages of its own, numbered backwards; entries past its length are no pages.
            let mut last = 0;
            let mut table = vec![-1; pages * sequences];
            for (s, length) in lengths.iter().enumerate() {
                for entry in &mut table[s * pages..][..length.div_ceil(page)] {
                    *entry = last;
                    last += 1;
                }
            }
            table.iter_mut().filter(|entry| **entry >= 0).for_each(|entry| *entry = last - *entry);
            for s in 2..sequences {
                let common = self.shared.min(lengths[s] / page).min(lengths[s % 2] / page);
                let (before, after) = table.split_at_mut(s * pages);
                after[..common].copy_from_slice(&before[s % 2 * pages..][..common]);
            }
            let kind = Kind { keys: (last as usize + 1) * page, kv_heads, ..PLAIN };
            let (k_cache, v_cache) = (cache(data, k, head, &kind), cache(data, v, head, &kind));
            // Page 0 belongs to no sequence.
            for cache in [&k_cache, &v_cache] {
                spoil(data, &cache.narrow(1, 0, page), 0);
            }
            let positions: Vec<i32> = lengths
                .iter()
                .flat_map(|&length| (0..per).map(move |n| if length == 0 { -1 } else { (length - per + n) as i32 }))
                .collect();
            let owners: Vec<i32> = (0..sequences * per).map(|i| (i / per) as i32).collect();
            let (tokens, batch) = if self.prompts.is_some() { (sequences * per, 1) } else { (1, sequences) };
            let firsts: Vec<Option<usize>> = lengths.iter().map(|length| length.checked_sub(per)).collect();
            let lengths: Vec<i32> = lengths.iter().map(|n| *n as i32).collect();
            let positions = if self.ahead { ahead(data, per, &firsts) } else { whole(data, &positions) };
            let length = whole(data, &lengths);
            let mask = Mask::Causal { positions, length, window: self.window, both: self.both };
            let table = whole(data, &table).reshape([pages, sequences, 1, 1]);
            let q = data.input(F32, [head, heads, tokens, batch]).permute([0, 2, 1, 3]);
            let out = data.output(F32, [head, heads, tokens, batch]);
            let left = |order| PackedB {
                halves: data.output(F16, [packed_b::len(head * heads, sequences), 1, 1, 1]),
                layout: order,
                piece: 64,
                factors: None,
                squares: None,
            };
            let emit_packed_b = self.left.map(left);
            let call = Call {
                mask,
                emit_packed_b,
                pages: Some(Pages { table, size: page }),
                sequences: self.prompts.map(|_| whole(data, &owners)),
                distances: (self.reach > 0).then(|| distances(data, heads, self.reach)),
                shares: self.shared > 0,
                ..Call::plain(q, k_cache, v_cache, out, 0.125)
            };
            let split = || Split { short: self.short, ..splits(data, &call, self.splits, true) };
            let split = (self.splits > 1).then(split);
            // Columns that are emitted packed are judged one by one.
            let tolerance = if self.left.is_some() { Tolerance::NmsePerRow(4e-6) } else { tolerance(k) };
            (Call { split, ..call }.into(), tolerance)
        })
    }
}

/// Every pair of types of a cache in pages, in both forms; other pages, windows, splits.
fn batches(types: &[TensorType]) -> Vec<Case> {
    let mut cases = vec![
        DECODE.case(),
        Batch { splits: 2, ..DECODE }.case(),
        // Of 2,345 keys the longest are cut into two runs, in the second case into three short ones.
        Batch { sequences: 9, longest: 2345, splits: 6, short: 1, ..DECODE }.case(),
        Batch { sequences: 4, longest: 2345, splits: 6, short: 3, window: Some(Last(1500)), ..DECODE }.case(),
        Batch { page: 16, window: Some(Last(33)), heads: [4, 4], ..DECODE }.case(),
        Batch { head: 128, page: 64, heads: [12, 2], sequences: 9, ..DECODE }.case(),
        Batch { sequences: 1, ..DECODE }.case(),
        Batch { prompts: Some(11), sequences: 7, ..DECODE }.case(),
        Batch { prompts: Some(40), sequences: 4, window: Some(Last(50)), ..DECODE }.case(),
        // Prompts that cross the border of a chunk, and tokens at all places of theirs.
        Batch { prompts: Some(40), sequences: 4, window: Some(Chunk(48)), ..DECODE }.case(),
        Batch { window: Some(Chunk(37)), page: 16, ..DECODE }.case(),
        Batch { sequences: 4, longest: 2345, splits: 6, short: 3, window: Some(Chunk(1500)), ..DECODE }.case(),
        Batch { prompts: Some(3), sequences: 9, page: 16, head: 128, ..DECODE }.case(),
        Batch { prompts: Some(40), sequences: 4, both: true, ..DECODE }.case(),
        Batch { prompts: Some(40), sequences: 4, both: true, window: Some(Last(7)), heads: [4, 4], ..DECODE }.case(),
        Batch { sequences: 9, both: true, window: Some(Last(20)), ..DECODE }.case(),
        Batch { prompts: Some(40), sequences: 4, ahead: true, ..DECODE }.case(),
        // Windows shorter than a run end behind the query alone.
        Batch { prompts: Some(40), sequences: 4, ahead: true, window: Some(Last(4)), heads: [4, 4], ..DECODE }.case(),
        Batch { sequences: 9, reach: 12, ..DECODE }.case(),
        Batch { prompts: Some(40), sequences: 4, both: true, reach: 9, heads: [6, 6], ..DECODE }.case(),
        Batch {
            types: [Q8_0; 2],
            head: 256,
            page: 64,
            heads: [20, 1],
            sequences: 3,
            window: Some(Last(100)),
            ..DECODE
        }
        .case(),
    ];
    // Results that are emitted packed, by one workgroup, by the last of several, and of sequences that are read together.
    for left in [FragmentLayout::Mma16x8, FragmentLayout::Row8].map(Some) {
        let many = Batch { sequences: 16, left, ..DECODE };
        cases.push(many.case());
        cases.push(Batch { splits: 3, short: 3, longest: 700, ..many }.case());
        cases.push(Batch { head: 128, page: 64, heads: [8, 2], shared: 2, ..many }.case());
    }
    // Heads whose blocks lanes load as words, in runs of keys.
    for ty in [F16, Q8_0, Q4_0] {
        let wide = Batch { types: [ty; 2], head: 128, page: 64, heads: [12, 2], sequences: 4, longest: 700, ..DECODE };
        cases.push(Batch { splits: 5, short: 5, ..wide }.case());
        cases.push(Batch { window: Some(Last(70)), page: 16, ..wide }.case());
        // A beginning in common, in groups of sequences that are full and not.
        cases.push(Batch { shared: 4, heads: [8, 2], sequences: 11, ..wide }.case());
        cases.push(Batch { shared: 4, heads: [4, 2], sequences: 7, page: 16, splits: 3, short: 3, ..wide }.case());
    }
    for (i, &k) in types.iter().enumerate() {
        for (j, &v) in types.iter().enumerate() {
            let prompts = ((i + j) % 2 == 0).then_some(9);
            cases.push(Batch { types: [k, v], sequences: 5, heads: [4, 2], prompts, ..DECODE }.case());
        }
    }
    cases
}

/// V as the first columns of K, as latent attention keeps it: one head of 576, of which 512 are the value.
fn latent(heads: usize, tokens: usize, keys: usize) -> Case {
    Case::new(
        format!("flash_attention V is a view of K 576/512, {heads} heads, {tokens} tokens, {keys} keys"),
        move |data| {
            let kind = Kind { head: [576, 512], queries: [tokens, heads, 1], kv_heads: 1, keys, ..PLAIN };
            let call = call(data, &kind);
            (Call { v: call.k.narrow(0, 0, 512), ..call }.into(), CLOSE)
        },
    )
}

/// Scores of some hundred, so that one key takes all the weight: halves of Q may be off by 2^-11, and so may a score by
/// 0.1; the values of the heaviest key dominate all the same.
fn large_scores() -> Case {
    Case::new("flash_attention large scores", |data| {
        let kind = Kind { queries: [3, 4, 1], ..PLAIN };
        let call = call(data, &kind);
        let q = data.input_with(F32, [64, 4, 3, 1], |random, _| 16.0 * (random.below(65) as f64 - 32.0));
        (Call { q: q.permute([0, 2, 1, 3]), ..call }.into(), Tolerance::Nmse(1e-5))
    })
}

/// Queries that no half float holds, with scores that differ by hundreds from key to key: one key takes all the weight, whether a kernel
/// multiplies by the query or by the largest half.
fn large_queries(ty: TensorType) -> Case {
    Case::new(format!("flash_attention {ty} queries beyond half floats"), move |data| {
        let kind = Kind { k: ty, v: ty, head: [128, 128], queries: [1, 8, 1], ..PLAIN };
        let call = call(data, &kind);
        let of_first = |i: usize, value: f64| if i.is_multiple_of(128) { value } else { 0.0 };
        let q = data.input_with(F32, [128, 8, 1, 1], |_, i| of_first(i, if i / 128 % 2 == 0 { 1e7 } else { -3e6 }));
        // The first elements of keys lie apart by more than a code of the coarsest type.
        let k = data.input_with(ty, [128, 2, 113, 1], |_, i| of_first(i, ((i / 256 * 37) % 113) as f64 / 4.0 - 14.0));
        let (q, k) = (q.permute([0, 2, 1, 3]), k.permute([0, 2, 1, 3]));
        (Call { q, k, ..call }.into(), CLOSE)
    })
}

/// Rows whose first tiles are hidden, rows that see nothing at all, and a row that sees one key.
fn hidden_rows(sinks: bool) -> Case {
    Case::new(format!("flash_attention hidden rows, sinks={sinks}"), move |data| {
        let kind = Kind { queries: [11, 4, 1], keys: 200, sinks, ..PLAIN };
        let call = call(data, &kind);
        let mask = data.input_with(F16, [200, 11, 1, 1], |_, i| match (i / 200, i % 200) {
            (0 | 5, _) => f64::NEG_INFINITY,
            (1, key) if key != 77 => f64::NEG_INFINITY,
            (_, key) if key < 150 => f64::NEG_INFINITY,
            _ => 0.0,
        });
        (Call { mask: Mask::Explicit(mask), ..call }.into(), CLOSE)
    })
}

/// Sinks above every score take nearly all the weight.
fn large_sinks() -> Case {
    Case::new("flash_attention large sinks", |data| {
        let call = call(data, &Kind { queries: [9, 4, 1], ..PLAIN });
        let sinks = data.input_with(F32, [4, 1, 1, 1], |random, _| random.uniform(5.0, 9.0));
        (Call { sinks: Some(sinks), ..call }.into(), CLOSE)
    })
}

/// Scores that rise from key to key, by some 40 in all: maxima move again and again, now by a lot, now by less than lets a kernel leave
/// them where they are.
fn rising_scores() -> Case {
    Case::new("flash_attention rising scores", |data| {
        let kind = Kind { queries: [33, 4, 1], keys: 300, sight: Sight::Causal { unused: 7, window: None }, ..PLAIN };
        let call = call(data, &kind);
        let q = data.input_with(F32, [64, 4, 33, 1], |random, _| random.uniform(0.9, 1.1));
        // Steps of some keys each, so that weights of a step are shared.
        let row = |i: usize| i / (64 * 2) / 5;
        let k = data.input_with(F16, [64, 2, 300, 1], |random, i| row(i) as f64 * 0.085 + random.uniform(-0.02, 0.02));
        (Call { q: q.permute([0, 2, 1, 3]), k: k.permute([0, 2, 1, 3]), ..call }.into(), Tolerance::Nmse(1e-5))
    })
}

/// Many tokens of wide heads: several rounds of keys and several tiles of rows, both with a last one that is not full.
fn prompts() -> Vec<Case> {
    let causal = Sight::Causal { unused: 7, window: None };
    let prompt = Kind { head: [128, 128], queries: [35, 8, 1], keys: 150, sight: causal, ..PLAIN };
    let near = Sight::Causal { unused: 5, window: Some(Last(40)) };
    vec![
        case(prompt),
        case(Kind { queries: [20, 4, 2], kv_batch: 2, sight: near, sinks: true, ..prompt }),
        case(Kind { k: Q8_0, v: Q8_0, softcap: 10.0, ..prompt }),
        case(Kind { k: Q4_0, v: F16, sight: near, ..prompt }),
        case(Kind { sight: Sight::Mask([2, 1]), sinks: true, ..prompt }),
        case(Kind { head: [64, 64], k: Q4_0, v: Q4_0, sight: Sight::Mask([1, 1]), ..prompt }),
        case(Kind { head: [256, 256], queries: [19, 6, 1], keys: 100, ..prompt }),
        case(Kind {
            head: [256, 256],
            queries: [9, 16, 1],
            kv_heads: 1,
            keys: 90,
            sight: Sight::Mask([1, 1]),
            ..prompt
        }),
        case(Kind { head: [192, 128], queries: [21, 3, 1], kv_heads: 3, sight: near, ..prompt }),
        split(Kind { queries: [20, 8, 1], keys: 500, ..prompt }, 3, true),
        split(Kind { queries: [20, 8, 1], keys: 500, sight: near, ..prompt }, 3, false),
        Batch { prompts: Some(21), sequences: 5, head: 128, page: 64, types: [Q8_0, F16], longest: 300, ..DECODE }
            .case(),
        Batch { prompts: Some(33), sequences: 4, head: 128, page: 16, window: Some(Last(50)), longest: 300, ..DECODE }
            .case(),
        rising_scores(),
    ]
}

fn small() -> Vec<Case> {
    let causal = Sight::Causal { unused: 7, window: None };
    let decode = Kind { head: [128, 128], queries: [1, 32, 1], kv_heads: 8, sight: causal, ..PLAIN };
    let prefill = Kind { queries: [9, 4, 1], sight: causal, ..PLAIN };
    let (both, near) = (Sight::Both { unused: 7, window: None }, Sight::Both { unused: 7, window: Some(Last(17)) });
    let ahead = Sight::Ahead { unused: 7, window: None };
    let ahead_near = Sight::Ahead { unused: 7, window: Some(Last(5)) };
    let mut cases = vec![
        case(PLAIN),
        case(decode),
        case(prefill),
        case(Kind { queries: [75, 4, 1], keys: 140, ..prefill }),
        case(Kind { sight: Sight::Causal { unused: 7, window: Some(Last(5)) }, ..prefill }),
        case(Kind { sight: Sight::Causal { unused: 7, window: Some(Chunk(11)) }, ..prefill }),
        case(Kind {
            k: F32,
            v: F32,
            queries: [3, 4, 2],
            kv_batch: 2,
            sight: Sight::Mask([2, 1]),
            sinks: true,
            ..PLAIN
        }),
        case(Kind { queries: [2, 12, 2], kv_heads: 1, sight: Sight::Mask([1, 2]), max_bias: 8.0, ..PLAIN }),
        case(Kind { queries: [2, 6, 1], sight: causal, max_bias: 8.0, softcap: 10.0, ..PLAIN }),
        case(Kind { queries: [2, 40, 1], keys: 40, ..prefill }),
        case(Kind { sight: both, ..prefill }),
        case(Kind { sight: ahead, ..prefill }),
        case(Kind { queries: [75, 6, 1], keys: 140, sight: ahead, softcap: 3.0, ..PLAIN }),
        case(Kind { queries: [75, 6, 2], kv_batch: 2, keys: 140, sight: ahead_near, ..PLAIN }),
        case(Kind { queries: [75, 6, 1], keys: 140, sight: both, max_bias: 8.0, ..PLAIN }),
        case(Kind { queries: [75, 4, 1], keys: 140, sight: near, ..PLAIN }),
        case(Kind { queries: [1, 4, 3], kv_batch: 3, sight: near, max_bias: 8.0, ..PLAIN }),
        case(Kind { queries: [75, 6, 1], keys: 140, sight: both, reach: 33, ..PLAIN }),
        case(Kind { queries: [9, 4, 1], k: F32, v: F32, sight: causal, reach: 200, softcap: 10.0, ..PLAIN }),
        case(Kind { queries: [3, 4, 1], k: Q8_0, v: Q8_0, sight: causal, reach: 5, ..PLAIN }),
        case(Kind { head: [40, 40], keys: 17, ..PLAIN }),
        case(Kind { head: [72, 72], k: BF16, v: BF16, queries: [5, 4, 1], ..PLAIN }),
        case(Kind { head: [192, 128], keys: 1, sinks: true, ..PLAIN }),
        case(Kind { head: [256, 256], keys: 70, queries: [5, 4, 1], ..PLAIN }),
        case(Kind { k: Q8_0, v: Q8_0, queries: [3, 4, 1], ..PLAIN }),
        case(Kind { k: Q8_0, v: Q4_0, queries: [1, 4, 1], sight: causal, ..PLAIN }),
        case(Kind { k: Q4_1, v: F16, queries: [1, 4, 1], ..PLAIN }),
        case(Kind { k: Q5_1, v: IQ4_NL, queries: [1, 6, 1], ..PLAIN }),
        case(Kind { k: IQ4_NL, v: Q5_0, queries: [1, 2, 1], ..PLAIN }),
        // Rows of Q8_0 that are read 8 bytes at a time.
        case(Kind { k: Q8_0, v: Q8_0, ..decode }),
        latent(20, 1, 70),
        large_scores(),
        large_queries(F16),
        large_queries(Q8_0),
        large_queries(Q4_0),
        large_sinks(),
    ];
    cases.extend(prompts());
    cases.extend([false, true].map(hidden_rows));
    cases.extend([false, true].map(paged));
    // Each type as K and as V; all pairs want a real GPU.
    cases.extend(batches(&[F16, Q8_0]));
    for (k, v) in [(F32, Q4_0), (BF16, Q4_1), (Q4_0, Q5_0), (Q4_1, Q5_1), (Q5_0, IQ4_NL), (Q5_1, F32), (IQ4_NL, BF16)] {
        cases.push(Batch { types: [k, v], sequences: 4, heads: [4, 2], ..DECODE }.case());
        cases.push(Batch { types: [k, v], sequences: 3, heads: [4, 2], prompts: Some(5), ..DECODE }.case());
    }
    for counted in [false, true] {
        cases.push(split(Kind { keys: 300, sinks: true, ..decode }, 16, counted));
        let masked = Kind { queries: [3, 4, 2], keys: 513, sight: Sight::Mask([4, 1]), ..PLAIN };
        cases.push(split(masked, 5, counted));
        cases.push(split(Kind { sight: Sight::Causal { unused: 113, window: None }, ..PLAIN }, 2, counted));
        let window = Sight::Causal { unused: 100, window: Some(Last(200)) };
        cases.push(split(Kind { queries: [2, 4, 1], keys: 900, sight: window, ..PLAIN }, 4, counted));
        cases.push(split(Kind { queries: [2, 4, 1], keys: 900, sight: causal, reach: 40, ..PLAIN }, 4, counted));
    }
    cases
}

/// What wants a real GPU: the grid of head sizes, ratios, types and lengths.
fn full() -> Vec<Case> {
    let causal = Sight::Causal { unused: 3, window: None };
    let mut cases = Vec::new();
    let heads = [40, 64, 72, 80, 96, 128, 192, 256, 320, 512, 576].map(|n| [n, n]);
    for head in heads.into_iter().chain([[192, 128], [320, 256], [576, 512]]) {
        for (tokens, keys) in [(1, 113), (3, 1025), (75, 512)] {
            let kind = Kind { head, queries: [tokens, 8, 1], keys, ..PLAIN };
            cases.push(case(Kind { sight: causal, ..kind }));
            cases.push(case(Kind { sight: Sight::Both { unused: 3, window: Some(Last(65)) }, max_bias: 8.0, ..kind }));
            cases.push(case(Kind { sight: Sight::Mask([1, 1]), sinks: true, max_bias: 8.0, ..kind }));
        }
    }
    let types = [F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL];
    cases.extend(batches(&types));
    for (k, v) in types.into_iter().flat_map(|k| types.map(|v| (k, v))) {
        if [k, v].iter().all(|&ty| crate::formats::format(ty).is_some()) {
            for tokens in [1, 33] {
                cases.push(case(Kind { k, v, queries: [tokens, 4, 1], keys: 300, sight: causal, ..PLAIN }));
            }
        }
    }
    for ratio in [1, 4, 8, 12, 16, 20, 32, 128] {
        for tokens in [1, 32] {
            let kind = Kind { queries: [tokens, 2 * ratio, 3], keys: 1024, kv_batch: 3, sight: causal, ..PLAIN };
            cases.push(case(kind));
            cases.push(case(Kind { softcap: 30.0, head: [128, 128], kv_batch: 1, ..kind }));
        }
    }
    for counted in [false, true] {
        for splits in [2, 7, 64] {
            let kind = Kind { head: [128, 128], queries: [1, 32, 2], kv_heads: 8, kv_batch: 2, ..PLAIN };
            cases.push(split(Kind { keys: 16384, sight: causal, ..kind }, splits, counted));
            cases.push(split(
                Kind { keys: 4096, queries: [4, 32, 2], sight: causal, sinks: true, ..kind },
                splits,
                counted,
            ));
        }
    }
    cases.push(case(Kind { head: [128, 128], queries: [512, 8, 1], keys: 4096, sight: causal, ..PLAIN }));
    cases.push(case(Kind { queries: [2, 2, 1], kv_heads: 1, keys: 131_072, sight: causal, ..PLAIN }));
    cases
        .extend([(20, 1, 1025), (128, 2, 512), (16, 64, 200)].map(|(heads, tokens, keys)| latent(heads, tokens, keys)));
    cases
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let mut cases = match level {
        Level::Small => small(),
        Level::Full => small().into_iter().chain(full()).collect(),
        Level::Bench => bench::cases(),
    };
    cases.extend(kv_append_cases::cases(level));
    if level != Level::Bench {
        cases.extend(left());
    }
    cases
}
