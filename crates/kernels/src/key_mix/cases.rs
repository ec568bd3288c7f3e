//! Cases of `key_mix`.

use kiln_gguf::TensorType::F32;

use super::{Call, Value};
use crate::case::{Case, Level, Tolerance};

/// f32 sums of a head, and `exp` to some units in the last place.
const CLOSE: Tolerance = Tolerance::Nmse(1e-11);

/// `most` bounds the keys: short ones meet eps.
fn case([size, heads, tokens]: [usize; 3], values: bool, most: f64) -> Case {
    Case::new(format!("key_mix {size} x {heads} x {tokens} values={values} keys to {most}"), move |data| {
        let shape = [size, heads, tokens, 1];
        let k = data.input_with(F32, shape, |random, _| random.uniform(-most, most));
        let [rate, w] = std::array::from_fn(|_| data.input_with(F32, shape, |random, _| random.uniform(-4.0, 4.0)));
        let [k_k, k_a] = std::array::from_fn(|_| data.input(F32, [size * heads, 1, 1, 1]));
        let [lookup, replaced] = std::array::from_fn(|_| data.output(F32, shape));
        let value = values.then(|| {
            let [v, first, share] = std::array::from_fn(|_| data.input(F32, shape));
            Value { v, first, share }
        });
        (Call { k, k_k, k_a, rate, w, lookup, replaced, value, eps: 1e-12 }.into(), CLOSE)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return [1, 2048].map(|tokens| case([64, 64, tokens], true, 1.0)).into();
    }
    let mut cases = Vec::new();
    for size in [16, 32, 64, 128, 256] {
        cases.push(case([size, 3, 1], false, 1.0));
        cases.push(case([size, 1, 6], true, 1.0));
    }
    cases.push(case([64, 2, 3], true, 1e-14));
    cases.push(case([64, 2, 3], true, 1e3));
    if level == Level::Full {
        cases.push(case([64, 64, 999], true, 1.0));
    }
    cases
}
