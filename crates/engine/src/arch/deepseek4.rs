//! DeepSeek 4: attention over the last tokens and over blocks of all others, around residual streams that are mixed. The experts of the first
//! layers are looked up by token.

use kiln_kernels::glu;
use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::Gate;

use super::experts::keyed;
use super::{Architecture, streamed};
use crate::Error;
use crate::blocks::compressed::{Compressed, CompressedSpec, IndexSizes, LONG, SHORT};
use crate::blocks::decoder::{FeedForward, Spec};
use crate::blocks::mixer::Mixer;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::{Factors, Rope};

/// The router's function, as files number it.
const SQRT_SOFTPLUS: usize = 4;
/// Largest base of frequencies.
const MOST_BASE: f32 = 1e12;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let keys = l.keys;
    let mut spec = Spec::plain(l, NormKind::Rms)?;
    spec.ffn_bias = false;
    let layers = spec.sizes.layers;
    let gating = keys.count("expert_gating_func", 1 << 8)?;
    keys.require(gating == SQRT_SOFTPLUS, "expert_gating_func", gating, "4, the root of a softplus")?;
    let moe = keyed(l, &mut spec, Gate::SqrtSoftplus)?;
    let limits = keys.required_floats("swiglu_clamp_exp", layers, [0.0, 1e6])?;
    let shared = match keys.is_array("swiglu_clamp_shexp") {
        true => keys.floats("swiglu_clamp_shexp", layers, [0.0, 1e6])?,
        false => limits.clone(),
    };
    let hashed = keys.count_opt("hash_layer_count", layers)?.unwrap_or(0);
    let (vocab, within) = (spec.sizes.vocab, |limit: f32| match limit > 1e-6 {
        true => glu::Gate::SwigluBounded { limit },
        false => glu::Gate::Swiglu,
    });
    spec.dense_layers = 0;
    spec.moe_where(|i| {
        // Pictures have a choice of their own.
        l.layer(i);
        l.ignore("exp_probs_b_vl.bias");
        let (activation, shared_activation) = (within(limits[i]), Some(within(shared[i])));
        Some(MoeSpec { activation, shared_activation, by_token: (i < hashed).then_some(vocab), ..moe })
    });
    let attention = attention(l, &spec)?;
    let mixes = keys.count("hyper_connection.sinkhorn_iterations", 1 << 10)?;
    let streams = streamed::spec(l, &spec, mixes, 2.0)?;
    let mixer = |l: &mut Loader<'_>, i: usize| -> Result<Box<dyn Mixer>, Error> {
        Ok(Box::new(Compressed::load(l, &attention[i], i)?))
    };
    streamed::load(l, (&spec, streams, true), mixer, |l, i| FeedForward::load(l, &spec, i))
}

/// Attention of each layer.
fn attention(l: &mut Loader<'_>, spec: &Spec) -> Result<Vec<CompressedSpec>, Error> {
    let keys = l.keys;
    let (sizes, layers) = (&spec.sizes, spec.sizes.layers);
    let head_dim = sizes.head_dim;
    keys.require(
        sizes.value_dim == head_dim,
        "attention.value_length",
        sizes.value_dim,
        &format!("{head_dim}, as keys"),
    )?;
    let ratios = keys.list("attention.compress_ratios", 1 << 12)?;
    keys.require(
        ratios.len() >= layers,
        "attention.compress_ratios",
        ratios.len(),
        &format!("one for each of {layers} layers"),
    )?;
    let rope = Rope::read(l, sizes, RopeStyle::Normal, Factors::Unused)?;
    let plain = rope.unscaled(rope.params.freq_base);
    let mut stretched = rope.clone();
    stretched.params.freq_base = keys.float("attention.compress_rope_freq_base", 10000.0, [1.0, MOST_BASE])?;
    // The heads of these models do not grow where YaRN stretches them.
    stretched.params.attn_factor /= stretched.params.magnitude();
    let count = |key: &str, most: usize| keys.count(&format!("attention.{key}"), most);
    let [groups, rank] = [count("output_group_count", 1 << 10)?, count("output_lora_rank", 1 << 16)?];
    let index = IndexSizes {
        heads: count("indexer.head_count", 4096)?,
        width: count("indexer.key_length", 4096)?,
        most: count("indexer.top_k", 1 << 24)?,
    };
    let (query_rank, window) = (count("q_lora_rank", 1 << 16)?, count("sliding_window", 1 << 24)?);
    let of_layer = |i: usize| {
        let known = [0, SHORT, LONG].contains(&ratios[i]);
        keys.require(known, "attention.compress_ratios", ratios[i], &format!("0, {SHORT} or {LONG}"))?;
        let (heads, block) = (sizes.heads[i], Some(ratios[i]).filter(|n| *n > 0));
        keys.require(sizes.kv_heads[i] == 1, "attention.head_count_kv", sizes.kv_heads[i], "1")?;
        let fits = heads.is_multiple_of(groups);
        keys.require(fits, "attention.output_group_count", groups, &format!("a divisor of the {heads} heads"))?;
        let rope = if block.is_some() { stretched.clone() } else { plain.clone() };
        let hidden = sizes.hidden;
        Ok(CompressedSpec {
            hidden,
            heads,
            head_dim,
            query_rank,
            window,
            block,
            rope,
            index,
            groups: [groups, rank],
            eps: spec.eps,
        })
    };
    (0..layers).map(of_layer).collect()
}
