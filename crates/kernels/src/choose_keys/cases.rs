//! Cases of `choose_keys`.

use kiln_gguf::TensorType::{self, F16, F32, I32, Q8_0};

use super::{Call, Rule};
use crate::case::{Case, Data, Level, Random, Tolerance};
use crate::flash_attention::Pages;
use crate::formats::random_blocks;

/// Sizes: width and heads of queries, queries, sequences, pages of a sequence and rows of a page.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    width: usize,
    heads: usize,
    rows: usize,
    sequences: usize,
    pages: [usize; 2],
}

const USUAL: Sizes = Sizes { width: 128, heads: 4, rows: 3, sequences: 3, pages: [4, 64] };

/// The scores of a case lie far enough apart for f32 and f64 to order them the same way, or are equal: the list must be the same.
fn case(what: &str, ty: TensorType, sizes: Sizes, rule: Rule, change: fn(&mut Data, Call) -> Call) -> Case {
    Case::new(format!("choose_keys {what} {ty} {sizes:?} {rule:?}"), move |data| {
        let Sizes { width, heads, rows, sequences, pages: [pages, size] } = sizes;
        let q = data.input(F32, [width, heads, rows, 1]);
        let all = pages * sequences;
        let k = random_blocks(data, ty, [width, (all + 1) * size / rule.per_key, 1, 1], false);
        // Pages in no order; the first one belongs to no sequence.
        let mut order: Vec<usize> = (1..=all).collect();
        let table = data.input_with(I32, [pages, sequences, 1, 1], |random, i| {
            order.swap(i, i + random.below(all - i));
            order[i] as f64
        });
        let most = pages * size;
        let positions = data.input_with(I32, [rows, 1, 1, 1], |random, i| match i {
            0 => most as f64 - 1.0,
            _ => random.below(most) as f64,
        });
        let ragged = sequences > 1 && sequences != rows;
        let owners = ragged.then(|| data.input_with(I32, [rows, 1, 1, 1], |random, _| random.below(sequences) as f64));
        let room = rule.room().min(most);
        let call = Call {
            q,
            k,
            weights: Some(data.input(F32, [heads, rows, 1, 1])),
            each: false,
            positions,
            pages: Pages { table, size },
            sequences: owners,
            rule,
            list: data.output(I32, [room, rows, 1, 1]),
            counts: data.output(I32, [rows, 1, 1, 1]),
            scratch: data.output(F32, [most / rule.per_key * rows, 1, 1, 1]),
        };
        (change(data, call).into(), Tolerance::Exact)
    })
}

/// Every head chooses for itself.
fn each(data: &mut Data, call: Call) -> Call {
    let columns = call.q.shape[1] * call.q.shape[2];
    let list = data.output(I32, [call.list.shape[0] + 3, columns, 1, 1]);
    let counts = data.output(I32, [columns, 1, 1, 1]);
    let call = Call { weights: None, each: true, list, counts, ..call };
    Call { scratch: data.output(F32, [call.scores(), 1, 1, 1]), ..call }
}

/// All queries stand at the end of their sequences.
fn late(data: &mut Data, call: Call) -> Call {
    let last = (call.pages.table.shape[0] * call.pages.size - 1) as f64;
    Call { positions: data.input_with(I32, call.positions.shape, |_, _| last), ..call }
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let plain: fn(&mut Data, Call) -> Call = |_, call| call;
    let blocks = Rule { per_key: 1, block: 8, most: 5, near: 0, tail: false };
    let pooled = Rule { per_key: 4, block: 1, most: 9, near: 0, tail: true };
    if level == Level::Bench {
        let long = Sizes { width: 128, heads: 64, rows: 1, sequences: 1, pages: [512, 64] };
        return [1, 64].map(|rows| case("", F16, Sizes { rows, ..long }, Rule::tokens(2048), plain)).into();
    }
    let mut cases = vec![
        case("", F32, USUAL, Rule::tokens(12), plain),
        case("", F16, USUAL, Rule::tokens(12), plain),
        case("", Q8_0, USUAL, Rule::tokens(100), plain),
        case("of one", F16, Sizes { sequences: 1, rows: 7, ..USUAL }, Rule::tokens(1), plain),
        case("all of", F16, USUAL, Rule::tokens(256), plain),
        case("more than", F16, USUAL, Rule::tokens(1000), plain),
        case("ragged", F16, Sizes { rows: 9, ..USUAL }, Rule::tokens(31), plain),
        case("many heads", F16, Sizes { heads: 37, rows: 2, sequences: 2, ..USUAL }, Rule::tokens(40), plain),
        case("narrow", F16, Sizes { width: 20, heads: 3, ..USUAL }, Rule::tokens(40), plain),
        case("no weights", F16, USUAL, Rule::tokens(40), |_, call| Call { weights: None, ..call }),
        case("blocks", F16, USUAL, blocks, plain),
        case("near blocks", F16, USUAL, Rule { near: 2, ..blocks }, plain),
        case("odd blocks each", F16, USUAL, Rule { block: 7, near: 1, ..blocks }, each),
        case("each", Q8_0, Sizes { rows: 5, ..USUAL }, Rule::tokens(17), each),
        case("pools", F16, USUAL, pooled, plain),
        case("pools without their tail", F32, Sizes { rows: 5, ..USUAL }, Rule { tail: false, ..pooled }, plain),
        case("all pools", F16, USUAL, Rule { most: 80, ..pooled }, plain),
        // Products of -1, 0 and 1: most scores are equal.
        case("ties", F16, Sizes { width: 4, heads: 1, ..USUAL }, Rule::tokens(40), |data, call| {
            let whole = |data: &mut Data, shape| data.input_with(F32, shape, |random, _| random.below(3) as f64 - 1.0);
            let (q, k) = (whole(data, call.q.shape), whole(data, call.k.shape));
            late(data, Call { q, k, weights: None, ..call })
        }),
        // Scores that differ in their last bits alone.
        case("close", F32, Sizes { width: 4, heads: 1, ..USUAL }, Rule::tokens(40), |data, call| {
            let one = |random: &mut Random, i: usize, last: usize| match i % 4 {
                0 => 1.0 + random.below(last) as f64 / f64::from(1 << 22),
                _ => 0.0,
            };
            let q = data.input_with(F32, call.q.shape, |random, i| one(random, i, 1));
            let k = data.input_with(F32, call.k.shape, |random, i| one(random, i, 1 << 10));
            late(data, Call { q, k, weights: None, ..call })
        }),
        case("padding rows and first tokens", F16, Sizes { rows: 6, sequences: 1, ..USUAL }, pooled, |data, call| {
            let positions = data.input_with(I32, call.positions.shape, |_, i| [-1.0, 0.0, 2.0, 3.0, -1.0, 4.0][i]);
            Call { positions, ..call }
        }),
    ];
    if level == Level::Full {
        let long = Sizes { width: 128, heads: 64, rows: 5, sequences: 2, pages: [400, 64] };
        cases.push(case("long", F16, long, Rule::tokens(2048), plain));
        cases.push(case(
            "long",
            F16,
            Sizes { heads: 4, ..long },
            Rule { block: 128, most: 16, near: 1, ..blocks },
            each,
        ));
        cases.push(case("long", F16, long, Rule { most: 512, ..pooled }, plain));
    }
    cases
}
