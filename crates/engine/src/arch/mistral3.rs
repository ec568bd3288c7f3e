//! Mistral 3 (Ministral): Llama whose YaRN is described in the file, with a temperature of queries in long contexts.

use kiln_kernels::rope::RopeStyle;

use super::{Architecture, llama};
use crate::Error;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::Factors;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Usual)?;
    spec.scaled = true;
    spec.moe = llama::experts(l, &spec)?;
    let keys = l.keys;
    if keys.factor("attention.temperature_scale")?.is_some() {
        return Err(Error::NotSupported { what: "a temperature of queries (attention.temperature_scale)".into() });
    }
    let beta_fast = keys.float("rope.scaling.yarn_beta_fast", 32.0, [1e-3, 1e6])?;
    let beta_slow = keys.float("rope.scaling.yarn_beta_slow", 1.0, [1e-3, 1e6])?;
    let log_multiplier = keys.float("rope.scaling.yarn_log_multiplier", 0.0, [0.0, 1e3])?;
    spec.each_attention(|_, attention| {
        let Some(rope) = attention.rope.as_mut() else { return };
        (rope.params.beta_fast, rope.params.beta_slow) = (beta_fast, beta_slow);
        if log_multiplier != 0.0 && rope.params.ext_factor != 0.0 {
            let grown = 1.0 - 0.1 * log_multiplier * rope.params.freq_scale.ln();
            rope.params.attn_factor /= grown;
        }
    });
    Decoder::load(l, spec)
}
