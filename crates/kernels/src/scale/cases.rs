//! Cases of `scale`.

use kiln_gguf::TensorType::{self, BF16, F16, F32};

use super::Call;
use crate::case::{Case, Level};
use crate::elementwise::tolerance;

fn case(x_ty: TensorType, ty: TensorType, shape: [usize; 4], factor: f32, bias: f32) -> Case {
    Case::new(format!("scale {x_ty} to {ty} {shape:?} factor={factor} bias={bias}"), move |data| {
        let x = data.input(x_ty, shape);
        let dst = data.output(ty, shape);
        (Call { x, dst, factor, bias }.into(), tolerance(ty))
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return [1, 4096].map(|rows| case(F32, F32, [4096, rows, 1, 1], 0.5, 0.0)).into();
    }
    let mut cases = Vec::new();
    for cols in [1, 3, 4, 65, 256, 1028] {
        cases.push(case(F32, F32, [cols, 3, 1, 1], 0.125, 0.0));
        cases.push(case(F32, F32, [cols, 3, 1, 1], -3.0, 1.5));
    }
    for (x_ty, ty) in [(F16, F16), (F32, F16), (F16, F32), (BF16, BF16)] {
        cases.push(case(x_ty, ty, [17, 3, 2, 2], 2.5, -1.0));
        cases.push(case(x_ty, ty, [16, 3, 2, 2], 2.5, -1.0));
    }
    cases.push(case(F32, F32, [5, 0, 1, 1], 2.0, 0.0));
    cases.push(case(F32, F32, [9, 2, 1, 1], 1e30, 1e35));
    cases.push(Case::new("scale strided rows, in place", |data| {
        let x = data.strided_input(F32, [48, 3, 2, 1], [64, 4, 2, 1]);
        (Call { x, dst: x, factor: 3.0, bias: 0.25 }.into(), tolerance(F32))
    }));
    cases.push(Case::new("scale in place, more units than one thread each", |data| {
        let x = data.input(F32, [263, 1001, 1, 1]);
        (Call { x, dst: x, factor: -2.0, bias: 0.5 }.into(), tolerance(F32))
    }));
    cases.push(Case::new("scale transposes", |data| {
        let x = data.input(F32, [12, 9, 2, 1]).permute([1, 0, 2, 3]);
        let dst = data.output(F32, [9, 12, 2, 1]);
        (Call { x, dst, factor: 0.5, bias: 1.0 }.into(), tolerance(F32))
    }));
    if level == Level::Full {
        // Single elements, more than 65535 workgroups of them; in place, so that one computed twice shows.
        cases.push(Case::new("scale in place, more workgroups than one dimension of the grid", |data| {
            let x = data.input(F16, [8193, 8301, 1, 1]);
            (Call { x, dst: x, factor: 1.5, bias: -0.5 }.into(), tolerance(F16))
        }));
        cases.push(case(F32, F32, [8192, 1024, 1, 1], 1.5, -0.5));
    }
    cases
}
