//! Llama with one or two changes: which elements form a rotary pair, what stands in the feed-forward layer, which norm.

use kiln_kernels::glu::Gate;
use kiln_kernels::rope::{RopeParams, RopeStyle};
use kiln_kernels::unary::Function;

use super::Architecture;
use crate::Error;
use crate::blocks::attend::ResultGate;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Layout, Spec};
use crate::blocks::mlp::{Activation, Scaled};
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, Period, Rope, window_base, windows, windows_opt};

type Loaded = Result<Box<dyn Architecture>, Error>;

/// Pairs of neighbours: InternLM 2, XVERSE, Ernie 4.5.
pub(super) fn normal(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    Decoder::load(l, spec)
}

/// Ernie 4.5: files may hold a bias of attention's output, which does not count.
pub(super) fn ernie(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    spec.each_attention(|_, attention| attention.output_bias = false);
    Decoder::load(l, spec)
}

/// EXAONE: pairs half a head apart, with divisors of the frequencies.
pub(super) fn exaone(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Usual)?;
    Decoder::load(l, spec)
}

/// EXAONE 4: norms after each half of a layer and of each head; in the large model, heads are turned in layers with a window alone.
pub(super) fn exaone4(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Usual)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms);
    spec.layout = Layout::Post;
    if spec.sizes.layers == 64 {
        let window = l.keys.count_opt("attention.sliding_window", 1 << 24)?.unwrap_or(4096);
        let windows = windows(l, 64, window, 4)?;
        spec.each_attention(|i, attention| {
            attention.window = windows[i];
            attention.rope = attention.rope.take().filter(|_| windows[i].is_some());
        });
    }
    Decoder::load(l, spec)
}

/// SmolLM 3: heads are not turned in every fourth layer.
pub(super) fn smollm3(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    spec.each_attention(|i, attention| attention.rope = attention.rope.take().filter(|_| (i + 1) % 4 != 0));
    Decoder::load(l, spec)
}

/// Seed-OSS: the norm before the feed-forward layer has another name.
pub(super) fn seed_oss(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    spec.ffn_norm = "post_attention_norm";
    Decoder::load(l, spec)
}

/// Arcee: squares in the place of the gate.
pub(super) fn arcee(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Usual)?;
    spec.activation = Activation::Plain(Function::Relu2);
    Decoder::load(l, spec)
}

/// Nemotron and Jais 2: layer norms, and squares in the place of the gate.
pub(super) fn nemotron(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Layer, RopeStyle::Neox, Factors::Unused)?;
    spec.activation = Activation::Plain(Function::Relu2);
    Decoder::load(l, spec)
}

/// Orion: layer norms.
pub(super) fn orion(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Layer, RopeStyle::Neox, Factors::Unused)?;
    spec.head = Head::Own;
    Decoder::load(l, spec)
}

/// PLaMo: both halves of a layer side by side.
pub(super) fn plamo(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    spec.layout = Layout::Parallel;
    spec.head = Head::Own;
    Decoder::load(l, spec)
}

/// Baichuan: 32 layers turn heads, 40 lean scores by distance.
pub(super) fn baichuan(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    spec.head = Head::Own;
    let layers = spec.sizes.layers;
    spec.each_attention(|_, attention| {
        attention.rope = attention.rope.take().filter(|_| layers == 32);
        attention.max_bias = if layers == 40 { 8.0 } else { 0.0 };
    });
    Decoder::load(l, spec)
}

/// Refact: scores lean by distance.
pub(super) fn refact(l: &mut Loader<'_>) -> Loaded {
    if MoeSpec::counts(l)?.is_some() {
        return Err(Error::NotSupported {
            what: "refact with experts (expert_count), of which no model is known".to_owned(),
        });
    }
    let mut spec = Spec::plain(l, NormKind::Rms)?;
    spec.ffn_bias = false;
    spec.each_attention(|_, attention| (attention.max_bias, attention.output_bias) = (8.0, false));
    Decoder::load(l, spec)
}

/// Qwen 1: the width that files say is twice the real one.
pub(super) fn qwen(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    spec.sizes.feed_forward.iter_mut().for_each(|width| *width /= 2);
    spec.head = Head::Own;
    Decoder::load(l, spec)
}

/// Hunyuan: heads are normed after they are turned; pairs lie half a head apart.
pub(super) fn hunyuan(l: &mut Loader<'_>) -> Loaded {
    let spec = hunyuan_spec(l)?;
    Decoder::load(l, spec)
}

fn hunyuan_spec(l: &mut Loader<'_>) -> Result<Spec, Error> {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms);
    let d = spec.sizes.head_dim as f32;
    let alpha = l.keys.factor("rope.scaling.alpha")?;
    spec.each_attention(|_, attention| {
        attention.norm_after_rope = true;
        if let (Some(alpha), Some(rope)) = (alpha, attention.rope.as_mut()) {
            rope.params.freq_base *= alpha.powf(d / (d - 2.0));
        }
    });
    Ok(spec)
}

/// Maincoder: heads are normed after they are turned; pairs are neighbours.
pub(super) fn maincoder(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms);
    spec.each_attention(|_, attention| attention.norm_after_rope = true);
    Decoder::load(l, spec)
}

/// OpenELM: numbers of heads and widths by layer, norms of each head.
pub(super) fn openelm(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms);
    spec.head = Head::Embedding;
    spec.each_attention(|_, attention| attention.scaled = false);
    Decoder::load(l, spec)
}

