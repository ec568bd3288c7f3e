//! Decoders with many small experts: the first layers have none, experts that all tokens share stand beside the chosen ones,
//! and the file says how the router weighs them.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::{Gate, Shares};

use super::Architecture;
use crate::Error;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, windows};

type Loaded = Result<Box<dyn Architecture>, Error>;

/// Experts as the keys describe them; `default` is the router's function where the file does not say it.
fn keyed(l: &Loader<'_>, spec: &mut Spec, default: Gate) -> Result<MoeSpec, Error> {
    let keys = l.keys;
    let counts = MoeSpec::required_counts(l)?;
    let width = keys.count("expert_feed_forward_length", 1 << 20)?;
    spec.dense_layers = keys.count_opt("leading_dense_block_count", spec.sizes.layers)?.unwrap_or(0);
    let shared = keys.count_opt("expert_shared_count", 1 << 10)?.map(|n| n * width);
    let gating = match keys.count_opt("expert_gating_func", 4)? {
        None => default,
        Some(1) => Gate::Softmax,
        Some(2) => Gate::Sigmoid,
        Some(4) => Gate::SqrtSoftplus,
        Some(other) => {
            keys.require(false, "expert_gating_func", other, "1, 2 or 4")?;
            default
        }
    };
    let shares = if keys.flag("expert_weights_norm", false)? { MoeSpec::of_sum() } else { Shares::Gates };
    let scale = keys.factor("expert_weights_scale")?.unwrap_or(1.0);
    Ok(MoeSpec { gating, shares, scale, shared, ..MoeSpec::usual(spec.sizes.hidden, width, counts) })
}

/// DeepSeek 1.
pub(super) fn deepseek(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    let moe = keyed(l, &mut spec, Gate::Softmax)?;
    spec.moe = Some(MoeSpec { gating: Gate::Softmax, shares: Shares::Gates, ..moe });
    Decoder::load(l, spec)
}

/// dots.llm1: norms of each head.
pub(super) fn dots1(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms);
    spec.head = Head::Own;
    spec.moe = Some(keyed(l, &mut spec, Gate::Identity)?);
    Decoder::load(l, spec)
}

/// Ling and Ring 2: norms of each head.
pub(super) fn bailing2(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms);
    spec.head = Head::Own;
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    let shared = l.keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?;
    let shared = shared.and_then(|width| Some(width * (moe.shared? / moe.width))).or(moe.shared);
    spec.moe = Some(MoeSpec { shared, ..moe });
    Decoder::load(l, spec)
}

/// GLM 4.5: partly turned heads; the norm before the feed-forward layer has another name.
pub(super) fn glm4(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_sections(l, RopeStyle::Mrope)?.with_head_norm(HeadNorm::RmsMaybe);
    spec.ffn_norm = "post_attention_norm";
    spec.moe = Some(keyed(l, &mut spec, Gate::Sigmoid)?);
    Decoder::load(l, spec)
}

/// Ernie 4.5 with experts.
pub(super) fn ernie(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    spec.each_attention(|_, attention| attention.output_bias = false);
    let moe = keyed(l, &mut spec, Gate::Softmax)?;
    let shared = l.keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?;
    spec.moe = Some(MoeSpec { gating: Gate::Softmax, shares: MoeSpec::of_sum(), scale: 1.0, shared, ..moe });
    Decoder::load(l, spec)
}

/// Hunyuan with experts: heads are normed after they are turned.
pub(super) fn hunyuan(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms);
    spec.each_attention(|_, attention| attention.norm_after_rope = true);
    let counts = MoeSpec::required_counts(l)?;
    let width = spec.sizes.feed_forward[0];
    let shared = l.keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?.or(Some(width));
    spec.moe = Some(MoeSpec { shared, ..MoeSpec::usual(spec.sizes.hidden, width, counts) });
    Decoder::load(l, spec)
}

/// MiniMax M2: norms over all heads, partly turned.
pub(super) fn minimax2(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::WholeRms);
    spec.head = Head::Own;
    let moe = keyed(l, &mut spec, Gate::Identity)?;
    spec.dense_layers = 0;
    let width = spec.sizes.feed_forward[0];
    spec.moe = Some(MoeSpec { width, shares: MoeSpec::of_sum(), scale: 1.0, shared: None, ..moe });
    Decoder::load(l, spec)
}

/// EXAONE with experts: heads are turned in layers with a window alone.
pub(super) fn exaone(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Usual)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms);
    spec.head = Head::Own;
    let window = l.keys.count("attention.sliding_window", 1 << 24)?;
    let windows = windows(l, spec.sizes.layers, window, 4)?;
    spec.each_attention(|i, attention| {
        attention.window = windows[i];
        attention.rope = attention.rope.take().filter(|_| windows[i].is_some());
    });
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    let shared = l.keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?.or(Some(moe.width));
    spec.moe = Some(MoeSpec { shared, ..moe });
    Decoder::load(l, spec)
}
