//! Cases of `top_k`. The order is unique, so all of them are exact.

use kiln_gguf::TensorType::{F32, I32};

use super::{Call, scratch_bytes};
use crate::argsort::cases::scratch;
use crate::case::{Case, Level, Random, Tolerance};

fn case_of(name: &str, shape: [usize; 4], k: usize, value: fn(&mut Random, usize) -> f64) -> Case {
    Case::new(format!("top_k {k} {name} {shape:?}"), move |data| {
        let x = data.input_with(F32, shape, value);
        let dst = data.output(I32, [k, shape[1], shape[2], shape[3]]);
        let scratch = scratch(data, scratch_bytes(shape[0], k, x.rows()));
        (Call { x, dst, scratch }.into(), Tolerance::Exact)
    })
}

fn case(shape: [usize; 4], k: usize) -> Case {
    case_of("of any values", shape, k, |random, _| random.uniform(-1.0, 1.0))
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return vec![
            case([151_936, 1, 1, 1], 40),
            case([262_144, 1, 1, 1], 1),
            case([262_144, 1, 1, 1], 1024),
            case([65_000, 16, 1, 1], 40),
            case([128, 4096, 1, 1], 8),
        ];
    }
    let mut cases = Vec::new();
    for (cols, k) in [(1, 1), (2, 1), (7, 7), (64, 8), (100, 99), (2048, 2048), (2048, 5), (2049, 1), (2049, 2049)] {
        cases.push(case([cols, 2, 1, 1], k));
    }
    for (cols, k) in [(4096, 1), (6500, 40), (6500, 1024), (6500, 1025), (12_345, 700)] {
        cases.push(case([cols, 2, 1, 1], k));
        cases.push(case_of("of negative values", [cols, 1, 1, 1], k, |random, _| random.uniform(-9.0, -1.0)));
        cases.push(case_of("of few different values", [cols, 1, 1, 1], k, |random, _| random.below(3) as f64 - 7.0));
    }
    for cols in [90, 4200] {
        cases.push(case_of("of mostly NaN and minus infinity", [cols, 2, 1, 1], 60, |random, i| match i % 5 {
            0..2 => f64::NAN,
            4 if i % 3 == 0 => random.uniform(-1.0, 1.0),
            _ => f64::NEG_INFINITY,
        }));
    }
    cases.push(case([20, 5, 3, 2], 3));
    cases.push(case([20, 0, 1, 1], 3));
    cases.push(Case::new("top_k of strided columns into strided rows", |data| {
        let x = data.input(F32, [3, 4100, 2, 1]).permute([1, 0, 2, 3]);
        let dst = data.strided_output(I32, [9, 3, 2, 1], [12, 4, 2, 1]);
        let scratch = scratch(data, scratch_bytes(4100, 9, 6));
        (Call { x, dst, scratch }.into(), Tolerance::Exact)
    }));
    if level == Level::Full {
        for k in [1, 40, 400, 1024, 9999] {
            cases.push(case([262_144, 3, 1, 1], k));
            cases.push(case([200_011, 2, 1, 1], k));
        }
        cases.push(case([1 << 20, 2, 1, 1], 100));
        cases.push(case([128, 100_000, 1, 1], 8));
    }
    cases
}
