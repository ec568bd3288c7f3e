//! Cases of `concat`. Bits are moved, so all of them are exact.

use kiln_gguf::TensorType::{self, BF16, F16, F32, I32};

use super::Call;
use crate::case::{Case, Data, Level, Tolerance};
use crate::tensor::Tensor;

fn input(data: &mut Data, ty: TensorType, shape: [usize; 4]) -> Tensor {
    if shape.contains(&0) {
        return data.output(ty, shape);
    }
    data.input_with(ty, shape, |random, _| random.uniform(-3000.0, 3000.0))
}

/// A tensor of extents `shape` and one of extent `second` along `dim`.
fn case(ty: TensorType, shape: [usize; 4], dim: usize, second: usize) -> Case {
    Case::new(format!("concat {ty} {shape:?} and {second} along {dim}"), move |data| {
        let a = input(data, ty, shape);
        let mut extents = shape;
        extents[dim] = second;
        let b = input(data, ty, extents);
        extents[dim] += shape[dim];
        let dst = data.output(ty, extents);
        (Call { a, b, dst, dim }.into(), Tolerance::Exact)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return vec![case(F32, [4096, 2048, 1, 1], 0, 4096), case(F32, [4096, 2048, 1, 1], 1, 1)];
    }
    let mut cases = Vec::new();
    for dim in 0..4 {
        for ty in [F32, F16, BF16, I32] {
            cases.push(case(ty, [12, 3, 2, 2], dim, 4));
            cases.push(case(ty, [7, 3, 2, 2], dim, 5));
        }
        cases.push(case(F32, [8, 3, 2, 1], dim, 1));
        cases.push(case(F16, [8, 3, 2, 1], dim, 0));
        cases.push(Case::new(format!("concat F32 strided operands along {dim}"), move |data| {
            let a = input(data, F32, [5, 4, 3, 2]).permute([1, 0, 3, 2]);
            let b = data.strided_input(F32, [4, 5, 2, 3], [8, 6, 2, 4]);
            let mut shape = [4, 5, 2, 3];
            shape[dim] *= 2;
            let dst = data.strided_output(F32, shape, [16, 10, 4, 8]);
            (Call { a, b, dst, dim }.into(), Tolerance::Exact)
        }));
    }
    cases.push(case(F32, [5, 0, 1, 1], 0, 5));
    if level == Level::Full {
        cases.push(case(F32, [4097, 1501, 1, 1], 0, 511));
        cases.push(case(F16, [4096, 2000, 1, 1], 1, 1));
    }
    cases
}
