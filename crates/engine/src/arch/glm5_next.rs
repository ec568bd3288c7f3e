//! GLM 5 Next: delta nets and latent attention without positions around residual streams that are mixed; gate and up of feed-forward layers are
//! bounded.

use kiln_kernels::choose_keys::Rule;
use kiln_kernels::glu;
use kiln_kernels::topk_moe::Gate;

use super::experts::keyed;
use super::kimi::{bounded, mixer};
use super::latent::choosing_layers;
use super::{Architecture, streamed};
use crate::Error;
use crate::blocks::decoder::{FeedForward, Spec};
use crate::blocks::indexer::IndexSpec;
use crate::blocks::latent::Sees;
use crate::blocks::mlp::Activation;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::model::Loader;

/// Added to the squares of queries and keys of delta nets.
const ADDED: f32 = 1e-6;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let keys = l.keys;
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
    let choices = choices(l, &spec)?;
    let attention = |l: &mut Loader<'_>, i: usize| {
        mixer(l, &spec, i, (decay, Some(ADDED)), |_, sizes| {
            (sizes.scaled, sizes.sees) = (false, choices[i].clone());
        })
    };
    streamed::load(l, (&spec, streams, false), attention, |l, i| {
        let own = Spec { activation: Activation::Gated(within(shared[i])), ..spec.clone() };
        FeedForward::load(l, &own, i)
    })
}

/// Layers with attention choose among pools of keys, or see what the one before them chose, where contexts may have more keys than they choose.
fn choices(l: &Loader<'_>, spec: &Spec) -> Result<Vec<Sees>, Error> {
    let keys = l.keys;
    let (layers, context) = (spec.sizes.layers, spec.sizes.context);
    let most = keys.count("attention.indexer.top_k", 1 << 24)?;
    // By the model's own context, not by the one that is served: every part of the engine must see the same slots.
    if context <= most {
        return Ok(vec![Sees::All; layers]);
    }
    let count = |name: &str, most: usize| keys.count(&format!("attention.indexer.{name}"), most);
    let (heads, width, per_key) = (count("head_count", 4096)?, count("key_length", 4096)?, count("kpool", most)?);
    let tail = per_key > 1 && keys.flag("attention.indexer.kpool_select_tail", true)?;
    let rule = Rule { per_key, block: 1, most: (most / per_key).max(1), near: 0, tail };
    let eps = keys.eps("attention.layer_norm_epsilon")?;
    let own = choosing_layers(l, layers, context)?;
    let attends = |i: &usize| spec.sizes.kv_heads[*i] > 0;
    let begins = (0..layers).find(attends).is_none_or(|i| own[i]);
    let want = "1 for the first layer with attention, which has none before it to choose for it";
    keys.require(begins, "attention.indexer.types", 0, want)?;
    let index = IndexSpec { heads, width, rule, rope: None, offset: 0, eps };
    Ok((0..layers).map(|i| if own[i] { Sees::Chosen(index.clone()) } else { Sees::AsBefore }).collect())
}
