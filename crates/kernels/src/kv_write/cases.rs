//! Cases of `kv_write`.

use kiln_gguf::TensorType::{self, BF16, F16, F32, I32, IQ4_NL, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};

use super::Call;
use crate::case::{Case, Data, Level};
use crate::formats::random_blocks;
use crate::mul_mat::Norm;
use crate::rope::{self, RopeParams, RopeStyle};
use crate::set_rows::cases::tolerance;

/// Sizes: head, elements turned, query heads, kv heads, tokens.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    head: usize,
    turned: usize,
    heads: [usize; 2],
    tokens: usize,
}

fn call(data: &mut Data, style: RopeStyle, sizes: Sizes, [to_k, to_v]: [TensorType; 2], rows: usize) -> Call {
    let Sizes { head, turned, heads: [q_heads, kv_heads], tokens } = sizes;
    let params = RopeParams::plain(style, turned, 10000.0);
    let table = params.freqs(None).expect("no factors to miss");
    let freqs = data.input_with(I32, [2, params.pairs(), 1, 1], |_, i| f64::from(table[i]));
    let positions = data.input_with(I32, [tokens, 1, 1, 1], |random, _| random.below(100_000) as f64);
    // Rows in no order, none twice as long as 7 does not divide the number; of fewer than 11 rows some are missed.
    let ids = data.input_with(I32, [tokens, 1, 1, 1], |_, i| ((7 * i + 3) % rows.max(11)) as f64);
    let x = data.input(F32, [head, q_heads, tokens, 1]);
    let q = rope::Call {
        x,
        positions,
        freqs,
        y: x,
        style,
        n_dims: turned,
        offset: 0,
        sections: [0; 4],
        magnitude: 1.25,
        backward: false,
    };
    let (k, v) = (data.input(F32, [head, kv_heads, tokens, 1]), data.input(F32, [head, kv_heads, tokens, 1]));
    let k_cache = random_blocks(data, to_k, [head * kv_heads, rows, 1, 1], false);
    let v_cache = random_blocks(data, to_v, [head * kv_heads, rows, 1, 1], false);
    Call { q, k, v, norms: None, ids, k_cache, v_cache }
}

fn case(style: RopeStyle, sizes: Sizes, caches: [TensorType; 2], rows: usize) -> Case {
    with("", style, sizes, caches, rows, |_, call| call)
}

/// The same with heads that are normed; `weighed`: by weights of their own.
fn normed(style: RopeStyle, sizes: Sizes, caches: [TensorType; 2], rows: usize, weighed: [bool; 2]) -> Case {
    let name = format!("norms {weighed:?} ");
    with(&name, style, sizes, caches, rows, move |data, call| {
        let mut norm =
            |weighed: bool, eps| Norm { weight: weighed.then(|| data.input(F32, [sizes.head, 1, 1, 1])), eps };
        // Rows of even numbers have a mean square of about a third: such a factor shows.
        Call { norms: Some([norm(weighed[0], 0.5), norm(weighed[1], 0.01)]), ..call }
    })
}

