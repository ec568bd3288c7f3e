//! Cases of `xielu`.

use kiln_gguf::TensorType::{self, BF16, F16, F32};

use super::{Call, Curve};
use crate::case::{Case, Level, Tolerance};
use crate::elementwise;

/// Numbers as a model has them.
const USUAL: Curve = Curve { positive: 1.1, negative: 1.4, beta: 0.5, eps: -1e-6 };
/// Numbers that differ wherever one of them is mistaken for another.
const ODD: Curve = Curve { positive: 25.0, negative: 0.3, beta: -2.0, eps: -1.5 };

/// `exp` in GLSL may be off by 3 + 2|x| units in the last place: about 1e-6 relative for the arguments here, squared 1e-12. Coarser
/// result types are judged by their rounding.
fn tolerance(ty: TensorType) -> Tolerance {
    if ty == F32 { Tolerance::Nmse(1e-11) } else { elementwise::tolerance(ty) }
}

fn case(curve: Curve, x_ty: TensorType, ty: TensorType, shape: [usize; 4]) -> Case {
    Case::new(format!("xielu {x_ty} to {ty} {shape:?} {curve:?}"), move |data| {
        let x = data.input_with(x_ty, shape, |random, _| random.uniform(-6.0, 6.0));
        let dst = data.output(ty, shape);
        (Call { curve, x, dst }.into(), tolerance(ty))
    })
}

/// Arguments of one size, so that errors of small results show.
fn near(what: &str, values: &'static [f64]) -> Case {
    Case::new(format!("xielu {what}"), move |data| {
        let x = data.input_with(F32, [values.len(), 1, 1, 1], |_, i| values[i]);
        let dst = data.output(F32, x.shape);
        (Call { curve: USUAL, x, dst }.into(), Tolerance::Nmse(1e-11))
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return [1, 512].map(|rows| case(USUAL, F32, F32, [14336, rows, 1, 1])).into();
    }
    let mut cases = Vec::new();
    for cols in [1, 3, 4, 65, 256, 1028] {
        cases.extend([USUAL, ODD].map(|curve| case(curve, F32, F32, [cols, 3, 1, 1])));
    }
    for (x_ty, ty) in [(F16, F16), (F32, F16), (F16, F32), (BF16, BF16)] {
        cases.push(case(USUAL, x_ty, ty, [17, 3, 2, 2]));
        cases.push(case(USUAL, x_ty, ty, [16, 3, 2, 2]));
    }
    cases.push(case(USUAL, F32, F32, [5, 0, 1, 1]));
    cases.push(near("around 0", &[-1e-3, -3e-4, -1e-4, -3e-5, 3e-5, 1e-4, 3e-4, 1e-3]));
    cases.push(near("closer to 0 than eps", &[-9e-7, -5e-7, -1e-7, -1e-9, 0.0]));
    cases.push(near("far below 0", &[-1e30, -1e9, -1e4, -104.0, -88.5, -20.0]));
    cases.push(near("far above 0", &[20.0, 88.5, 1e4, 1e9, 1e18]));
    cases.push(Case::new("xielu strided rows, in place", |data| {
        let x = data.strided_input(F32, [48, 3, 2, 1], [64, 4, 2, 1]);
        (Call { curve: ODD, x, dst: x }.into(), tolerance(F32))
    }));
    cases.push(Case::new("xielu transposes", |data| {
        let x = data.input(F32, [12, 9, 2, 1]).permute([1, 0, 2, 3]);
        let dst = data.output(F32, [9, 12, 2, 1]);
        (Call { curve: ODD, x, dst }.into(), tolerance(F32))
    }));
    if level == Level::Full {
        cases.push(case(USUAL, F32, F32, [8192, 1024, 1, 1]));
    }
    cases
}
