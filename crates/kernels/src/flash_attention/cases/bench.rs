//! Calls of `flash_attention` that are timed.

use kiln_gguf::TensorType::{self, F16, F32, Q4_0, Q8_0};

use super::super::{Call, Mask, Pages, Split};
use super::{Kind, PLAIN, Sight, sight, splits, tolerance, whole};
use crate::case::{Case, Data};
use crate::tensor::Tensor;

/// Benches are not judged, so one row is enough for a tensor: making more takes longer than attending to it.
fn repeated(data: &mut Data, ty: TensorType, shape: [usize; 4]) -> Tensor {
    if data.is_blank() {
        return data.output(ty, shape);
    }
    let row = data.input(ty, [shape[0], 1, 1, 1]);
    let row = data.memory.bytes(row.slot).to_vec();
    let tensor = data.output(ty, shape);
    data.memory.bytes_mut(tensor.slot).chunks_exact_mut(row.len()).for_each(|to| to.copy_from_slice(&row));
    tensor
}

/// A case to time, in this many splits, with counters, where there are more than one.
fn timed(kind: Kind, count: usize) -> Case {
    let name = if count > 1 { format!("{kind}, {count} splits") } else { kind.to_string() };
    Case::new(format!("flash_attention {name}"), move |data| {
        let [tokens, heads, batch] = kind.queries;
        let of_cache = |data: &mut Data, ty: TensorType, head: usize| {
            repeated(data, ty, [head, kind.kv_heads, kind.keys, kind.kv_batch]).permute([0, 2, 1, 3])
        };
        let q = repeated(data, F32, [kind.head[0], heads, tokens, batch]).permute([0, 2, 1, 3]);
        let (k, v) = (of_cache(data, kind.k, kind.head[0]), of_cache(data, kind.v, kind.head[1]));
        let mask = match kind.sight {
            Sight::Mask([m2, m3]) => Mask::Explicit(repeated(data, F16, [kind.keys, tokens, m2, m3])),
            _ => sight(data, &kind),
        };
        let out = data.output(F32, [kind.head[1], heads, tokens, batch]);
        let scale = 1.0 / (kind.head[0] as f32).sqrt();
        let call = Call { mask, ..Call::plain(q, k, v, out, scale) };
        let split = (count > 1).then(|| splits(data, &call, count, true));
        (Call { split, ..call }.into(), tolerance(kind.k))
    })
}

/// One token each of 32 sequences, as a server has them: this many keys each, in a cache of this type; or one of them with as many as all
/// others have together; or all with the same pages.
#[derive(Clone, Copy, Debug)]
enum Company {
    BatchInvariant,
    OneLong,
    SamePages,
}

fn timed_batch(company: Company, ty: TensorType, [count, short]: [usize; 2]) -> Case {
    const SEQUENCES: usize = 32;
    const PAGE: usize = 64;
    let keys = match company {
        Company::BatchInvariant | Company::SamePages => [8192; SEQUENCES],
        Company::OneLong => std::array::from_fn(|s| if s == 0 { 31 * 1024 } else { 1024 }),
    };
    let name = format!("32 sequences, {company:?}, {} keys in all, {ty}, {count} splits", keys.iter().sum::<usize>());
    Case::new(format!("flash_attention {name}"), move |data| {
        let (head, heads, kv_heads) = (128, 32, 8);
        let own = if matches!(company, Company::SamePages) { 1 } else { SEQUENCES };
        let rows: usize = keys[..own].iter().sum();
        let cache = |data: &mut Data| repeated(data, ty, [head, kv_heads, rows, 1]).permute([0, 2, 1, 3]);
        let (k, v) = (cache(data), cache(data));
        let pages = keys.iter().max().expect("there are sequences") / PAGE;
        let mut table = vec![-1; pages * SEQUENCES];
        let mut last = 0;
        for (s, keys) in keys.iter().enumerate() {
            let first = if s < own { last } else { 0 };
            let number = |page: usize| (first + page) as i32;
            table[s * pages..][..keys / PAGE].iter_mut().enumerate().for_each(|(page, entry)| *entry = number(page));
            last = first + keys / PAGE;
        }
        let table = whole(data, &table).reshape([pages, SEQUENCES, 1, 1]);
        let positions = whole(data, &keys.map(|n| n as i32 - 1));
        let length = whole(data, &keys.map(|n| n as i32));
        let mask = Mask::Causal { positions, length, window: None, both: false };
        let q = repeated(data, F32, [head, heads, 1, SEQUENCES]).permute([0, 2, 1, 3]);
        let out = data.output(F32, [head, heads, 1, SEQUENCES]);
        let pages = Some(Pages { table, size: PAGE });
        let shares = matches!(company, Company::SamePages);
        let call = Call { mask, pages, shares, ..Call::plain(q, k, v, out, 0.09) };
        let split = || Split { short, ..splits(data, &call, count, true) };
        let split = (count > 1).then(split);
        (Call { split, ..call }.into(), tolerance(ty))
    })
}

