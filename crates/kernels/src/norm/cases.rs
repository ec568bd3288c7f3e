//! Cases of `norm`.

use kiln_gguf::TensorType::{self, BF16, F16, F32};

use super::Call;
use crate::case::{Case, Level};
use crate::row_norm::tolerance;

fn case(x_ty: TensorType, y_ty: TensorType, shape: [usize; 4], weights: bool, eps: f32) -> Case {
    Case::new(format!("norm {x_ty} to {y_ty} {shape:?} weights={weights} eps={eps}"), move |data| {
        let x = data.input(x_ty, shape);
        let weight = weights.then(|| data.input(F32, [shape[0], 1, 1, 1]));
        let bias = weights.then(|| data.input(F32, [shape[0], 1, 1, 1]));
        let y = data.output(y_ty, shape);
        (Call { x, weight, bias, y, eps }.into(), tolerance(y_ty))
    })
}

/// Values close to 1e4: the naive variance, mean(x^2) - mean(x)^2, would have no digit right, and the plain f32 mean is
/// already wrong by a noticeable part of the deviation.
fn far_from_zero(cols: usize, half_width: f64) -> Case {
    Case::new(format!("norm mean 1e4 deviation {half_width} [{cols}, 3]"), move |data| {
        let x = data.input_with(F32, [cols, 3, 1, 1], |random, _| 1e4 + random.uniform(-half_width, half_width));
        let y = data.output(F32, [cols, 3, 1, 1]);
        (Call { x, weight: None, bias: None, y, eps: 1e-6 }.into(), tolerance(F32))
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return [1, 512, 4096].map(|rows| case(F32, F32, [4096, rows, 1, 1], true, 1e-5)).into();
    }
    let mut cases = Vec::new();
    for cols in [1, 2, 7, 64, 129, 511, 1025] {
        cases.push(case(F32, F32, [cols, 3, 1, 1], true, 1e-6));
    }
    cases.push(case(F32, F32, [129, 3, 1, 1], false, 1e-6));
    cases.push(case(F32, F32, [64, 5, 3, 2], true, 0.1));
    cases.push(case(F16, F16, [80, 3, 2, 1], true, 1e-6));
    cases.push(case(F32, F16, [80, 3, 2, 1], false, 1e-6));
    cases.push(case(BF16, BF16, [81, 3, 1, 2], true, 1e-6));
    cases.extend([64, 1000].map(|cols| far_from_zero(cols, 0.1)));
    cases.push(Case::new("norm weight without bias, strided", |data| {
        let x = data.strided_input(F32, [40, 3, 2, 1], [41, 3, 3, 1]);
        let weight = Some(data.input(F32, [40, 1, 1, 1]));
        let y = data.strided_output(F32, [40, 3, 2, 1], [44, 5, 2, 1]);
        (Call { x, weight, bias: None, y, eps: 1e-6 }.into(), tolerance(F32))
    }));
    cases.push(Case::new("norm bias without weight, strided, in place", |data| {
        let x = data.strided_input(F32, [600, 3, 2, 1], [640, 4, 2, 1]);
        let bias = Some(data.input(F32, [600, 1, 1, 1]));
        (Call { x, weight: None, bias, y: x, eps: 1e-6 }.into(), tolerance(F32))
    }));
    cases.push(Case::new("norm a constant row gives the bias", |data| {
        let x = data.input_with(F32, [300, 2, 1, 1], |random, i| if i < 300 { 3.3 } else { random.uniform(-1.0, 1.0) });
        let bias = Some(data.input(F32, [300, 1, 1, 1]));
        let y = data.output(F32, [300, 2, 1, 1]);
        (Call { x, weight: None, bias, y, eps: 1e-6 }.into(), tolerance(F32))
    }));
    if level == Level::Full {
        cases.push(far_from_zero(100_000, 0.1));
        cases.push(case(F32, F32, [160, 70000, 1, 1], true, 1e-5));
        cases.push(case(F32, F32, [131_072, 33, 1, 1], false, 1e-5));
    }
    cases
}
