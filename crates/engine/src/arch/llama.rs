//! Llama: per layer, attention with rotary positions and grouped key-value heads, then a gated feed-forward layer, each on
//! the normed residual stream and added back to it. Mixtral has experts in the place of the feed-forward layer.

use kiln_kernels::rope::RopeStyle;

use super::Architecture;
use crate::Error;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::mlp::Scaled;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::Factors;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Usual)?;
    spec.scaled = Scaled::All;
    spec.moe = experts(l, &spec)?;
    Decoder::load(l, spec)
}

/// Experts as wide as the feed-forward layer would be, where the file has some.
pub(super) fn experts(l: &Loader<'_>, spec: &Spec) -> Result<Option<MoeSpec>, Error> {
    let width = spec.sizes.feed_forward[0];
    let moe = MoeSpec::counts(l)?.map(|counts| MoeSpec::usual(spec.sizes.hidden, width, counts));
    Ok(moe.map(|moe| MoeSpec { scaled: true, ..moe }))
}
