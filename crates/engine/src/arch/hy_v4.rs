//! Hunyuan 4: latent attention with sinks and gates around several residual streams; gate and up of experts are bounded.

use kiln_kernels::glu;
use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::Gate;

use super::experts::keyed;
use super::latent::{Choosing, all, choosing_layers};
use super::{Architecture, streamed};
use crate::Error;
use crate::blocks::attend::ResultGate;
use crate::blocks::decoder::{FeedForward, Spec};
use crate::blocks::latent::Latent;
use crate::blocks::mixer::Mixer;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::Factors;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let keys = l.keys;
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    let mut latent = all(l, &spec)?;
    for layer in &mut latent {
        (layer.sinks, layer.gate, layer.scaled) = (true, ResultGate::Sigmoid, false);
    }
    if keys.count_opt("attention.indexer.top_k", 1 << 24)?.is_some() {
        let choosing = Choosing { style: RopeStyle::Normal, tail: true, eps: spec.eps };
        choosing.apply(l, &choosing_layers(l, spec.sizes.layers, 0)?, &mut latent)?;
    }
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    let limits = keys.floats("swiglu_clamp_exp", spec.sizes.layers, [0.0, 1e6])?;
    let dense = spec.dense_layers;
    spec.moe_where(|i| {
        let limit = limits[i];
        let activation = if limit > 1e-6 { glu::Gate::SwigluBounded { limit } } else { moe.activation };
        (i >= dense).then_some(MoeSpec { activation, shared_activation: Some(glu::Gate::Swiglu), ..moe })
    });
    let magnitude = keys.float("hyper_connection.magnitude", 1.0, [0.0, 1e6])?;
    let streams = streamed::spec(l, &spec, 0, magnitude)?;
    let attention = |l: &mut Loader<'_>, i: usize| -> Result<Box<dyn Mixer>, Error> {
        Ok(Box::new(Latent::load(l, &latent[i], i)?))
    };
    streamed::load(l, (&spec, streams, true), attention, |l, i| FeedForward::load(l, &spec, i))
}
