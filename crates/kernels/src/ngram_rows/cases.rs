//! Cases of `ngram_rows`.

use kiln_gguf::TensorType::{F32, I32};

use super::Call;
use crate::case::{Case, Level, Tolerance};

const END: u32 = 3;

/// The longest run, heads and rows.
fn case(n: usize, heads: usize, rows: usize) -> Case {
    Case::new(format!("ngram_rows {n} heads={heads} rows={rows}"), move |data| {
        // Few tokens, so that some end a text; some rows have none before them.
        let tokens = data.input_with(F32, [n, rows, 1, 1], |random, i| match random.below(6) {
            0 if i % n < n - 1 => 0.0,
            1 => f64::from(END) + 1.0,
            _ => 1.0 + random.below(200_000) as f64,
        });
        let multipliers = data.input_with(I32, [2, n, 1, 1], |random, _| f64::from(random.bits() as i32));
        let sizes = data.input_with(I32, [heads, n - 1, 1, 1], |random, i| match i {
            0 => f64::from(i32::MAX),
            _ => 1.0 + random.below(1 << (3 + i * 5 % 25)) as f64,
        });
        let offsets = data.input_with(
            I32,
            [heads, n - 1, 1, 1],
            |random, i| if i == 0 { 0.0 } else { random.below(9999) as f64 },
        );
        let rows = data.output(I32, [heads * (n - 1), rows, 1, 1]);
        (Call { tokens, multipliers, sizes, offsets, end: END, rows }.into(), Tolerance::Exact)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    match level {
        Level::Bench => vec![case(3, 8, 2048)],
        _ => vec![case(3, 2, 50), case(2, 1, 7), case(4, 8, 33), case(8, 3, 1)],
    }
}
