//! GLM 5 Next: delta nets and latent attention without positions around residual streams that are mixed; gate and up of feed-forward layers are
//! bounded.

use kiln_kernels::glu;
use kiln_kernels::topk_moe::Gate;

use super::experts::keyed;
use super::kimi::{bounded, mixer};
use super::{Architecture, streamed};
use crate::Error;
use crate::blocks::decoder::{FeedForward, Spec};
use crate::blocks::mlp::Activation;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::model::Loader;

/// Added to the squares of queries and keys of delta nets.
const ADDED: f32 = 1e-6;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let keys = l.keys;
    chooses_all(l)?;
    let mut spec = Spec::plain(l, NormKind::Rms)?;
    spec.ffn_bias = false;
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    let (layers, dense) = (spec.sizes.layers, spec.dense_layers);
    let limits = keys.floats("swiglu_clamp_exp", layers, [0.0, 1e6])?;
    let shared = match keys.is_array("swiglu_clamp_shexp") {
        true => keys.floats("swiglu_clamp_shexp", layers, [0.0, 1e6])?,
        false => limits.clone(),
    };
    let within = |limit: f32| if limit > 1e-6 { glu::Gate::SwigluBounded { limit } } else { glu::Gate::Swiglu };
    spec.moe_where(|i| {
        let (activation, shared_activation) = (within(limits[i]), Some(within(shared[i])));
        (i >= dense).then_some(MoeSpec { activation, shared_activation, ..moe })
    });
    let decay = bounded(l)?;
    let mixes = keys.count("hyper_connection.sinkhorn_iterations", 1 << 10)?;
    let streams = streamed::spec(l, &spec, mixes, 2.0)?;
    let attention =
        |l: &mut Loader<'_>, i: usize| mixer(l, &spec, i, (decay, Some(ADDED)), |_, sizes| sizes.scaled = false);
    streamed::load(l, (&spec, streams, false), attention, |l, i| {
        let own = Spec { activation: Activation::Gated(within(shared[i])), ..spec.clone() };
        FeedForward::load(l, &own, i)
    })
}

/// Layers choose among pools of keys; as long as there are no more than they choose, they see all.
fn chooses_all(l: &Loader<'_>) -> Result<(), Error> {
    let (most, context) = (l.keys.count("attention.indexer.top_k", 1 << 24)?, l.room.context);
    if context <= most {
        return Ok(());
    }
    let what = format!("a context of {context} tokens, of which layers choose {most} by pools of keys");
    Err(Error::NotSupported { what: format!("{what} (--ctx-size {most} or less runs)") })
}
