//! Decoders with many small experts: the first layers have none, experts that all tokens share stand beside the chosen ones,
//! and the file says how the router weighs them.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::{Gate, Shares};

use super::Architecture;
use crate::Error;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Place, Spec};
use crate::blocks::draft_head::Handed;
use crate::blocks::mlp::Scaled;
use crate::blocks::moe::{Chunks, MoeSpec};
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, expert_width};

type Loaded = Result<Box<dyn Architecture>, Error>;

/// The base of the frequencies of DeepSeek OCR.
const OCR_BASE: f32 = 10000.0;

/// Experts as the keys describe them; `default` is the router's function where the file does not say it.
pub(super) fn keyed(l: &Loader<'_>, spec: &mut Spec, default: Gate) -> Result<MoeSpec, Error> {
    let keys = l.keys;
    let counts = MoeSpec::required_counts(l)?;
    let width = expert_width(l, &spec.sizes, counts)?;
    spec.dense_layers = keys.count_opt("leading_dense_block_count", spec.sizes.layers)?.unwrap_or(0);
    let shared = keys.count_opt("expert_shared_count", 1 << 10)?.map(|n| n * width);
    let gating = gating(l, default)?;
    let shares = if keys.flag("expert_weights_norm", false)? { MoeSpec::of_sum() } else { Shares::Gates };
    let scale = keys.factor("expert_weights_scale")?.unwrap_or(1.0);
    Ok(MoeSpec { gating, shares, scale, shared, ..MoeSpec::usual(spec.sizes.hidden, width, counts) })
}

/// The router's function, `default` where the file does not say it.
pub(super) fn gating(l: &Loader<'_>, default: Gate) -> Result<Gate, Error> {
    Ok(match l.keys.count_opt("expert_gating_func", 4)? {
        None => default,
        Some(1) => Gate::Softmax,
        Some(2) => Gate::Sigmoid,
        Some(4) => Gate::SqrtSoftplus,
        Some(other) => {
            l.keys.require(false, "expert_gating_func", other, "1, 2 or 4")?;
            default
        }
    })
}

/// Experts in those layers alone whose tensors the file has. A feed-forward layer beside them is not run.
pub(super) fn by_tensor(l: &mut Loader<'_>, spec: &mut Spec, moe: MoeSpec) {
    spec.moe_where(|i| {
        l.layer(i);
        let has = l.has("ffn_gate_inp.weight");
        for part in ["gate", "up", "down"].iter().filter(|_| has) {
            ["weight", "scale", "bias"].iter().for_each(|end| l.ignore(&format!("ffn_{part}.{end}")));
        }
        has.then_some(moe)
    });
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

/// Ling 1: heads are as wide as what is turned of them.
pub(super) fn bailing(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    spec.head = Head::Own;
    spec.each_attention(|_, attention| {
        let width = attention.rope.as_ref().map_or(attention.head_dim, |rope| rope.params.n_dims);
        (attention.head_dim, attention.value_dim) = (width, width);
        attention.scale = 1.0 / (width as f32).sqrt();
    });
    let moe = keyed(l, &mut spec, Gate::Softmax)?;
    spec.dense_layers = 0;
    spec.moe = Some(MoeSpec { gating: Gate::Softmax, ..moe });
    Decoder::load(l, spec)
}

/// Hunyuan 3: experts where the file has them, factors of all matrices.
pub(super) fn hunyuan3(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms);
    spec.scaled = Scaled::All;
    spec.drafts = Some(Handed::Normed);
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    let shared = l.keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?.or(Some(moe.width));
    by_tensor(l, &mut spec, MoeSpec { shared, scaled: true, ..moe });
    Decoder::load(l, spec)
}

/// DBRX: layer norms, bounded queries, keys and values.
pub(super) fn dbrx(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::LayerWeight, RopeStyle::Neox, Factors::Unused)?;
    (spec.head, spec.ffn_norm) = (Head::Own, "attn_output_norm");
    let clamp = l.keys.factor("attention.clamp_kqv")?;
    spec.each_attention(|_, attention| attention.clamp = clamp);
    let counts = MoeSpec::required_counts(l)?;
    spec.moe = Some(MoeSpec::usual(spec.sizes.hidden, spec.sizes.feed_forward[0], counts));
    Decoder::load(l, spec)
}

/// Arctic: experts beside the feed-forward layer, which read what enters the layer.
pub(super) fn arctic(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    let counts = MoeSpec::required_counts(l)?;
    let hidden = spec.sizes.hidden;
    spec.moe = Some(MoeSpec::usual(hidden, spec.sizes.feed_forward[0], counts));
    // The feed-forward layer itself is as wide as the stream.
    spec.sizes.feed_forward.fill(hidden);
    spec.experts = Place::BesideFromInput;
    Decoder::load(l, spec)
}

/// GroveMoE: a second choice among smaller experts.
pub(super) fn grove(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms);
    let counts = MoeSpec::required_counts(l)?;
    let width = expert_width(l, &spec.sizes, counts)?;
    let group = l.keys.count("experts_per_group", counts[0])?;
    let fits = counts[0].is_multiple_of(group);
    l.keys.require(fits, "experts_per_group", group, &format!("a divisor of the {} experts", counts[0]))?;
    let chunk = l.keys.count_opt("expert_chunk_feed_forward_length", 1 << 20)?.unwrap_or(spec.sizes.head_dim);
    let scale = l.keys.float("expert_group_scale", 1.0, [-1e6, 1e6])?;
    let chunks = Some(Chunks { width: chunk, group, scale });
    spec.moe = Some(MoeSpec { chunks, ..MoeSpec::usual(spec.sizes.hidden, width, counts) });
    Decoder::load(l, spec)
}

/// GLM 4.5: partly turned heads; the norm before the feed-forward layer has another name.
pub(super) fn glm4(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_sections(l, RopeStyle::Mrope)?.with_head_norm(HeadNorm::RmsMaybe);
    spec.ffn_norm = "post_attention_norm";
    spec.drafts = Some(Handed::Normed);
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

/// The text part of DeepSeek OCR: plain attention, always turned by the same base.
pub(super) fn deepseek_ocr(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let base = l.keys.float("rope.freq_base", OCR_BASE, [1.0, 1e12])?;
    l.keys.require(
        base == OCR_BASE,
        "rope.freq_base",
        base as usize,
        &format!("{OCR_BASE}, which the model is bound to"),
    )?;
    let width = spec.sizes.head_dim;
    l.keys.require(width.is_multiple_of(2), "attention.key_length", width, "even: all of a head is turned")?;
    spec.each_attention(|_, attention| {
        attention.rope = attention.rope.as_ref().map(|rope| rope.unscaled(OCR_BASE).with_dims(width));
        (attention.bias, attention.scaled) = (false, false);
    });
    l.keys.count("expert_shared_count", 1 << 10)?;
    spec.moe = Some(keyed(l, &mut spec, Gate::Softmax)?);
    Decoder::load(l, spec)
}
