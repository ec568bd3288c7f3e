//! Kimi Linear: delta nets with a decay for each key, and in some layers latent attention without positions.

use kiln_kernels::topk_moe::Gate;

use super::experts::keyed;
use super::{Architecture, latent};
use crate::Error;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::delta_net::{KimiDecay, KimiDelta, KimiSpec};
use crate::blocks::latent::Latent;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = Spec::plain(l, NormKind::Rms)?;
    spec.head = Head::Own;
    spec.ffn_bias = false;
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    spec.moe = Some(MoeSpec { shares: MoeSpec::of_sum(), ..moe });
    // Layers without attention may count no heads at all.
    let heads = spec.sizes.heads.iter().copied().max().unwrap_or(0);
    let delta = KimiSpec { hidden: spec.sizes.hidden, heads, eps: spec.eps, decay: KimiDecay::Softplus };
    Decoder::load_with(l, spec, |l, spec, i| match spec.sizes.kv_heads[i] {
        0 => Ok(Box::new(KimiDelta::load(l, &delta, i)?)),
        _ => {
            let sizes = latent::sizes(l, spec, i, "")?;
            Ok(Box::new(Latent::load(l, &sizes, i)?))
        }
    })
}
