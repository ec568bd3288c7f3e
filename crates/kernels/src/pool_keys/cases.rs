//! Cases of `pool_keys`.

use kiln_gguf::TensorType::{self, F16, F32, I32, Q8_0};

use super::Call;
use crate::case::{Case, Level, Tolerance};
use crate::flash_attention::Pages;
use crate::formats::random_blocks;

/// Sizes: width of the result, rows, sequences, pages of a sequence, tokens of a block.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    width: usize,
    rows: usize,
    sequences: usize,
    pages: usize,
    size: usize,
}

const PAGE: usize = 64;
const USUAL: Sizes = Sizes { width: 64, rows: 4, sequences: 4, pages: 4, size: 4 };

/// What a case has beside values.
#[derive(Clone, Copy, Debug, PartialEq)]
enum With {
    Nothing,
    Weights,
    Places,
}

fn case(ty: TensorType, sizes: Sizes, overlaps: bool, with: With) -> Case {
    Case::new(format!("pool_keys {ty} {sizes:?} overlaps={overlaps} {with:?}"), move |data| {
        let Sizes { width, rows, sequences, pages, size } = sizes;
        let wide = if overlaps { 2 * width } else { width };
        let all = pages * sequences;
        // Values and weights lie side by side in one cache.
        let cache = random_blocks(data, ty, [2 * wide, (all + 1) * PAGE, 1, 1], false);
        let mut order: Vec<usize> = (1..=all).collect();
        let table = data.input_with(I32, [pages, sequences, 1, 1], |random, i| {
            order.swap(i, i + random.below(all - i));
            order[i] as f64
        });
        // Tokens that finish the first block, the last one, some block and none.
        let blocks = pages * PAGE / size;
        let positions = data.input_with(I32, [rows, 1, 1, 1], |random, i| match i % 4 {
            0 => (size * blocks) as f64 - 1.0,
            1 => size as f64 - 1.0,
            2 => (size * (1 + random.below(blocks))) as f64 - 1.0,
            _ => [-1.0, (size / 2) as f64 - 1.0][i / 4 % 2],
        });
        let ragged = sequences > 1 && sequences != rows;
        let owners = ragged.then(|| data.input_with(I32, [rows, 1, 1, 1], |random, _| random.below(sequences) as f64));
        let call = Call {
            values: cache.narrow(0, 0, wide),
            weights: (with != With::Nothing).then(|| cache.narrow(0, wide, wide)),
            places: (with == With::Places).then(|| data.input(F32, [wide, size, 1, 1])),
            positions,
            pages: Pages { table, size: PAGE },
            sequences: owners,
            size,
            overlaps,
            y: data.output(F32, [width, rows, 1, 1]),
        };
        (call.into(), Tolerance::Nmse(1e-10))
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let long = Sizes { size: 128, ..USUAL };
    if level == Level::Bench {
        let wide = Sizes { width: 512, rows: 512, sequences: 1, pages: 64, size: 4 };
        return vec![case(F16, wide, true, With::Places), case(F16, Sizes { size: 128, ..wide }, false, With::Places)];
    }
    vec![
        case(F32, USUAL, false, With::Nothing),
        case(F16, USUAL, false, With::Weights),
        case(F32, USUAL, true, With::Places),
        case(Q8_0, USUAL, true, With::Places),
        case(F16, Sizes { rows: 9, ..USUAL }, true, With::Places),
        case(F32, long, false, With::Places),
        case(F16, Sizes { rows: 7, sequences: 1, ..long }, false, With::Places),
        case(F16, Sizes { rows: 1, sequences: 1, width: 20, ..USUAL }, false, With::Nothing),
    ]
}
