//! Cases of `argmax`. Indices are exact.

use kiln_gguf::TensorType::{F32, I32};

use super::Call;
use crate::case::{Case, Level, Random, Tolerance};

fn case_of(name: &str, shape: [usize; 4], value: fn(&mut Random, usize) -> f64) -> Case {
    Case::new(format!("argmax {name} {shape:?}"), move |data| {
        let x = data.input_with(F32, shape, value);
        let dst = data.output(I32, [1, shape[1], shape[2], shape[3]]);
        (Call { x, dst }.into(), Tolerance::Exact)
    })
}

fn case(shape: [usize; 4]) -> Case {
    case_of("of any sign", shape, |random, _| random.uniform(-1.0, 1.0))
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return vec![case([151_936, 1, 1, 1]), case([262_144, 1, 1, 1]), case([32_000, 512, 1, 1])];
    }
    let mut cases: Vec<Case> =
        [1, 2, 31, 33, 256, 257, 1000, 4099, 32_001].iter().map(|&cols| case([cols, 4, 1, 1])).collect();
    cases.push(case([65, 3, 2, 2]));
    cases.push(case([65, 0, 1, 1]));
    for cols in [7, 300, 3001] {
        cases.push(case_of("of negative rows", [cols, 3, 1, 1], |random, _| random.uniform(-9.0, -1.0)));
        cases.push(case_of("of few different values", [cols, 5, 1, 1], |random, _| random.below(3) as f64 - 5.0));
        cases.push(case_of("of equal values", [cols, 2, 1, 1], |_, _| -7.25));
        cases.push(case_of("of minus infinity", [cols, 2, 1, 1], |_, _| f64::NEG_INFINITY));
        cases.push(case_of("of NaN", [cols, 2, 1, 1], |_, _| f64::NAN));
        cases.push(case_of("among minus infinities and NaN", [cols, 3, 1, 1], |random, i| match i % 7 {
            5 => random.uniform(-1e30, -1.0),
            0..3 => f64::NAN,
            _ => f64::NEG_INFINITY,
        }));
        cases.push(case_of("of zeros of both signs", [cols, 4, 1, 1], |random, _| [0.0, -0.0][random.below(2)]));
        cases.push(case_of("of subnormals", [cols, 4, 1, 1], |random, _| (random.below(9) as f64 - 4.0) * 1e-44));
    }
    cases.push(Case::new("argmax of columns into every other element", |data| {
        let x = data.input(F32, [7, 40, 2, 1]).permute([1, 0, 2, 3]);
        let dst = data.output(I32, [2, 7, 2, 1]).narrow(0, 1, 1);
        (Call { x, dst }.into(), Tolerance::Exact)
    }));
    if level == Level::Full {
        cases.push(case([262_144, 33, 1, 1]));
        cases.push(case([1 << 20, 3, 1, 1]));
        cases.push(case([100, 100_000, 1, 1]));
    }
    cases
}
