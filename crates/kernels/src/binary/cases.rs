//! Cases of `binary`.

use kiln_gguf::TensorType::{self, BF16, F16, F32};

use super::{Call, Operator};
use crate::case::{Case, Data, Level};
use crate::elementwise::tolerance;
use crate::tensor::Tensor;

/// Divisors stay away from zero, so that one quotient does not outweigh all others.
fn second(data: &mut Data, ty: TensorType, shape: [usize; 4]) -> Tensor {
    data.input_with(ty, shape, |random, _| random.uniform(0.5, 1.5) * if random.below(2) == 0 { 1.0 } else { -1.0 })
}

fn case(operator: Operator, types: [TensorType; 3], shape: [usize; 4], b_shape: [usize; 4]) -> Case {
    let [a_ty, b_ty, ty] = types;
    let name = format!("binary {} {a_ty} {b_ty} to {ty} {shape:?} by {b_shape:?}", operator.name());
    Case::new(name, move |data| {
        let a = data.input(a_ty, shape);
        let b = second(data, b_ty, b_shape);
        let dst = data.output(ty, shape);
        (Call { operator, a, b, dst }.into(), tolerance(ty))
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    use Operator::{Add, Div, Mul, Sub};
    const F: [TensorType; 3] = [F32; 3];
    if level == Level::Bench {
        return vec![
            case(Add, F, [4096, 1, 1, 1], [4096, 1, 1, 1]),
            case(Add, F, [4096, 4096, 1, 1], [4096, 4096, 1, 1]),
            case(Mul, F, [4096, 4096, 1, 1], [4096, 1, 1, 1]),
        ];
    }
    let mut cases = Vec::new();
    for operator in Operator::ALL {
        cases.push(case(operator, F, [64, 5, 2, 1], [64, 5, 2, 1]));
        cases.push(case(operator, F, [33, 3, 1, 1], [33, 1, 1, 1]));
    }
    // Every kind of repetition, along one dimension and along several, with rows of whole and of broken units.
    for cols in [12, 10] {
        for b in [[1, 1, 1, 1], [cols, 1, 1, 1], [cols, 2, 1, 1], [cols / 2, 1, 1, 1], [1, 4, 1, 1], [1, 1, 3, 2]] {
            cases.push(case(Sub, F, [cols, 4, 3, 2], b));
        }
        cases.push(case(Mul, F, [cols, 4, 3, 2], [cols, 1, 3, 1]));
        cases.push(case(Mul, F, [cols, 4, 3, 2], [cols, 1, 1, 2]));
    }
    for types in [[F16; 3], [BF16; 3], [F32, F16, F32], [F16, F32, F16], [F32, F32, BF16], [BF16, F32, F32]] {
        cases.push(case(Add, types, [32, 3, 1, 1], [32, 1, 1, 1]));
        cases.push(case(Div, types, [7, 5, 1, 1], [7, 5, 1, 1]));
    }
    cases.push(case(Add, F, [1, 1, 1, 1], [1, 1, 1, 1]));
    cases.push(case(Add, F, [3, 0, 1, 1], [3, 1, 1, 1]));
    for (cols, outer) in [(48, 64), (13, 17)] {
        cases.push(Case::new(format!("binary add strided rows of {cols}, in place"), move |data| {
            let a = data.strided_input(F32, [cols, 3, 2, 2], [outer, 4, 3, 2]);
            let b = data.strided_input(F32, [cols, 1, 2, 1], [outer, 2, 2, 1]);
            (Call { operator: Add, a, b, dst: a }.into(), tolerance(F32))
        }));
    }
    cases.push(Case::new("binary sub permuted operands into the middle of rows", |data| {
        let a = data.input(F32, [5, 7, 3, 1]).permute([1, 2, 0, 3]);
        let b = second(data, F16, [3, 7, 1, 1]).permute([1, 0, 2, 3]);
        let dst = data.output(F32, [20, 3, 5, 1]).narrow(0, 6, 7);
        (Call { operator: Sub, a, b, dst }.into(), tolerance(F32))
    }));
    if level == Level::Full {
        cases.push(case(Add, F, [8192, 1024, 1, 1], [8192, 1, 1, 1]));
        cases.push(case(Mul, [F16; 3], [8193, 1001, 1, 1], [8193, 1, 1, 1]));
        cases.push(case(Add, F, [128, 512, 32, 4], [1, 512, 32, 1]));
    }
    cases
}
