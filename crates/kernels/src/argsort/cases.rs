//! Cases of `argsort`. The order is unique, so all of them are exact.

use kiln_gguf::TensorType::{F32, I32};

use super::{Call, Order, scratch_bytes};
use crate::case::{Case, Data, Level, Random, Tolerance};
use crate::tensor::Tensor;

/// Scratch memory of exactly the size that is asked for.
pub(crate) fn scratch(data: &mut Data, bytes: usize) -> Option<Tensor> {
    (bytes > 0).then(|| data.output(I32, [bytes / 4, 1, 1, 1]))
}

fn case_of(name: &str, order: Order, shape: [usize; 4], value: fn(&mut Random, usize) -> f64) -> Case {
    Case::new(format!("argsort {order:?} {name} {shape:?}"), move |data| {
        let x = data.input_with(F32, shape, value);
        let dst = data.output(I32, shape);
        let scratch = scratch(data, scratch_bytes(shape[0], x.rows()));
        (Call { x, dst, scratch, order }.into(), Tolerance::Exact)
    })
}

fn case(order: Order, shape: [usize; 4]) -> Case {
    case_of("of any values", order, shape, |random, _| random.uniform(-1.0, 1.0))
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    use Order::{Ascending, Descending};
    if level == Level::Bench {
        return [256, 32_768, 262_144].map(|cols| case(Descending, [cols, 16, 1, 1])).into();
    }
    let mut cases = Vec::new();
    for order in [Ascending, Descending] {
        for cols in [1, 2, 3, 63, 64, 65, 129, 1000, 2047, 2048, 2049, 4097, 7000] {
            cases.push(case(order, [cols, 2, 1, 1]));
        }
        for cols in [70, 5000] {
            cases.push(case_of("of few different values", order, [cols, 2, 1, 1], |r, _| r.below(4) as f64 - 2.0));
            cases.push(case_of("of equal values", order, [cols, 2, 1, 1], |_, _| 0.5));
            cases.push(case_of("with infinities, NaN and zeros", order, [cols, 2, 1, 1], |random, _| {
                [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 0.0, -0.0, 1e-44, -1e-44, 1.0][random.below(8)]
            }));
        }
        cases.push(case_of("of sorted values", order, [3000, 1, 1, 1], |_, i| i as f64));
    }
    cases.push(case(Ascending, [20, 5, 3, 2]));
    cases.push(case(Ascending, [20, 0, 1, 1]));
    for (cols, keep) in [(40, 7), (5000, 2100)] {
        cases.push(Case::new(format!("argsort keeps {keep} of {cols} strided columns"), move |data| {
            let x = data.input(F32, [3, cols, 2, 1]).permute([1, 0, 2, 3]);
            let dst = data.strided_output(I32, [keep, 3, 2, 1], [keep + 3, 4, 2, 1]);
            let scratch = scratch(data, scratch_bytes(cols, x.rows()));
            (Call { x, dst, scratch, order: Descending }.into(), Tolerance::Exact)
        }));
    }
    if level == Level::Full {
        for cols in [16_384, 32_767, 65_547, 131_072, 262_144, 524_287, 1 << 20] {
            cases.push(case(Ascending, [cols, 3, 1, 1]));
        }
        cases.push(case(Descending, [(1 << 20) + 11, 2, 1, 1]));
        cases.push(case(Descending, [128, 100_000, 1, 1]));
    }
    cases
}
