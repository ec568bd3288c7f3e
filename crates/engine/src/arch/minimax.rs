//! MiniMax 01: lightning attention, and in every eighth layer attention. The stream goes on from what each half of a layer reads.

use kiln_kernels::rope::RopeStyle;

use super::{Architecture, recurrent_layers};
use crate::Error;
use crate::blocks::attention::Attention;
use crate::blocks::decoder::{Decoder, Layout, Spec};
use crate::blocks::lightning::{Lightning, LightningSizes};
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::Factors;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    spec.layout = Layout::Normed;
    spec.residual_scale = l.keys.float("residual_scale", 0.0, [1e-6, 1e6])?;
    let counts = MoeSpec::required_counts(l)?;
    spec.moe = Some(MoeSpec::usual(spec.sizes.hidden, spec.sizes.feed_forward[0], counts));
    spec.each_attention(|_, attention| attention.output_bias = false);
    let recurrent = recurrent_layers(l, spec.sizes.layers, 8)?;
    Decoder::load_with(l, spec, |l, spec, i| {
        if !recurrent[i] {
            return Ok(Box::new(Attention::load(l, &spec.attention[i], i)?));
        }
        let (sizes, eps) = (&spec.sizes, spec.eps);
        let (hidden, heads, head_dim, layers) = (sizes.hidden, sizes.heads[i], sizes.head_dim, sizes.layers);
        Ok(Box::new(Lightning::load(l, LightningSizes { hidden, heads, head_dim, layers, eps }, i)?))
    })
}
