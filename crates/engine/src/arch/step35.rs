//! Step 3.5: heads by layer with a gate each; layers that see everything turn half of what those with a window turn. Gates of feed-forward
//! layers and experts are bounded by layer.

use kiln_kernels::glu;
use kiln_kernels::rope::{RopeParams, RopeStyle};
use kiln_kernels::topk_moe::Gate;

use super::Architecture;
use super::experts::keyed;
use crate::Error;
use crate::blocks::attend::ResultGate;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::mlp::Activation;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, Rope, window_base, windows};

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let keys = l.keys;
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Usual)?;
    let mut spec = spec.with_head_norm(HeadNorm::RmsMaybe);
    spec.head = Head::Own;
    let (layers, head) = (spec.sizes.layers, spec.sizes.head_dim);
    let window = keys.count("attention.sliding_window", 1 << 24)?;
    let windows = windows(l, layers, window, 1)?;
    let turned = keys.count_opt("rope.dimension_count", head)?.unwrap_or(head);
    keys.require(
        turned.is_multiple_of(4),
        "rope.dimension_count",
        turned,
        "a multiple of 4, of which half are turned",
    )?;
    let near = keys.count_opt("rope.dimension_count_swa", head)?.unwrap_or(turned);
    keys.require(near.is_multiple_of(2), "rope.dimension_count_swa", near, "even")?;
    let near = Rope::plain(RopeParams::plain(RopeStyle::Neox, near, window_base(l, 10000.0)?));
    spec.each_attention(|i, attention| {
        l.layer(i);
        attention.window = windows[i];
        attention.gate = if l.has("attn_gate.weight") { ResultGate::Sigmoid } else { ResultGate::None };
        attention.rope = match windows[i] {
            Some(_) => Some(near.clone()),
            None => attention.rope.as_ref().map(|rope| rope.with_dims(turned / 2)),
        };
    });
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    let shared = keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?;
    let [chosen, all] = ["swiglu_clamp_exp", "swiglu_clamp_shexp"].map(|key| keys.floats(key, layers, [0.0, 1e6]));
    let (chosen, all) = (chosen?, all?);
    let limited = |limit: f32| if limit > 1e-6 { glu::Gate::SwigluLimited { limit } } else { glu::Gate::Swiglu };
    spec.activations = all.iter().map(|limit| Activation::Gated(limited(*limit))).collect();
    spec.moe_where(|i| {
        l.layer(i);
        let (activation, shared_activation) = (limited(chosen[i]), Some(limited(all[i])));
        let has = l.has("ffn_gate_inp.weight");
        has.then_some(MoeSpec { activation, shared_activation, shared: shared.or(moe.shared), ..moe })
    });
    Decoder::load(l, spec)
}