/// The shapes that are timed: decode and prefill of a model of 8 billion weights, and those others are measured on.
pub(super) fn cases() -> Vec<Case> {
    let all = Sight::Causal { unused: 0, window: None };
    let masked = Sight::Mask([1, 1]);
    let mut cases = Vec::new();
    let decode = Kind { head: [128, 128], queries: [1, 32, 1], kv_heads: 8, sight: all, ..PLAIN };
    for keys in [8192, 32768] {
        for ty in [F16, Q8_0, Q4_0] {
            let counts: &[usize] = if ty == Q4_0 { &[32] } else { &[16, 32] };
            cases.extend(counts.iter().map(|&n| timed(Kind { k: ty, v: ty, keys, ..decode }, n)));
        }
    }
    for ty in [F16, Q8_0, Q4_0] {
        cases.extend([[1, 1], [8, 1]].map(|splits| timed_batch(Company::BatchInvariant, ty, splits)));
    }
    cases.extend([[1, 1], [8, 1]].map(|splits| timed_batch(Company::OneLong, F16, splits)));
    for ty in [F16, Q8_0] {
        cases.push(timed_batch(Company::SamePages, ty, [8, 4]));
    }
    cases.push(timed(Kind { queries: [2048, 32, 1], keys: 2048, ..decode }, 1));
    cases.push(timed(Kind { queries: [512, 32, 1], keys: 8192, ..decode }, 1));
    for ty in [F16, Q4_0, Q8_0] {
        for (tokens, count) in [(1, 16), (4, 16), (4, 32), (512, 1)] {
            let kind = Kind { k: ty, v: ty, queries: [tokens, 64, 1], kv_heads: 8, keys: 7680, ..PLAIN };
            cases.push(timed(Kind { sight: masked, ..kind }, count));
        }
    }
    for keys in [128, 1024, 4096, 20_000] {
        let kind = Kind { head: [256, 256], queries: [1, 32, 1], keys, sight: masked, ..PLAIN };
        cases.push(timed(kind, (keys / 128).min(16)));
        cases.push(timed(Kind { queries: [512, 32, 1], ..kind }, 1));
    }
    // A short prompt, which a software GPU is through with in a moment.
    for ty in [F16, Q8_0, Q4_0] {
        cases.push(timed(Kind { k: ty, v: ty, queries: [64, 32, 1], keys: 512, sight: masked, ..decode }, 1));
    }
    cases.push(timed(Kind { head: [72, 72], queries: [5776, 16, 1], kv_heads: 16, keys: 5776, ..PLAIN }, 1));
    for (head, kv_heads, count) in [(64, 32, 8), (64, 8, 32), (128, 32, 8), (128, 8, 32)] {
        for keys in [4096, 8192, 16384] {
            let queries = [1, 32, 1];
            let kind = Kind { head: [head, head], queries, kv_heads, keys, sight: masked, ..PLAIN };
            cases.push(timed(kind, count));
        }
    }
    cases
}
