//! Cases of `rms_norm`.

use kiln_gguf::TensorType::{self, BF16, F16, F32};

use super::Call;
use crate::case::{Case, Level};
use crate::row_norm::tolerance;

fn case(x_ty: TensorType, y_ty: TensorType, shape: [usize; 4], weight: bool, eps: f32) -> Case {
    Case::new(format!("rms_norm {x_ty} to {y_ty} {shape:?} weight={weight} eps={eps}"), move |data| {
        let x = data.input(x_ty, shape);
        let weight = weight.then(|| data.input(F32, [shape[0], 1, 1, 1]));
        let y = data.output(y_ty, shape);
        (Call { x, weight, y, eps }.into(), tolerance(y_ty))
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return [1, 512, 4096].map(|rows| case(F32, F32, [4096, rows, 1, 1], true, 1e-5)).into();
    }
    let mut cases = Vec::new();
    for cols in [1, 2, 7, 64, 129, 1024, 1025] {
        for weight in [false, true] {
            cases.push(case(F32, F32, [cols, 3, 1, 1], weight, 1e-6));
        }
    }
    cases.push(case(F32, F32, [64, 5, 3, 2], true, 0.1));
    cases.push(case(F16, F16, [80, 3, 2, 1], true, 1e-6));
    cases.push(case(F32, F16, [80, 3, 2, 1], false, 1e-6));
    cases.push(case(BF16, BF16, [81, 3, 1, 2], true, 1e-6));
    cases.push(Case::new("rms_norm strided rows, in place", |data| {
        let x = data.strided_input(F32, [48, 3, 2, 1], [64, 4, 2, 1]);
        (Call { x, weight: None, y: x, eps: 1e-6 }.into(), tolerance(F32))
    }));
    cases.push(Case::new("rms_norm strided rows, elsewhere", |data| {
        let x = data.strided_input(F32, [48, 3, 2, 2], [64, 4, 2, 2]);
        let y = data.strided_output(F32, [48, 3, 2, 2], [50, 3, 3, 2]);
        (Call { x, weight: None, y, eps: 1e-6 }.into(), tolerance(F32))
    }));
    cases.push(Case::new("rms_norm zero row", |data| {
        let x = data.input_with(F32, [64, 2, 1, 1], |random, i| if i < 64 { 0.0 } else { random.uniform(-1.0, 1.0) });
        let y = data.output(F32, [64, 2, 1, 1]);
        (Call { x, weight: None, y, eps: 1e-6 }.into(), tolerance(F32))
    }));
    if level == Level::Full {
        cases.push(case(F32, F32, [160, 70000, 1, 1], true, 1e-5));
        cases.push(case(F32, F32, [131_072, 33, 1, 1], false, 1e-5));
    }
    cases
}
