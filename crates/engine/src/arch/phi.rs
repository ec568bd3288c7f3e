//! Phi 2: layer norms with biases, attention and a plain feed-forward layer side by side. Phi 3: Llama with fused matrices and
//! rotary factors for long and short contexts. PhiMoE: the same with experts and biases everywhere.

use kiln_kernels::glu::Gate;
use kiln_kernels::rope::RopeStyle;
use kiln_kernels::unary::Function;

use super::Architecture;
use crate::Error;
use crate::blocks::decoder::{Decoder, Layout, Spec};
use crate::blocks::mlp::Activation;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::Factors;

pub(super) fn load2(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = Spec::rotary(l, NormKind::Layer, RopeStyle::Neox, Factors::Unused)?;
    spec.layout = Layout::Parallel;
    spec.activation = Activation::Plain(Function::Gelu);
    spec.head = Head::Own;
    Decoder::load(l, spec)
}

pub(super) fn load3(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::LongShort)?;
    spec.activation = Activation::GatedFused(Gate::Swiglu);
    Decoder::load(l, spec)
}

/// Phi 3.5 with experts: norms have a bias.
pub(super) fn load_moe(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = Spec::rotary(l, NormKind::RmsBias, RopeStyle::Neox, Factors::LongShort)?;
    spec.head = Head::Own;
    let counts = MoeSpec::required_counts(l)?;
    spec.moe = Some(MoeSpec::usual(spec.sizes.hidden, spec.sizes.feed_forward[0], counts));
    Decoder::load(l, spec)
}
