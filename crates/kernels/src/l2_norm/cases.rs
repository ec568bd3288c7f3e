//! Cases of `l2_norm`.

use kiln_gguf::TensorType::{self, BF16, F16, F32};

use super::Call;
use crate::case::{Case, Level};
use crate::row_norm::tolerance;

fn case(x_ty: TensorType, y_ty: TensorType, shape: [usize; 4], eps: f32) -> Case {
    Case::new(format!("l2_norm {x_ty} to {y_ty} {shape:?} eps={eps}"), move |data| {
        let x = data.input(x_ty, shape);
        let y = data.output(y_ty, shape);
        (Call { x, y, eps }.into(), tolerance(y_ty))
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return vec![case(F32, F32, [128, 32, 512, 1], 1e-6), case(F32, F32, [4096, 512, 1, 1], 1e-6)];
    }
    let mut cases: Vec<Case> = [1, 2, 7, 64, 129, 1025].map(|cols| case(F32, F32, [cols, 3, 1, 1], 1e-6)).into();
    cases.push(case(F32, F32, [64, 5, 3, 2], 1e-12));
    cases.push(case(F16, F32, [80, 3, 2, 1], 1e-6));
    cases.push(case(F32, BF16, [80, 3, 2, 1], 1e-6));
    // Rows of length about 6 are shorter than this eps.
    cases.push(case(F32, F32, [100, 4, 1, 1], 20.0));
    cases.push(Case::new("l2_norm strided rows, in place", |data| {
        let x = data.strided_input(F32, [48, 3, 2, 1], [64, 4, 2, 1]);
        (Call { x, y: x, eps: 1e-6 }.into(), tolerance(F32))
    }));
    cases.push(Case::new("l2_norm zero row", |data| {
        let x = data.input_with(F32, [64, 2, 1, 1], |random, i| if i < 64 { 0.0 } else { random.uniform(-1.0, 1.0) });
        let y = data.output(F32, [64, 2, 1, 1]);
        (Call { x, y, eps: 1e-6 }.into(), tolerance(F32))
    }));
    if level == Level::Full {
        cases.push(case(F32, F32, [128, 70000, 1, 1], 1e-6));
        cases.push(case(F32, F32, [131_072, 33, 1, 1], 1e-6));
    }
    cases
}
