//! Cases of `head_mix`.

use kiln_gguf::TensorType::F32;

use super::{Bonus, Call, Mix};
use crate::case::{Case, Data, Level, Tolerance};
use crate::unary::Function;

/// f32 sums of a head, and `exp` to some units in the last place.
const CLOSE: Tolerance = Tolerance::Nmse(1e-11);

/// RWKV-6 has a gate with an activation; RWKV-7 a bonus and a plain gate, or none.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Norm,
    Six,
    Seven,
    Ungated,
}

fn case(kind: Kind, [size, heads, tokens]: [usize; 3], mean: f64) -> Case {
    Case::new(format!("head_mix {kind:?} {size} x {heads} x {tokens} mean={mean}"), move |data| {
        let shape = [size, heads, tokens, 1];
        let x = data.input_with(F32, shape, |random, _| random.uniform(mean - 1.0, mean + 1.0));
        let [weight, bias, factor] = std::array::from_fn(|_| data.input(F32, [size * heads, 1, 1, 1]));
        let bonus = matches!(kind, Kind::Seven | Kind::Ungated).then(|| {
            let [r, k, v] = std::array::from_fn(|_| data.input(F32, shape));
            Bonus { r, k, v, weight: factor }
        });
        let gate = match kind {
            Kind::Norm | Kind::Ungated => None,
            Kind::Six => Some((data.input(F32, shape), Some(Function::Silu))),
            Kind::Seven => Some((data.input(F32, shape), None)),
        };
        // In place, as models have it, or not.
        let y = if tokens % 2 == 0 { x } else { data.output(F32, shape) };
        (Call { x, weight, bias, eps: 64e-5, bonus, gate, y }.into(), CLOSE)
    })
}

/// A mix inside a recurrence over `shape`, with a gate that goes through a function or not, or none.
pub(crate) fn within(data: &mut Data, shape: [usize; 4], gate: Option<Option<Function>>) -> Mix {
    let [weight, bias] = std::array::from_fn(|_| data.input(F32, [shape[0] * shape[1], 1, 1, 1]));
    // Large enough to show beside the variance of what a recurrence gives.
    let eps = 0.5;
    Mix { weight, bias, eps, gate: gate.map(|function| (data.input(F32, shape), function)) }
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        let sizes = [[64, 64, 1], [64, 64, 2048]];
        return sizes.into_iter().flat_map(|size| [Kind::Six, Kind::Seven].map(|kind| case(kind, size, 0.0))).collect();
    }
    let mut cases = Vec::new();
    for kind in [Kind::Norm, Kind::Six, Kind::Seven, Kind::Ungated] {
        cases.push(case(kind, [64, 2, 1], 0.0));
        cases.push(case(kind, [64, 3, 6], 0.5));
    }
    // The mean in f32 is not exact beside small deviations.
    cases.push(case(Kind::Norm, [64, 3, 5], 1000.0));
    for size in [16, 32, 128, 256] {
        cases.push(case(Kind::Six, [size, 3, 5], 0.0));
        cases.push(case(Kind::Seven, [size, 1, 2], 0.0));
    }
    if level == Level::Full {
        cases.push(case(Kind::Six, [64, 64, 1000], 0.0));
        cases.push(case(Kind::Seven, [64, 32, 999], 0.0));
    }
    cases
}
