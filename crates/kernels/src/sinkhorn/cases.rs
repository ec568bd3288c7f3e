//! Cases of `sinkhorn`.

use kiln_gguf::TensorType::F32;

use super::Call;
use crate::case::{Case, Level, Tolerance};

fn case(n: usize, rows: usize, times: usize, eps: f32) -> Case {
    Case::new(format!("sinkhorn {n}x{n} rows={rows} times={times} eps={eps}"), move |data| {
        // Numbers that lie beside others, as those of a wider product do.
        let wide = data.input_with(F32, [n * n + 8, rows, 1, 1], |random, _| random.uniform(-4.0, 4.0));
        let y = data.output(F32, [n, n, rows, 1]);
        // Exponentials and quotients are right to some ulps.
        (Call { x: wide.narrow(0, 8, n * n), y, eps, times }.into(), Tolerance::Nmse(1e-10))
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    match level {
        Level::Bench => vec![case(4, 1, 20, 1e-6), case(4, 2048, 20, 1e-6)],
        _ => vec![
            case(4, 3, 1, 1e-6),
            case(4, 70, 2, 1e-6),
            case(4, 5, 20, 0.01),
            case(1, 2, 3, 0.5),
            case(3, 1, 5, 0.0),
            case(12, 2, 3, 0.1),
        ],
    }
}
