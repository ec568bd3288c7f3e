//! Mistral 3 (Ministral): Llama whose YaRN is described in the file, with a temperature of queries in long contexts.

use kiln_kernels::rope::RopeStyle;

use super::{Architecture, llama};
use crate::Error;
use crate::blocks::attend::Temperature;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::mlp::Scaled;
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::Factors;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Usual)?;
    spec.scaled = Scaled::All;
    spec.moe = llama::experts(l, &spec)?;
    let keys = l.keys;
    if let Some(scale) = keys.factor("attention.temperature_scale")? {
        let original = keys.count_opt("rope.scaling.original_context_length", 1 << 24)?.unwrap_or(spec.sizes.context);
        let temperature = Temperature { scale, length: original, offset: 0 };
        spec.each_attention(|_, attention| attention.temperature = Some(temperature));
    }
    let log_multiplier = keys.float("rope.scaling.yarn_log_multiplier", 0.0, [0.0, 1e3])?;
    spec.read_betas(l, 32.0)?;
    spec.each_attention(|_, attention| {
        let Some(rope) = attention.rope.as_mut() else { return };
        if log_multiplier != 0.0 && rope.params.ext_factor != 0.0 {
            let grown = 1.0 - 0.1 * log_multiplier * rope.params.freq_scale.ln();
            rope.params.attn_factor /= grown;
        }
    });
    Decoder::load(l, spec)
}