/// Jais 1: scores lean by distance and are divided by the width of a head.
pub(super) fn jais(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::plain(l, NormKind::Layer)?;
    spec.head = Head::Own;
    let max_bias = l.keys.float("attention.max_alibi_bias", 0.0, [0.0, 1e3])?;
    let scale = 1.0 / spec.sizes.head_dim as f32;
    spec.each_attention(|_, attention| (attention.max_bias, attention.scale) = (max_bias, scale));
    Decoder::load(l, spec)
}

/// Nemotron of puzzles (DeciLM): layers may lack attention, have a matrix in its place, or do nothing at all.
pub(super) fn deci(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Usual)?;
    spec.may_lack_attention = true;
    Decoder::load(l, spec)
}

/// PLaMo 3: norms before and after each half of a layer and of each head, layers with a window.
pub(super) fn plamo3(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?.with_head_norm(HeadNorm::Rms);
    let windows = windows_opt(l, spec.sizes.layers, Period::Last(8))?;
    let base = window_base(l, 10000.0)?;
    let mut spec = spec.with_windows(&windows, |rope| rope.unscaled(base));
    spec.layout = Layout::Sandwich;
    spec.activation = Activation::GatedFused(Gate::Swiglu);
    spec.each_attention(|_, attention| attention.scaled = false);
    Decoder::load(l, spec)
}

/// Hunyuan with images, and its text: pairs follow several positions.
pub(super) fn hunyuan_vl(l: &mut Loader<'_>) -> Loaded {
    let spec = hunyuan_spec(l)?.with_sections(l, RopeStyle::Mrope)?;
    Decoder::load(l, spec)
}

/// PaddleOCR: Ernie 4.5 whose pairs follow several positions.
pub(super) fn paddleocr(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let spec = spec.with_sections(l, RopeStyle::Mrope)?;
    Decoder::load(l, spec)
}

/// CogVLM, its text: positions are the plain ones, whatever the file says.
pub(super) fn cogvlm(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let params = RopeParams::plain(RopeStyle::Neox, spec.sizes.head_dim, 10000.0);
    spec.each_attention(|_, attention| {
        attention.rope = Some(Rope::plain(params));
        attention.scaled = false;
    });
    Decoder::load(l, spec)
}

/// Spark: a gate for each head, layers with a window.
pub(super) fn spark(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let window = l.keys.count("attention.sliding_window", 1 << 24)?;
    let windows = windows(l, spec.sizes.layers, window, 1)?;
    let base = l.keys.float("rope.freq_base", 10000.0, [1.0, 1e12])?;
    let base = window_base(l, base)?;
    let spec = spec.with_windows(&windows, |rope| rope.with_base(base));
    let mut spec = spec.with_result_gate(ResultGate::Sigmoid);
    spec.activation = Activation::Gated(Gate::Geglu);
    Decoder::load(l, spec)
}

/// Muse Glimmer: embeddings are normed, heads turned in layers with a window alone, attention gated, logits capped.
pub(super) fn muse_glimmer(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?.with_head_norm(HeadNorm::Rms);
    let window = l.keys.count("attention.sliding_window", 1 << 24)?;
    let windows = windows(l, spec.sizes.layers, window, 4)?;
    let base = l.keys.float("rope.freq_base", 10000.0, [1.0, 1e12])?;
    let base = window_base(l, base)?;
    let spec = spec.with_windows(&windows, |rope| rope.unscaled(base));
    let mut spec = spec.with_result_gate(ResultGate::Sigmoid);
    spec.turned_where(|i| windows[i].is_some());
    (spec.layout, spec.post_eps) = (Layout::Sandwich, Some(1e-8));
    (spec.head, spec.embedding_rms) = (Head::Own, true);
    spec.logit_scale = l.keys.factor("logit_scale")?.unwrap_or(1.0);
    spec.logit_softcap = l.keys.float("final_logit_softcapping", 30.0, [0.0, 1e6])?;
    Decoder::load(l, spec)
}

/// Nanbeige: all layers are run several times.
pub(super) fn nanbeige(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Usual)?;
    spec.scaled = Scaled::All;
    spec.loops = l.keys.count_opt("num_loops", 64)?.unwrap_or(1);
    spec.loop_norm = !l.keys.flag("skip_loop_final_norm", false)?;
    Decoder::load(l, spec)
}

/// Talkie: norms without weights, a factor for each head of queries, and the embeddings once more after every layer.
pub(super) fn talkie(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::BareRms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::RmsFactor);
    spec.each_attention(|_, attention| attention.norm_after_rope = true);
    (spec.embedding_rms, spec.embedding_skip) = (true, true);
    (spec.head, spec.scaled) = (Head::Own, Scaled::Down);
    spec.logit_scale = l.keys.factor("logit_scale")?.unwrap_or(1.0);
    Decoder::load(l, spec)
}

/// Pocket TTS, its language model: layer norms, no gate.
pub(super) fn pocket_tts(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Layer, RopeStyle::Normal, Factors::Unused)?;
    spec.activation = Activation::Plain(Function::Gelu);
    spec.head = Head::Embedding;
    Decoder::load(l, spec)
}

/// BitNet: norms before the last matrix of each half of a layer, factors of all matrices.
pub(super) fn bitnet(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    (spec.head, spec.scaled, spec.inner_norms) = (Head::Embedding, Scaled::All, true);
    let eps = spec.eps;
    spec.each_attention(|_, attention| attention.inner_norm = Some(eps));
    Decoder::load(l, spec)
}
