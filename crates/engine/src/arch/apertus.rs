//! Apertus: norms of each head, and a feed-forward layer without a gate whose activation has numbers of its own in every layer.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::xielu::Curve;

use super::Architecture;
use crate::Error;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::mlp::Activation;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::Factors;

/// Most that a number of the activation may be.
const MOST: f32 = 1e6;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Usual)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms);
    spec.head = Head::Own;
    if let Some(scale) = l.keys.factor("attention.scale")? {
        spec.each_attention(|_, attention| attention.scale = scale);
    }
    // These keys do not begin with the name of the architecture.
    let keys = l.keys.of("xielu");
    let numbers = |name: &str| keys.required_floats(name, spec.sizes.layers, [-MOST, MOST]);
    let [negative, positive, beta, eps] = ["alpha_n", "alpha_p", "beta", "eps"].map(numbers);
    let (negative, positive, beta, eps) = (negative?, positive?, beta?, eps?);
    let curve = |i: usize| Curve::from_raw(negative[i], positive[i], beta[i], eps[i]);
    spec.activations = (0..spec.sizes.layers).map(|i| Activation::Xielu(curve(i))).collect();
    Decoder::load(l, spec)
}