fn with(
    what: &str,
    style: RopeStyle,
    sizes: Sizes,
    caches: [TensorType; 2],
    rows: usize,
    change: impl Fn(&mut Data, Call) -> Call + Send + Sync + 'static,
) -> Case {
    let [to_k, to_v] = caches;
    Case::new(format!("kv_write {what}{style:?} {to_k} {to_v} {sizes:?} of {rows}"), move |data| {
        let coarser =
            if to_k.block_bytes() * to_v.block_len() < to_v.block_bytes() * to_k.block_len() { to_k } else { to_v };
        let tolerance = match tolerance(F32, coarser) {
            // Sine and cosine are right to an ulp or two.
            crate::case::Tolerance::Exact => crate::case::Tolerance::Nmse(1e-12),
            other => other,
        };
        let call = call(data, style, sizes, caches, rows);
        (change(data, call).into(), tolerance)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    use RopeStyle::{Neox, Normal};
    let sizes = |head, turned, heads, tokens| Sizes { head, turned, heads, tokens };
    if level == Level::Bench {
        let sizes = [1, 512].map(|tokens| sizes(128, 128, [32, 8], tokens));
        let plain = sizes.map(|sizes| case(Neox, sizes, [F16, F16], 4099));
        return plain.into_iter().chain(sizes.map(|sizes| normed(Neox, sizes, [F16, F16], 4099, [true; 2]))).collect();
    }
    let mut cases = vec![
        case(Normal, sizes(64, 64, [9, 3], 1), [F16, F16], 13),
        case(Neox, sizes(64, 64, [9, 3], 5), [F16, F16], 13),
        case(Neox, sizes(80, 32, [3, 1], 4), [F32, F32], 29),
        case(Normal, sizes(48, 20, [2, 2], 3), [BF16, F32], 23),
        case(Neox, sizes(128, 128, [4, 2], 3), [Q8_0, Q4_0], 22),
        case(Normal, sizes(32, 32, [2, 1], 2), [IQ4_NL, F16], 17),
        case(Neox, sizes(64, 48, [2, 1], 2), [F16, Q5_1], 17),
        // Numbers outside of the cache drop their rows.
        case(Neox, sizes(32, 32, [2, 1], 8), [F16, F16], 9),
    ];
    cases.extend([
        normed(Neox, sizes(128, 128, [5, 2], 3), [F16, F16], 13, [true; 2]),
        normed(Normal, sizes(80, 32, [3, 1], 2), [F32, BF16], 13, [true, false]),
        normed(Neox, sizes(64, 48, [2, 2], 5), [Q8_0, Q4_0], 9, [false, true]),
        normed(Normal, sizes(256, 256, [2, 1], 1), [F16, Q8_0], 13, [true; 2]),
    ]);
    // Every type beside another.
    for types in [
        [F32, Q8_0],
        [BF16, Q4_0],
        [Q8_0, F32],
        [Q4_0, Q4_1],
        [Q4_1, Q5_0],
        [Q5_0, Q5_1],
        [Q5_1, IQ4_NL],
        [IQ4_NL, BF16],
    ] {
        cases.push(case(Neox, sizes(64, 64, [3, 1], 3), types, 17));
    }
    for normed in [false, true] {
        cases.push(Case::new(format!("kv_write F16 F16 beyond half floats, norms: {normed}"), move |data| {
            let sizes = Sizes { head: 64, turned: 48, heads: [2, 1], tokens: 3 };
            let call = call(data, Neox, sizes, [F16, F16], 13);
            // Some elements stay within, and are rounded.
            let large = |data: &mut Data, factor: f64| {
                data.input_with(F32, [64, 1, 3, 1], move |random, _| random.uniform(-1.0, 1.0) * factor)
            };
            let (k, v) = (large(data, 1e6), large(data, 3e5));
            let weight = Some(large(data, 1e6).narrow(2, 0, 1).reshape([64, 1, 1, 1]));
            let norm = Norm { weight, eps: 1e-5 };
            let norms = normed.then_some([Norm { weight: None, ..norm }, norm]);
            (Call { k, v, norms, ..call }.into(), tolerance(F32, F16))
        }));
    }
    cases.push(Case::new("kv_write drops rows of padding", |data| {
        let sizes = Sizes { head: 32, turned: 32, heads: [2, 1], tokens: 6 };
        let call = call(data, Neox, sizes, [Q8_0, F16], 13);
        let ids = data.input_with(I32, [6, 1, 1, 1], |_, i| if i % 2 == 0 { -1.0 } else { i as f64 });
        let positions = data.input_with(I32, [6, 1, 1, 1], |_, i| if i % 2 == 0 { -1.0 } else { i as f64 });
        (Call { ids, q: rope::Call { positions, ..call.q }, ..call }.into(), tolerance(F32, Q8_0))
    }));
    cases.push(Case::new("kv_write rows of q, k and v in one", |data| {
        let sizes = Sizes { head: 32, turned: 16, heads: [4, 2], tokens: 3 };
        let all = data.input(F32, [32, 8, 3, 1]);
        let mut call = call(data, Neox, sizes, [F16, F16], 19);
        call.q = rope::Call { x: all.narrow(1, 0, 4), y: all.narrow(1, 0, 4), offset: 8, ..call.q };
        (call.k, call.v) = (all.narrow(1, 4, 2), all.narrow(1, 6, 2));
        (call.into(), tolerance(F32, F16))
    }));
    if level == Level::Full {
        cases.push(case(Neox, sizes(128, 128, [32, 8], 1000), [F16, F16], 4099));
        cases.push(case(Normal, sizes(128, 128, [32, 8], 333), [Q8_0, Q8_0], 1009));
    }
    cases
}
