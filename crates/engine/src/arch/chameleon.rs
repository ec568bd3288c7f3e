//! Chameleon: norms with biases for each head; the large model norms the results of both halves of a layer instead of what they read. Codes of
//! images stand in the vocabulary, and text never draws them.

use kiln_kernels::rope::RopeStyle;

use super::Architecture;
use crate::Error;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Layout, Spec};
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::Factors;

/// What norms of heads add, whatever the file says.
const HEAD_EPS: f32 = 1e-5;
/// The codes of images among the tokens.
const IMAGE_CODES: std::ops::Range<usize> = 4..8196;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::LayerEach);
    spec.each_attention(|_, attention| attention.eps = HEAD_EPS);
    if l.keys.flag("swin_norm", false)? {
        spec.layout = Layout::PostChained;
        (spec.attention_post, spec.ffn_post) = ("attn_norm", "ffn_norm");
    }
    spec.hidden_tokens = IMAGE_CODES.collect();
    Decoder::load(l, spec)
}
