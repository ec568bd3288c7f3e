//! Kimi Linear and what is built like it, Ling 3: delta nets with a decay for each key, and in some layers latent attention.

use kiln_kernels::glu;
use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::Gate;

use super::experts::keyed;
use super::{Architecture, latent};
use crate::Error;
use crate::blocks::attend::ResultGate;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::delta_net::{KimiDecay, KimiDelta, KimiSpec};
use crate::blocks::draft_head::Handed;
use crate::blocks::latent::{Latent, LatentSpec};
use crate::blocks::mixer::Mixer;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, sections};

type Loaded = Result<Box<dyn Architecture>, Error>;

/// A delta net where a file counts no heads of keys and values for a layer, else latent attention with what `change` makes of its sizes.
pub(super) fn mixer(
    l: &mut Loader<'_>,
    spec: &Spec,
    i: usize,
    (decay, added): (KimiDecay, Option<f32>),
    change: impl Fn(&Loader<'_>, &mut LatentSpec),
) -> Result<Box<dyn Mixer>, Error> {
    if spec.sizes.kv_heads[i] > 0 {
        let mut sizes = latent::sizes(l, spec, i, "")?;
        change(l, &mut sizes);
        return Ok(Box::new(Latent::load(l, &sizes, i)?));
    }
    // Layers without attention may count no heads at all.
    let heads = spec.sizes.heads.iter().copied().max().unwrap_or(0);
    let delta = KimiSpec { hidden: spec.sizes.hidden, heads, eps: spec.eps, added, decay };
    Ok(Box::new(KimiDelta::load(l, &delta, i)?))
}

/// Decays with the bound of the file, which holds the negative factor, or without one.
pub(super) fn bounded(l: &Loader<'_>) -> Result<KimiDecay, Error> {
    Ok(match bound(l)? {
        Some(bound) => KimiDecay::Bounded { bound, negated: true },
        None => KimiDecay::Softplus,
    })
}

/// The bound of decays, below 0, where the file has one.
fn bound(l: &Loader<'_>) -> Result<Option<f32>, Error> {
    let bound = l.keys.float("kda.gate_lower_bound", 0.0, [-1e4, 0.0])?;
    Ok((bound < 0.0).then_some(bound))
}

/// Kimi Linear: no positions anywhere.
pub(super) fn load(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::plain(l, NormKind::Rms)?;
    spec.head = Head::Own;
    spec.ffn_bias = false;
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    spec.moe = Some(MoeSpec { shares: MoeSpec::of_sum(), ..moe });
    Decoder::load_with(l, spec, |l, spec, i| mixer(l, spec, i, (KimiDecay::Softplus, None), |_, _| ()))
}

/// Ling 3: decays have a bound, keys are turned, a gate for each head, and bounds inside experts.
pub(super) fn ling3(l: &mut Loader<'_>) -> Loaded {
    let keys = l.keys;
    // Files for several positions pair elements the other way, also for text.
    let style = if sections(l)?.is_some() { RopeStyle::Neox } else { RopeStyle::Normal };
    let spec = Spec::rotary(l, NormKind::Rms, style, Factors::Unused)?;
    let mut spec = spec.with_sections(l, RopeStyle::Mrope)?;
    spec.head = Head::Own;
    spec.ffn_bias = false;
    let safe = keys.flag("kda.safe_gate", true)?;
    keys.require(safe, "kda.safe_gate", 0, "true: nothing is known of decays without a bound in this architecture")?;
    let Some(bound) = bound(l)? else {
        return Err(Error::NotSupported {
            what: format!("{} that is missing or 0", keys.name("kda.gate_lower_bound")),
        });
    };
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    let shared = keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?;
    let shared = shared.or(moe.shared).unwrap_or(moe.width);
    let layers = spec.sizes.layers;
    let [chosen, all] = ["swiglu_clamp_exp", "swiglu_clamp_shexp"].map(|key| keys.floats(key, layers, [0.0, 1e6]));
    let (chosen, all, dense) = (chosen?, all?, spec.dense_layers);
    if let Some(i) = (0..dense).find(|i| all[*i] > 1e-6) {
        let what = format!("{} of layer {i}, which has no experts", keys.name("swiglu_clamp_shexp"));
        return Err(Error::NotSupported { what });
    }
    let limited = |limit: f32| if limit > 1e-6 { glu::Gate::SwigluLimited { limit } } else { glu::Gate::Swiglu };
    spec.moe_where(|i| {
        let (activation, shared_activation) = (limited(chosen[i]), Some(limited(all[i])));
        (i >= dense).then_some(MoeSpec { activation, shared_activation, shared: Some(shared), ..moe })
    });
    let decay = KimiDecay::Bounded { bound, negated: false };
    let change = |sizes: &mut LatentSpec| (sizes.gate, sizes.scaled) = (ResultGate::Sigmoid, false);
    if spec.sizes.draft.is_some() {
        // The head has latent attention, whatever the layers have.
        let mut sizes = latent::sizes(l, &spec, layers - 1, "")?;
        change(&mut sizes);
        spec.latent = vec![sizes; layers + 1];
        spec.drafts = Some(Handed::Normed);
    }
    Decoder::load_with(l, spec, |l, spec, i| mixer(l, spec, i, (decay, None), |_, sizes| change(sizes)))
}
