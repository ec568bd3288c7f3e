//! Qwen 3: Llama with a norm of every head of queries and keys. With experts, their weights are divided by their sum.

use kiln_kernels::rope::RopeStyle;

use super::Architecture;
use crate::Error;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::mlp::Scaled;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, expert_width};

fn plain(l: &mut Loader<'_>) -> Result<Spec, Error> {
    Ok(Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?.with_head_norm(HeadNorm::Rms))
}

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l)?;
    spec.scaled = Scaled::All;
    Decoder::load(l, spec)
}

pub(super) fn load_moe(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l)?;
    let counts = MoeSpec::required_counts(l)?;
    let width = expert_width(l, &spec.sizes, counts)?;
    spec.moe = Some(MoeSpec { scaled: true, ..MoeSpec::usual(spec.sizes.hidden, width, counts) });
    Decoder::load(l, spec)
}

/// Qwen 3 VL: for text, the positions of all sections are the same. Vectors of pictures have parts that are added behind the first layers.
pub(super) fn load_vl(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let spec = vl(l)?;
    Decoder::load(l, spec)
}

fn vl(l: &mut Loader<'_>) -> Result<Spec, Error> {
    let mut spec = plain(l)?.with_sections(l, RopeStyle::Imrope)?;
    spec.deepstack = l.keys.count_opt("n_deepstack_layers", spec.sizes.layers)?.unwrap_or(0);
    l.deepstack(spec.deepstack);
    Ok(spec)
}

/// The same with experts.
pub(super) fn load_vl_moe(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = vl(l)?;
    let counts = MoeSpec::required_counts(l)?;
    let width = expert_width(l, &spec.sizes, counts)?;
    spec.moe = Some(MoeSpec::usual(spec.sizes.hidden, width, counts));
    Decoder::load(l, spec)
}

/// Qwen 3 TTS: the vocabulary begins with text, of which no token is ever written.
pub(super) fn load_tts(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l)?.with_sections(l, RopeStyle::Imrope)?;
    spec.head = Head::Rear;
    Decoder::load(l, spec)
}
