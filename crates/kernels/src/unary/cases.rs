//! Cases of `unary`.

use kiln_gguf::TensorType::{self, BF16, F16, F32};

use super::{Call, Function};
use crate::case::{Case, Level, Random, Tolerance};
use crate::elementwise;

/// `exp` in GLSL may be off by 3 + 2|x| units in the last place, `log` by 2^-21 between 0.5 and 2: about 1e-6 relative
/// for the arguments here, squared 1e-12. Coarser result types are judged by their rounding.
fn tolerance(ty: TensorType) -> Tolerance {
    if ty == F32 { Tolerance::Nmse(1e-11) } else { elementwise::tolerance(ty) }
}

/// Arguments where the function has a value.
fn argument(function: Function, random: &mut Random) -> f64 {
    match function {
        Function::Sqrt | Function::Log => random.uniform(0.001, 20.0),
        _ => random.uniform(-6.0, 6.0),
    }
}

fn case(function: Function, x_ty: TensorType, ty: TensorType, shape: [usize; 4]) -> Case {
    Case::new(format!("unary {} {x_ty} to {ty} {shape:?}", function.name()), move |data| {
        let x = data.input_with(x_ty, shape, |random, _| argument(function, random));
        let dst = data.output(ty, shape);
        (Call { function, x, dst }.into(), tolerance(ty))
    })
}

/// Given arguments, as f32. Results may be huge or tiny; none may be NaN. The exponent of e^x is rounded to 24 bits,
/// and `exp` may be off by 3 + 2|x| units: up to 2e-5 of the value where |x| is 100, squared 4e-10.
fn given(function: Function, what: &str, values: &'static [f64]) -> Case {
    Case::new(format!("unary {} {what}", function.name()), move |data| {
        let x = data.input_with(F32, [values.len(), 1, 1, 1], |_, i| values[i]);
        let dst = data.output(F32, x.shape);
        (Call { function, x, dst }.into(), Tolerance::Nmse(1e-9))
    })
}

/// Around the places where e^x and e^-x leave the range of f32, and far beyond them.
const LARGE: &[f64] = &[
    -3e38, -1e20, -1e4, -104.0, -100.0, -89.0, -88.5, -88.0, -87.0, -44.5, -20.5, -17.0, -9.1, 0.0, 9.1, 17.0, 20.5,
    44.5, 87.0, 88.0,
];
const VERY_LARGE: &[f64] = &[88.5, 89.0, 100.0, 104.0, 1e4, 1e20, 3e38];
/// Small arguments alone, so that the relative error of small results is judged.
const SMALL: &[f64] = &[-1e-3, -3e-4, -1e-5, -1e-7, -1e-20, 1e-20, 1e-7, 1e-6, 1e-5, 3e-4, 1e-3];
/// Negative arguments with small results.
const TAIL: &[f64] = &[-9.0, -8.5, -8.0, -7.5, -7.25, -7.0];

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    use Function::{
        Elu, Exp, Gelu, GeluErf, GeluQuick, HardSigmoid, HardSwish, Relu, Relu2, Sigmoid, Silu, Softplus, Tanh,
    };
    if level == Level::Bench {
        return vec![
            case(Silu, F32, F32, [14336, 1, 1, 1]),
            case(Silu, F32, F32, [14336, 1024, 1, 1]),
            case(GeluErf, F32, F32, [14336, 1024, 1, 1]),
        ];
    }
    let mut cases = Vec::new();
    for function in Function::ALL {
        cases.push(case(function, F32, F32, [128, 5, 1, 1]));
        cases.push(case(function, F16, F16, [13, 7, 2, 1]));
    }
    for function in [Silu, Gelu, GeluQuick, GeluErf, Relu, Sigmoid, Tanh, Softplus, Elu, HardSigmoid, HardSwish] {
        cases.push(given(function, "of large arguments", LARGE));
        cases.push(given(function, "of very large arguments", VERY_LARGE));
    }
    cases.push(given(Exp, "of large arguments", &LARGE[1..]));
    cases.push(given(Relu2, "of large arguments", &LARGE[1..]));
    for function in [Silu, Gelu, GeluQuick, GeluErf, Tanh, Elu] {
        cases.push(given(function, "of small arguments", SMALL));
    }
    for function in [Silu, Sigmoid, Gelu, GeluErf, Softplus] {
        cases.push(given(function, "of negative arguments", TAIL));
    }
    // Arguments whose results are not drowned by larger ones judge the error function itself: 1e-6 relative, squared.
    cases.push(Case::new("unary gelu_erf against the error function", |data| {
        let x = data.input_with(F32, [512, 1, 1, 1], |random, _| random.uniform(-2.0, 0.0));
        let dst = data.output(F32, x.shape);
        (Call { function: GeluErf, x, dst }.into(), Tolerance::Nmse(1e-12))
    }));
    for (x_ty, ty) in [(F32, F16), (F16, F32), (BF16, BF16), (F32, BF16), (BF16, F32)] {
        cases.push(case(Gelu, x_ty, ty, [32, 3, 1, 1]));
    }
    for n in [1, 2, 3, 5, 255, 257] {
        cases.push(case(Silu, F32, F32, [n, 1, 1, 1]));
    }
    cases.push(case(Silu, F32, F32, [7, 0, 1, 1]));
    cases.push(Case::new("unary relu2 strided rows, in place", |data| {
        let x = data.strided_input(F32, [48, 3, 2, 1], [64, 4, 2, 1]);
        (Call { function: Relu2, x, dst: x }.into(), tolerance(F32))
    }));
    cases.push(Case::new("unary silu transposes", |data| {
        let x = data.input(F32, [12, 9, 2, 1]).permute([2, 1, 0, 3]);
        let dst = data.output(F32, [2, 9, 12, 1]);
        (Call { function: Silu, x, dst }.into(), tolerance(F32))
    }));
    if level == Level::Full {
        for function in Function::ALL {
            cases.push(case(function, F32, F32, [4096, 301, 1, 1]));
        }
        cases.push(case(Silu, F32, F32, [8193, 1001, 1, 1]));
    }
    cases
}
