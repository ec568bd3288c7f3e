//! Cases of `group_norm`.

use kiln_gguf::TensorType::{self, F16, F32};

use super::Call;
use crate::case::{Case, Level};
use crate::row_norm::tolerance;

/// `weights` is their number; 0 for none.
fn case(x_ty: TensorType, y_ty: TensorType, shape: [usize; 4], weights: usize) -> Case {
    Case::new(format!("group_norm {x_ty} to {y_ty} {shape:?} weights={weights}"), move |data| {
        let x = data.input(x_ty, shape);
        let weight = (weights > 0).then(|| data.input(F32, [weights, 1, 1, 1]));
        let bias = (weights > 0).then(|| data.input(F32, [weights, 1, 1, 1]));
        let y = data.output(y_ty, shape);
        (Call { x, weight, bias, y, eps: 64e-5 }.into(), tolerance(y_ty))
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return [1, 512].map(|tokens| case(F32, F32, [64, 64, tokens, 1], 4096)).into();
    }
    let mut cases = vec![
        case(F32, F32, [64, 3, 5, 1], 0),
        // The norm over each head of RWKV: one weight per element.
        case(F32, F32, [64, 3, 5, 1], 192),
        // An image of 6 x 5 points and 8 channels in 4 groups, two of them.
        case(F32, F32, [60, 4, 1, 2], 8),
        // One weight for several groups, and channels that end inside a group.
        case(F32, F32, [33, 4, 2, 1], 2),
        case(F32, F32, [10, 3, 2, 1], 2),
        case(F32, F32, [1025, 2, 1, 1], 41),
        case(F16, F16, [48, 3, 2, 1], 144),
    ];
    cases.push(Case::new("group_norm strided groups, in place", |data| {
        let x = data.strided_input(F32, [48, 3, 2, 1], [64, 4, 2, 1]);
        let weight = Some(data.input(F32, [144, 1, 1, 1]));
        (Call { x, weight, bias: None, y: x, eps: 1e-5 }.into(), tolerance(F32))
    }));
    cases.push(Case::new("group_norm mean 1e4 deviation 0.1", |data| {
        let x = data.input_with(F32, [640, 2, 1, 1], |random, _| 1e4 + random.uniform(-0.1, 0.1));
        let y = data.output(F32, [640, 2, 1, 1]);
        (Call { x, weight: None, bias: None, y, eps: 1e-6 }.into(), tolerance(F32))
    }));
    if level == Level::Full {
        cases.push(case(F32, F32, [64, 40, 4096, 1], 2560));
        cases.push(case(F32, F32, [163_840, 32, 1, 1], 320));
    }
    cases
}
