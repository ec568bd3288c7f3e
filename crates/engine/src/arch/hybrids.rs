//! Transformers in which state-space mixers stand beside attention or in its place. Where a file counts no heads of keys and values for a
//! layer, the layer has no attention.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::{Gate, Shares};
use kiln_kernels::unary::Function;

use super::{Architecture, experts, granite};
use crate::Error;
use crate::blocks::attention::{Attention, HeadNorm};
use crate::blocks::decoder::{Decoder, FeedForward, Layout, Spec};
use crate::blocks::mamba::{Mamba1, Mamba2, MambaSizes, Norms, PlamoMamba};
use crate::blocks::mixer::{Both, Mixer};
use crate::blocks::mlp::{Activation, Scaled};
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::Factors;

type Loaded = Result<Box<dyn Architecture>, Error>;

fn attention(l: &mut Loader<'_>, spec: &Spec, i: usize) -> Result<Box<dyn Mixer>, Error> {
    Ok(Box::new(Attention::load(l, &spec.attention[i], i)?))
}

/// Jamba: Mamba 1 and attention without positions; some layers have experts.
pub(super) fn jamba(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::plain(l, NormKind::Rms)?;
    spec.each_attention(|_, attention| attention.output_bias = false);
    let (hidden, width) = (spec.sizes.hidden, spec.sizes.feed_forward[0]);
    let counts = MoeSpec::counts(l)?;
    spec.moe = counts.map(|counts| MoeSpec { shares: Shares::Gates, ..MoeSpec::usual(hidden, width, counts) });
    spec.maybe_dense = true;
    let sizes = MambaSizes::read(l, hidden, spec.eps)?;
    Decoder::load_with(l, spec, |l, spec, i| match spec.sizes.kv_heads[i] {
        0 => Ok(Box::new(Mamba1::load(l, sizes, Norms::Weighted, i)?)),
        _ => attention(l, spec, i),
    })
}

/// Falcon H1: Mamba 2 and attention side by side in every layer.
pub(super) fn falcon_h1(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    spec.each_attention(|_, attention| attention.output_bias = false);
    let sizes = MambaSizes::read(l, spec.sizes.hidden, spec.eps)?;
    Decoder::load_with(l, spec, |l, spec, i| {
        Ok(Box::new(Both(attention(l, spec, i)?, Box::new(Mamba2::load(l, sizes, i)?))))
    })
}

/// Granite 4: Mamba 2, or attention.
pub(super) fn granite(l: &mut Loader<'_>) -> Loaded {
    let mut spec = granite::spec(l)?;
    spec.maybe_dense = true;
    let sizes = MambaSizes::read(l, spec.sizes.hidden, spec.eps)?;
    Decoder::load_with(l, spec, |l, spec, i| match spec.sizes.kv_heads[i] {
        0 => Ok(Box::new(Mamba2::load(l, sizes, i)?)),
        _ => attention(l, spec, i),
    })
}

/// Nemotron H: each layer is a Mamba 2, attention without positions, or a feed-forward layer.
pub(super) fn nemotron(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::plain(l, NormKind::Rms)?;
    spec.layout = Layout::Single;
    spec.activation = Activation::Plain(Function::Relu2);
    spec.scaled = Scaled::All;
    if MoeSpec::counts(l)?.is_some() {
        let moe = experts::keyed(l, &mut spec, Gate::Sigmoid)?;
        let shared = l.keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?;
        let latent = l.keys.count_opt("moe_latent_size", 1 << 17)?;
        let plain = Some(Function::Relu2);
        spec.moe = Some(MoeSpec { gating: Gate::Sigmoid, shared, latent, plain, scaled: true, ..moe });
    }
    let sizes = MambaSizes::read(l, spec.sizes.hidden, spec.eps)?;
    Decoder::load_with(l, spec, |l, spec, i| match (spec.sizes.feed_forward[i], spec.sizes.kv_heads[i]) {
        (0, 0) => Ok(Box::new(Mamba2::load(l, sizes, i)?)),
        (0, _) => attention(l, spec, i),
        _ => Ok(Box::new(FeedForward::load(l, spec, i)?)),
    })
}

/// PLaMo 2: its own mixture of Mamba 1 and 2, or attention; norms on both sides of each half of a layer.
pub(super) fn plamo2(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::RmsEach);
    spec.layout = Layout::Sandwich;
    spec.activation = Activation::GatedFused(kiln_kernels::glu::Gate::Swiglu);
    let scale = 1.0 / (spec.sizes.value_dim as f32).sqrt();
    spec.each_attention(|_, attention| {
        (attention.scale, attention.scaled, attention.output_bias) = (scale, false, false);
    });
    let sizes = MambaSizes::read(l, spec.sizes.hidden, spec.eps)?;
    Decoder::load_with(l, spec, |l, spec, i| match spec.sizes.kv_heads[i] {
        0 => Ok(Box::new(PlamoMamba::load(l, sizes, i)?)),
        _ => attention(l, spec, i),
    })
}
