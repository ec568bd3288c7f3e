//! Cases of `flash_attention`.

use kiln_gguf::TensorType::{self, F16, F32, I32};

use super::{Call, Mask, Pages, Split};
use crate::case::{Case, Data, Level, Tolerance};
use crate::tensor::Tensor;

/// Sums in f32 of scores near 1: what is left is the exponential's error.
const CLOSE: Tolerance = Tolerance::Nmse(1e-6);

/// How queries see keys in a case.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sight {
    All,
    /// An explicit mask that repeats over these extents.
    Mask([usize; 2]),
    /// Causal, the last token at the end; this many rows of the cache are unused and hold NaN.
    Causal {
        unused: usize,
        window: Option<usize>,
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

fn whole(data: &mut Data, values: &[i32]) -> Tensor {
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
            Mask::Causal { positions, length: whole(data, &[length as i32]), window }
        }
    }
}

fn call(data: &mut Data, kind: &Kind) -> Call {
    let [tokens, heads, batch] = kind.queries;
    let q = data.input(F32, [kind.head[0], heads, tokens, batch]).permute([0, 2, 1, 3]);
    let k = cache(data, kind.k, kind.head[0], kind);
    let v = cache(data, kind.v, kind.head[1], kind);
    if let Sight::Causal { unused, .. } = kind.sight {
        for t in [&k, &v] {
            spoil(data, t, kind.keys - unused);
        }
    }
    let mask = sight(data, kind);
    let sinks = kind.sinks.then(|| data.input_with(F32, [heads, 1, 1, 1], |random, _| random.uniform(-3.0, 3.0)));
    let out = data.output(F32, [kind.head[1], heads, tokens, batch]);
    let scale = 1.0 / (kind.head[0] as f32).sqrt();
    let (max_bias, logit_softcap) = (kind.max_bias, kind.softcap);
    Call { mask, sinks, max_bias, logit_softcap, ..Call::plain(q, k, v, out, scale) }
}

fn case(kind: Kind) -> Case {
    Case::new(format!("flash_attention {kind}"), move |data| (call(data, &kind).into(), CLOSE))
}

/// The same in runs of keys, added up by another dispatch or by the last run.
fn split(kind: Kind, count: usize, counted: bool) -> Case {
    Case::new(format!("flash_attention {kind}, {count} splits, counted={counted}"), move |data| {
        let call = call(data, &kind);
        (Call { split: Some(splits(data, &call, count, counted)), ..call }.into(), CLOSE)
    })
}

fn splits(data: &mut Data, call: &Call, count: usize, counted: bool) -> Split {
    let scratch = data.output(F32, [call.scratch_bytes(count) / 4, 1, 1, 1]);
    let counters = counted.then(|| whole(data, &vec![0; call.counters()]));
    Split { count, scratch, counters }
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
        let mask = Mask::Causal { positions: whole(data, &positions), length, window: None };
        let q = data.input(F32, [64, 4, tokens, batch]).permute([0, 2, 1, 3]);
        let out = data.output(F32, [64, 4, tokens, batch]);
        let pages = Some(Pages { table, size: SIZE });
        (Call { mask, pages, sequences, ..Call::plain(q, k, v, out, 0.125) }.into(), CLOSE)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let causal = Sight::Causal { unused: 7, window: None };
    let decode = Kind { head: [128, 128], queries: [1, 32, 1], kv_heads: 8, sight: causal, ..PLAIN };
    if level == Level::Bench {
        return [8192, 32768]
            .map(|keys| case(Kind { keys, sight: Sight::Causal { unused: 0, window: None }, ..decode }))
            .into();
    }
    let mut cases = vec![
        case(PLAIN),
        case(decode),
        case(Kind { queries: [9, 4, 1], sight: causal, ..PLAIN }),
        case(Kind { queries: [9, 4, 1], sight: Sight::Causal { unused: 7, window: Some(5) }, ..PLAIN }),
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
        case(Kind { head: [40, 40], keys: 17, ..PLAIN }),
        case(Kind { head: [192, 128], keys: 1, sinks: true, ..PLAIN }),
    ];
    cases.extend([false, true].map(paged));
    for counted in [false, true] {
        cases.push(split(Kind { keys: 300, ..decode }, 3, counted));
        cases.push(split(Kind { keys: 300, sinks: true, ..decode }, 16, counted));
        let masked = Kind { queries: [3, 4, 2], keys: 513, sight: Sight::Mask([4, 1]), ..PLAIN };
        cases.push(split(masked, 5, counted));
        cases.push(split(Kind { sight: Sight::Causal { unused: 113, window: None }, ..PLAIN }, 2, counted));
        let window = Sight::Causal { unused: 100, window: Some(200) };
        cases.push(split(Kind { queries: [2, 4, 1], keys: 900, sight: window, ..PLAIN }, 4, counted));
    }
    cases
}
