//! Grok: capped scores and logits, norms before and after each half of a layer, experts beside a feed-forward layer.

use kiln_kernels::glu::Gate;
use kiln_kernels::rope::RopeStyle;

use super::Architecture;
use crate::Error;
use crate::blocks::decoder::{Decoder, Layout, Place, Spec};
use crate::blocks::mlp::Activation;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::Factors;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let keys = l.keys;
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    spec.read_betas(l, 8.0)?;
    spec.embedding_scale = keys.float("embedding_scale", 78.383_67, [1e-6, 1e6])?;
    spec.logit_scale = keys.float("logit_scale", 0.577_350_26, [1e-6, 1e6])?;
    spec.logit_softcap = keys.float("final_logit_softcapping", 0.0, [0.0, 1e6])?;
    let scale = keys.float("attention.output_scale", 0.088_388_346, [1e-6, 1e6])?;
    let softcap = keys.float("attn_logit_softcapping", 30.0, [0.0, 1e6])?;
    spec.each_attention(|_, attention| (attention.scale, attention.softcap) = (scale, softcap));
    l.layer(0);
    let last = if l.has("layer_output_norm.weight") { "layer_output_norm" } else { "post_ffw_norm" };
    (spec.layout, spec.attention_post, spec.ffn_post) = (Layout::Sandwich, "attn_output_norm", last);
    (spec.experts, spec.activation) = (Place::BesideHalved, Activation::Gated(Gate::Geglu));
    let counts = MoeSpec::required_counts(l)?;
    let width = keys.count_opt("expert_feed_forward_length", 1 << 20)?.unwrap_or(spec.sizes.feed_forward[0]);
    spec.moe = Some(MoeSpec { activation: Gate::Geglu, ..MoeSpec::usual(spec.sizes.hidden, width, counts) });
    Decoder::load(l, spec)
}
