//! Qwen 2: Llama with biases on queries, keys and values, and pairs of rotary positions half a head apart.

use kiln_kernels::rope::RopeStyle;

use super::Architecture;
use crate::Error;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::Factors;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    Decoder::load(l, spec)
}

/// Qwen 2 VL: for text, the positions of all sections are the same.
pub(super) fn load_vl(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_sections(l, RopeStyle::Mrope)?;
    spec.output_bias = false;
    Decoder::load(l, spec)
}
