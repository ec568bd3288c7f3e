//! Cases of `list_blocks`.

use kiln_gguf::TensorType::I32;

use super::{Call, Layout};
use crate::case::{Case, Level, Tolerance};
use crate::flash_attention::Pages;

/// Sizes: rows, sequences, pages of a sequence.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    rows: usize,
    sequences: usize,
    pages: usize,
}

const PAGE: usize = 64;
const USUAL: Sizes = Sizes { rows: 4, sequences: 4, pages: 5 };
const SHORT: Layout = Layout { block: 4, spare: 16, window: 24 };
const LONG: Layout = Layout { block: 128, spare: 4, window: 100 };

/// `most`: blocks that are chosen.
fn case(sizes: Sizes, layout: Layout, most: Option<usize>) -> Case {
    Case::new(format!("list_blocks {sizes:?} {layout:?} chosen={most:?}"), move |data| {
        let Sizes { rows, sequences, pages } = sizes;
        let all = pages * sequences;
        let mut order: Vec<usize> = (1..=all).collect();
        let table = data.input_with(I32, [pages, sequences, 1, 1], |random, i| {
            order.swap(i, i + random.below(all - i));
            order[i] as f64
        });
        let tokens = pages * PAGE;
        let positions = data.input_with(I32, [rows, 1, 1, 1], |random, i| match i % 5 {
            0 => tokens as f64 - 1.0,
            1 => 0.0,
            2 => -1.0,
            _ => random.below(tokens) as f64,
        });
        let ragged = sequences > 1 && sequences != rows;
        let sequences =
            ragged.then(|| data.input_with(I32, [rows, 1, 1, 1], |random, _| random.below(sequences) as f64));
        // Whole blocks of rows of the cache; what stands behind their number is no row.
        let chosen = most.map(|most| {
            let room = most * layout.block;
            let mut first = 0;
            let list = data.input_with(I32, [room, rows, 1, 1], |random, i| {
                if i % layout.block == 0 {
                    first = random.below((all + 1) * PAGE / layout.block) * layout.block;
                }
                (first + i % layout.block) as f64
            });
            let count = |random: &mut crate::case::Random, i: usize| match i {
                0 => room as f64,
                _ => (random.below(most + 1) * layout.block) as f64,
            };
            [list, data.input_with(I32, [rows, 1, 1, 1], count)]
        });
        let pages = Pages { table, size: PAGE };
        let room = Call::room(pages, layout, most.map(|most| most * layout.block));
        let list = data.output(I32, [room, rows, 1, 1]);
        let counts = data.output(I32, [rows, 1, 1, 1]);
        (Call { positions, pages, sequences, chosen, layout, list, counts }.into(), Tolerance::Exact)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        let long = Sizes { rows: 512, sequences: 1, pages: 256 };
        return vec![case(long, Layout { window: 128, ..SHORT }, Some(512)), case(long, LONG, None)];
    }
    vec![
        case(USUAL, SHORT, None),
        case(USUAL, SHORT, Some(9)),
        case(USUAL, LONG, None),
        case(Sizes { rows: 9, ..USUAL }, SHORT, Some(5)),
        case(Sizes { rows: 6, sequences: 1, ..USUAL }, LONG, None),
        case(Sizes { rows: 1, sequences: 1, pages: 1 }, Layout { window: 100, ..SHORT }, None),
        case(USUAL, Layout { block: 64, spare: 1, window: 1 }, None),
    ]
}
