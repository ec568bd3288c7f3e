//! Cases of `advance`. Whole numbers: all are exact.

use kiln_gguf::TensorType::I32;

use super::{Call, Places};
use crate::case::{Case, Level, Tolerance};

/// Sizes: rows, pages of a table, tokens of a page, window of recent tokens (0: none), steps of the history; whether there are
/// caches of a second kind.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    n: usize,
    pages: usize,
    page: usize,
    window: usize,
    steps: usize,
    others: bool,
    coordinates: bool,
}

fn case(sizes: Sizes, step: f64) -> Case {
    let Sizes { n, pages, page, window, steps, others, coordinates } = sizes;
    Case::new(format!("advance {sizes:?} step={step}"), move |data| {
        let context = pages * page;
        // Rows that end, rows that have ended, rows at the end of their table, and rows before a page that is not there.
        let positions = data.input_with(I32, [n, 1, 1, 1], |random, i| match i % 5 {
            4 => -1.0,
            3 => context as f64 - 1.0,
            _ => random.below(context) as f64 - random.below(2).min(i) as f64,
        });
        let call =
            Call {
                sampled: data.input_with(I32, [n, 1, 1, 1], |random, i| {
                    if i % 7 == 6 { -1.0 } else { random.below(200_000) as f64 }
                }),
                places: Places {
                    table: data.input_with(I32, [pages, n, 1, 1], |random, i| {
                        if i % 11 == 10 { -1.0 } else { random.below(9000) as f64 }
                    }),
                    rows: data.output(I32, [n, 1, 1, 1]),
                },
                others: others.then(|| Places {
                    table: data.input_with(I32, [pages, n, 1, 1], |random, i| {
                        if i % 13 == 12 { -1.0 } else { random.below(500) as f64 }
                    }),
                    rows: data.output(I32, [n, 1, 1, 1]),
                }),
                tokens: data.input_with(I32, [n, 1, 1, 1], |random, _| random.below(1000) as f64),
                positions,
                lengths: data.input_with(I32, [n, 1, 1, 1], |random, _| random.below(1000) as f64),
                coordinates: coordinates
                    .then(|| data.input_with(I32, [n, 1, 1, 1], |random, _| random.below(1000) as f64)),
                recent: (window > 0)
                    .then(|| data.input_with(I32, [window, n, 1, 1], |random, _| random.below(50) as f64 - 1.0)),
                history: data.input_with(I32, [steps, n, 1, 1], |random, _| random.below(50) as f64),
                step: data.input_with(I32, [1, 1, 1, 1], |_, _| step),
                page,
            };
        (call.into(), Tolerance::Exact)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let sizes =
        |n, pages, page, window, steps| Sizes { n, pages, page, window, steps, others: false, coordinates: false };
    let both = |sizes: Sizes| Sizes { others: true, ..sizes };
    if level == Level::Bench {
        return [1, 64].map(|n| case(sizes(n, 256, 32, 64, 16), 5.0)).into();
    }
    let mut cases = vec![
        case(sizes(1, 1, 4, 0, 1), 0.0),
        case(sizes(1, 3, 16, 5, 4), 3.0),
        case(sizes(5, 7, 16, 64, 8), 21.0),
        case(sizes(64, 40, 32, 64, 2), 2_000_000_001.0),
        case(sizes(300, 3, 1, 1, 5), 6.0),
        case(both(sizes(1, 2, 8, 0, 4)), 1.0),
        case(both(sizes(70, 9, 16, 5, 3)), 8.0),
        case(Sizes { coordinates: true, ..sizes(40, 3, 16, 0, 4) }, 2.0),
        case(Sizes { coordinates: true, ..both(sizes(3, 3, 16, 5, 4)) }, 2.0),
    ];
    if level == Level::Full {
        cases.push(case(sizes(2048, 512, 64, 256, 33), 1000.0));
    }
    cases
}
