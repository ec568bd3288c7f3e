//! StableLM: layer norms, a gated feed-forward layer, partly turned heads; some models norm each head, some run both halves of
//! a layer side by side.

use kiln_kernels::rope::RopeStyle;

use super::Architecture;
use crate::Error;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Layout, Spec};
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::Factors;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let spec = Spec::rotary(l, NormKind::Layer, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::LayerMaybe);
    spec.head = Head::Own;
    l.layer(0);
    if !l.has("ffn_norm.weight") {
        spec.layout = Layout::Parallel;
    }
    Decoder::load(l, spec)
}
