//! Cases of `gla`.

use kiln_gguf::TensorType::F32;

use super::{Call, scratch_bytes};
use crate::case::{Case, Level};
use crate::wkv6::cases::{Sizes, of_all};

fn case(sizes: Sizes) -> Case {
    Case::new(sizes.name("gla"), move |data| {
        let [k, v, r] = std::array::from_fn(|_| data.input(F32, sizes.shape()));
        let td = data.input_with(F32, sizes.shape(), |random, _| sizes.decay.draw(random));
        let (state_in, y, state_out, slots) = sizes.operands(data);
        let scratch = sizes.scratch(data, scratch_bytes);
        let sequences = sizes.sequences(data);
        let scale = (sizes.head_size as f32).sqrt().recip();
        let call = Call { k, v, r, td, state_in, y, state_out, scratch, sequences, slots, form: sizes.form, scale };
        (call.into(), sizes.tolerance())
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    of_all(level, case)
}
