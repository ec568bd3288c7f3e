//! Falcon: attention and a plain feed-forward layer side by side, each with a layer norm of its own in the larger models.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::unary::Function;

use super::Architecture;
use crate::Error;
use crate::blocks::decoder::{Decoder, Layout, Spec};
use crate::blocks::mlp::Activation;
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::Factors;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = Spec::rotary(l, NormKind::Layer, RopeStyle::Neox, Factors::Unused)?;
    spec.activation = Activation::Plain(Function::Gelu);
    spec.layout = Layout::Parallel;
    l.layer(0);
    if l.has("attn_norm_2.weight") {
        // The second norm is attention's, the first one is that of the feed-forward layer.
        spec.layout = Layout::ParallelTwoNorms;
        (spec.attention_norm, spec.ffn_norm) = ("attn_norm_2", "attn_norm");
    }
    Decoder::load(l, spec)
}
