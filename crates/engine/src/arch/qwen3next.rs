//! Qwen 3 Next and Qwen 3.5: delta nets, and in some layers attention whose result is gated.

use kiln_kernels::rope::RopeStyle;

use super::{Architecture, recurrent_layers};
use crate::Error;
use crate::blocks::attend::ResultGate;
use crate::blocks::attention::{Attention, HeadNorm};
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::delta_net::{DeltaNet, DeltaSpec, OutputGate};
use crate::blocks::draft_head::Handed;
use crate::blocks::mlp::Scaled;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::{Factors, expert_width};

fn plain(l: &mut Loader<'_>) -> Result<Spec, Error> {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms).with_result_gate(ResultGate::InQueries);
    spec.ffn_norm = "post_attention_norm";
    spec.scaled = Scaled::All;
    spec.drafts = Some(Handed::Normed);
    spec.each_attention(|_, attention| attention.output_bias = false);
    Ok(spec)
}

fn experts(l: &Loader<'_>, spec: &Spec) -> Result<MoeSpec, Error> {
    let counts = MoeSpec::required_counts(l)?;
    let width = expert_width(l, &spec.sizes, counts)?;
    let shared = l.keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?.unwrap_or(spec.sizes.feed_forward[0]);
    Ok(MoeSpec { scaled: true, shared: Some(shared), ..MoeSpec::usual(spec.sizes.hidden, width, counts) })
}

fn finish(l: &mut Loader<'_>, spec: Spec, grouped: bool) -> Result<Box<dyn Architecture>, Error> {
    let recurrent = recurrent_layers(l, spec.sizes.layers, 4)?;
    let delta =
        DeltaSpec { hidden: spec.sizes.hidden, eps: spec.eps, grouped, output_gate: OutputGate::Silu, adds: false };
    Decoder::load_with(l, spec, |l, spec, i| match recurrent[i] {
        true => Ok(Box::new(DeltaNet::load(l, &delta, i)?)),
        false => Ok(Box::new(Attention::load(l, &spec.attention[i], i)?)),
    })
}

/// Qwen 3 Next: neighbouring heads share keys.
pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l)?;
    spec.moe = Some(experts(l, &spec)?);
    finish(l, spec, true)
}

/// Qwen 3.5.
pub(super) fn load35(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let spec = plain(l)?.with_sections(l, RopeStyle::Imrope)?;
    finish(l, spec, false)
}

/// Qwen 3.5 with experts.
pub(super) fn load35_moe(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l)?.with_sections(l, RopeStyle::Imrope)?;
    spec.moe = Some(experts(l, &spec)?);
    finish(l, spec, false)
}
