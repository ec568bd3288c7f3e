//! Cases of `gated_add`.

use kiln_gguf::TensorType::{self, BF16, F16, F32};

use super::Call;
use crate::case::{Case, Level};
use crate::elementwise::tolerance;
use crate::unary::Function;

fn case(function: Function, ty: TensorType, shape: [usize; 4], in_place: bool) -> Case {
    Case::new(format!("gated_add {} {ty} {shape:?} in_place={in_place}", function.name()), move |data| {
        let [gate, y, x] = std::array::from_fn(|_| data.input(ty, shape));
        let dst = if in_place { x } else { data.output(ty, shape) };
        (Call { function, gate, y, x, dst }.into(), tolerance(ty))
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    use Function::{Sigmoid, Silu};
    if level == Level::Bench {
        return [1, 2048].map(|rows| case(Sigmoid, F32, [4096, rows, 1, 1], true)).into();
    }
    let mut cases = Vec::new();
    for cols in [1, 4, 65, 260] {
        cases.push(case(Sigmoid, F32, [cols, 3, 1, 1], cols % 2 == 0));
    }
    cases.push(case(Silu, F32, [17, 3, 2, 2], false));
    cases.push(case(Sigmoid, F16, [16, 3, 2, 1], true));
    cases.push(case(Sigmoid, BF16, [7, 3, 1, 1], false));
    cases.push(case(Sigmoid, F32, [5, 0, 1, 1], false));
    cases.push(Case::new("gated_add strided rows", |data| {
        let [gate, y, x] = std::array::from_fn(|_| data.strided_input(F32, [48, 3, 2, 1], [64, 4, 2, 1]));
        let dst = data.strided_output(F32, [48, 3, 2, 1], [52, 3, 2, 1]);
        (Call { function: Sigmoid, gate, y, x, dst }.into(), tolerance(F32))
    }));
    if level == Level::Full {
        cases.push(case(Sigmoid, F32, [4096, 1001, 1, 1], true));
    }
    cases
}
