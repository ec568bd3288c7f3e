//! K2 Horizon: norms over slices of the width, a gate on attention, and experts for the feed-forward layer and for values.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::Gate;

use super::Architecture;
use super::experts::keyed;
use crate::Error;
use crate::blocks::attend::ResultGate;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::moe::{MoeSpec, ValueSpec};
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::Factors;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let keys = l.keys;
    let slices = keys.count_opt("attention.group_norm_groups", 1 << 12)?.unwrap_or(1);
    let spec = Spec::rotary(l, NormKind::RmsSlices(slices), RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::RmsEachMaybe).with_result_gate(ResultGate::Log2);
    spec.read_betas(l, 32.0)?;
    let hidden = spec.sizes.hidden;
    let fits = hidden.is_multiple_of(slices);
    keys.require(fits, "attention.group_norm_groups", slices, &format!("a divisor of the width {hidden}"))?;
    spec.each_attention(|_, attention| (attention.bias, attention.output_bias) = (false, false));
    spec.ffn_bias = false;
    if MoeSpec::counts(l)?.is_some() {
        experts(l, &mut spec)?;
    }
    Decoder::load(l, spec)
}

fn experts(l: &mut Loader<'_>, spec: &mut Spec) -> Result<(), Error> {
    let (keys, layers) = (l.keys, spec.sizes.layers);
    let widths = keys.per_layer("expert_feed_forward_length", layers, [1, 1 << 20])?;
    let moe = keyed(l, spec, Gate::Sigmoid)?;
    let widths = widths.unwrap_or_else(|| vec![moe.width; layers]);
    let shared = keys.count_opt("expert_shared_count", 1 << 10)?;
    let given = keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?;
    let dense = spec.dense_layers;
    spec.moe_where(|i| {
        let shared = shared.map(|n| given.unwrap_or(n * widths[i]));
        (i >= dense).then_some(MoeSpec { width: widths[i], shared, ..moe })
    });
    let Some(count) = keys.count_opt("attention.value_expert_count", 1 << 12)? else { return Ok(()) };
    let used = keys.count("attention.value_expert_used_count", count)?;
    let MoeSpec { gating, shares, scale, .. } = moe;
    let values = ValueSpec { experts: count, used, gating, shares, scale };
    spec.each_attention(|i, attention| {
        l.layer(i);
        attention.values = l.has("attn_v_exps.weight").then_some(values);
    });
    Ok(())
}
