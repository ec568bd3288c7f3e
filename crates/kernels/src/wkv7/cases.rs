//! Cases of `wkv7`.

use kiln_gguf::TensorType::F32;

use super::{Call, Mix, scratch_bytes};
use crate::case::{Case, Data, Level};
use crate::head_mix;
use crate::tensor::Tensor;
use crate::unary::Function;
use crate::wkv6::cases::{CLOSE, Sizes, mixed, of_all};

/// Vectors of length one, as models have them for a and b: others let the state grow without bounds.
fn normalised(data: &mut Data, shape: [usize; 4]) -> Tensor {
    let tensor = data.input(F32, shape);
    let mut values = data.memory.read(&tensor);
    for head in values.chunks_exact_mut(shape[0]) {
        let length = head.iter().map(|x| x * x).sum::<f64>().sqrt();
        head.iter_mut().for_each(|x| *x /= length);
    }
    data.memory.write(&tensor, &values);
    tensor
}

fn case(sizes: Sizes) -> Case {
    made(sizes.name("wkv7"), sizes, |_| None)
}

fn mixed_case(sizes: Sizes, gate: Option<Option<Function>>) -> Case {
    made(sizes.name(&format!("wkv7 mixed, gate {gate:?}")), sizes, move |data| {
        let heads = head_mix::cases::within(data, sizes.shape(), gate);
        Some(Mix { heads, bonus: data.input(F32, heads.weight.shape) })
    })
}

fn made(name: String, sizes: Sizes, mix: impl Fn(&mut Data) -> Option<Mix> + Send + Sync + 'static) -> Case {
    Case::new(name, move |data| {
        let [r, k, v] = std::array::from_fn(|_| data.input(F32, sizes.shape()));
        let [a, b] = std::array::from_fn(|_| normalised(data, sizes.shape()));
        let w = data.input_with(F32, sizes.shape(), |random, _| sizes.decay.draw(random));
        let (state_in, y, state_out, slots) = sizes.operands(data);
        let scratch = sizes.scratch(data, scratch_bytes);
        let sequences = sizes.sequences(data);
        let (form, mix) = (sizes.form, mix(data));
        (Call { r, w, k, v, a, b, state_in, y, state_out, scratch, sequences, slots, form, mix }.into(), CLOSE)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let mut cases = of_all(level, case);
    cases.extend(mixed(level, mixed_case));
    cases
}
