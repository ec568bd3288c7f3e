//! Cases of `sum_rows`.

use kiln_gguf::TensorType::F32;

use super::Call;
use crate::case::{Case, Level, Tolerance};

/// Terms of both signs cancel: sums are smaller than their terms' magnitudes by the root of their number. Adding a few
/// hundred terms per thread in f32 leaves an error of about 1e-6 of the sum, squared 1e-12.
const TOLERANCE: Tolerance = Tolerance::Nmse(1e-10);

fn case(shape: [usize; 4]) -> Case {
    Case::new(format!("sum_rows {shape:?}"), move |data| {
        let x = data.input(F32, shape);
        let dst = data.output(F32, [1, shape[1], shape[2], shape[3]]);
        (Call { x, dst, weights: None }.into(), TOLERANCE)
    })
}

/// The results of a token's experts, one behind the other, summed for each element.
fn experts([width, experts, tokens]: [usize; 3]) -> Case {
    Case::new(format!("sum_rows of {experts} experts, {width} x {tokens}"), move |data| {
        let x = data.input(F32, [width, experts, tokens, 1]).permute([1, 0, 2, 3]);
        let dst = data.output(F32, [1, width, tokens, 1]);
        (Call { x, dst, weights: None }.into(), TOLERANCE)
    })
}

/// The same, each with its weight.
fn weighed([width, experts, tokens, more]: [usize; 4]) -> Case {
    Case::new(format!("sum_rows of {experts} weighed experts, {width} x {tokens} x {more}"), move |data| {
        let x = data.input(F32, [width, experts, tokens, more]).permute([1, 0, 2, 3]);
        let weights = Some(data.input(F32, [experts, 1, tokens, more]));
        let dst = data.output(F32, [1, width, tokens, more]);
        (Call { x, dst, weights }.into(), TOLERANCE)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return vec![
            case([4096, 4096, 1, 1]),
            case([151_936, 1, 1, 1]),
            experts([2048, 8, 2048]),
            weighed([2048, 8, 2048, 1]),
        ];
    }
    let mut cases: Vec<Case> =
        [1, 2, 31, 32, 33, 256, 257, 1024, 5001].iter().map(|&cols| case([cols, 3, 1, 1])).collect();
    cases.push(case([64, 5, 3, 2]));
    cases.push(case([64, 0, 1, 1]));
    cases.push(case([8, 0, 1, 1]));
    cases.push(experts([200, 8, 3]));
    cases.push(experts([65, 32, 2]));
    cases.push(weighed([200, 8, 3, 1]));
    cases.push(weighed([33, 6, 2, 2]));
    cases.push(Case::new("sum_rows of columns into every other element", |data| {
        let x = data.input(F32, [7, 40, 2, 1]).permute([1, 0, 2, 3]);
        let dst = data.output(F32, [2, 7, 2, 1]).narrow(0, 1, 1);
        (Call { x, dst, weights: None }.into(), TOLERANCE)
    }));
    cases.push(Case::new("sum_rows of ones", |data| {
        let x = data.input_with(F32, [3000, 2, 1, 1], |_, _| 1.0);
        let dst = data.output(F32, [1, 2, 1, 1]);
        (Call { x, dst, weights: None }.into(), Tolerance::Exact)
    }));
    if level == Level::Full {
        cases.push(case([300, 70_000, 1, 1]));
        cases.push(case([1 << 20, 3, 1, 1]));
    }
    cases
}
