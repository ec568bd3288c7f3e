//! Decoders with latent attention: DeepSeek 2 and 3 and what is built like them, MiniCPM 3.

use kiln_kernels::choose_keys::Rule;
use kiln_kernels::rope::{RopeParams, RopeStyle};
use kiln_kernels::topk_moe::Gate;
use kiln_kernels::unary::Function;

use super::Architecture;
use super::experts::keyed;
use crate::Error;
use crate::blocks::attend::{ResultGate, Temperature};
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::draft_head::Handed;
use crate::blocks::indexer::IndexSpec;
use crate::blocks::latent::{LatentSpec, Sees};
use crate::blocks::mlp::{Activation, Scaled};
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, Rope, window_base, windows};

type Loaded = Result<Box<dyn Architecture>, Error>;

/// The sizes of heads and latents as a file says them. Keys of layers with a window may end in `suffix`.
pub(super) fn sizes(l: &Loader<'_>, spec: &Spec, i: usize, suffix: &str) -> Result<LatentSpec, Error> {
    let keys = l.keys;
    let key = |name: &str| format!("{name}{suffix}");
    let plain = &spec.attention[i];
    // Without these keys, the others mean the heads and not the row of a cache.
    let head_dim = keys.count_opt(&key("attention.key_length_mla"), 4096)?;
    let value_dim = keys.count_opt(&key("attention.value_length_mla"), 4096)?;
    let (head_dim, value_dim) = head_dim.zip(value_dim).unwrap_or((plain.head_dim, plain.value_dim));
    Ok(LatentSpec {
        hidden: plain.hidden,
        heads: plain.heads,
        rank: keys.count(&key("attention.kv_lora_rank"), 1 << 14)?,
        query_rank: keys.count_opt("attention.q_lora_rank", 1 << 14)?,
        head_dim,
        // Without positions, no part of a key is set apart for them.
        turned: keys.count_opt("rope.dimension_count", 4096)?.unwrap_or(0),
        value_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        rope: plain.rope.clone(),
        eps: spec.eps,
        key_norm: false,
        gate: ResultGate::None,
        sinks: false,
        window: None,
        temperature: None,
        scaled: true,
        sees: Sees::All,
    })
}

/// Sizes of all layers, where they are the same kind.
pub(super) fn all(l: &Loader<'_>, spec: &Spec) -> Result<Vec<LatentSpec>, Error> {
    (0..spec.sizes.layers).map(|i| sizes(l, spec, i, "")).collect()
}

/// YaRN in DeepSeek's form: turned elements and scores have factors that depend on how far the context is stretched. `log` is
/// what the file says of it.
fn stretched(spec: &mut [LatentSpec], log: f32, deepseek2: bool) {
    let m = 10.0 * log;
    for layer in spec {
        let Some(rope) = layer.rope.as_mut() else { continue };
        let (factor, params) = (rope.stretch(), &mut rope.params);
        let mean = |m: f32| if factor > 1.0 { 1.0 + 0.1 * m * factor.ln() } else { 1.0 };
        let yarn = params.ext_factor != 0.0;
        let turned = params.attn_factor * mean(1.0);
        let turned = if yarn && m != 0.0 {
            let own = if deepseek2 && m != 1.0 { m } else { 1.0 };
            params.attn_factor * mean(own) / mean(m)
        } else {
            turned
        };
        if yarn {
            // The operation multiplies by this mean itself.
            params.attn_factor = turned / mean(1.0);
        }
        layer.scale *= (turned * mean(m)).powi(2);
    }
}

/// DeepSeek 2 and 3 with their small ones, Kimi K2, GLM 4.7 Flash; Mistral 4.
fn deepseek(l: &mut Loader<'_>, is_deepseek2: bool) -> Loaded {
    let keys = l.keys;
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    let (blocks, vocab) = (keys.count("block_count", 1024)?, spec.sizes.vocab);
    let mut latent = all(l, &spec)?;
    // Small models have no step before their queries, whatever the key says.
    if blocks == 26 || blocks == 27 || (blocks == 48 && vocab == 128_256) {
        latent.iter_mut().for_each(|layer| layer.query_rank = None);
    }
    let log = keys.float("rope.scaling.yarn_log_multiplier", 0.0, [0.0, 1e3])?;
    stretched(&mut latent, log, is_deepseek2);
    if let Some(scale) = keys.factor("attention.temperature_scale")? {
        let length = keys.count("attention.temperature_length", 1 << 24)?;
        let temperature = Some(Temperature { scale, length, offset: 0 });
        latent.iter_mut().for_each(|layer| layer.temperature = temperature);
    }
    spec.latent = latent;
    spec.drafts = Some(Handed::Normed);
    if MoeSpec::counts(l)?.is_some() {
        let sigmoid = (blocks == 47 || blocks == 48) && vocab == 154_880;
        spec.moe = Some(keyed(l, &mut spec, if sigmoid { Gate::Sigmoid } else { Gate::Softmax })?);
    }
    Decoder::load(l, spec)
}

pub(super) fn deepseek2(l: &mut Loader<'_>) -> Loaded {
    deepseek(l, true)
}

pub(super) fn mistral4(l: &mut Loader<'_>) -> Loaded {
    deepseek(l, false)
}

/// What differs between the parts of layers that choose among keys.
pub(super) struct Choosing {
    /// How their heads are turned.
    pub(super) style: RopeStyle,
    /// Whether the last elements of a head are turned, not the first.
    pub(super) tail: bool,
    /// What the norm of their keys adds.
    pub(super) eps: f32,
}

impl Choosing {
    /// Layers that choose which keys they see, where contexts may have more than they choose: those whose flag says so. Layers between
    /// see what the one before them chose, layers with a window what lies in that.
    pub(super) fn apply(self, l: &Loader<'_>, own: &[bool], layers: &mut [LatentSpec]) -> Result<(), Error> {
        let keys = l.keys;
        let most = keys.count("attention.indexer.top_k", 1 << 24)?;
        // By the model's own context, not by the one that is served: every part of the engine must see the same slots.
        if keys.count("context_length", 1 << 24)? <= most {
            return Ok(());
        }
        let (heads, width) =
            (keys.count("attention.indexer.head_count", 4096)?, keys.count("attention.indexer.key_length", 4096)?);
        let first = (0..layers.len()).find(|i| layers[*i].window.is_none());
        let begins = first.is_none_or(|i| own[i]);
        keys.require(
            begins,
            "attention.indexer.types",
            0,
            "1 for the first layer, which has none before it to choose for it",
        )?;
        for (layer, own) in layers.iter_mut().zip(own).filter(|(layer, _)| layer.window.is_none()) {
            let rope =
                layer.rope.clone().map(|rope| Rope { params: RopeParams { style: self.style, ..rope.params }, ..rope });
            let offset = if self.tail { width.saturating_sub(layer.turned) } else { 0 };
            let index = IndexSpec { heads, width, rule: Rule::tokens(most), rope, offset, eps: self.eps };
            layer.sees = if *own { Sees::Chosen(index) } else { Sees::AsBefore };
        }
        Ok(())
    }
}

/// Which layers choose by themselves: those of the file's list. Without one all do, in files for a million tokens only some.
pub(super) fn choosing_layers(l: &Loader<'_>, layers: usize, context: usize) -> Result<Vec<bool>, Error> {
    let list = "attention.indexer.types";
    if l.keys.is_array(list) {
        let flags = l.keys.flags(list)?;
        l.keys.require(flags.len() >= layers, list, flags.len(), &format!("one flag for each of {layers} layers"))?;
        return Ok(flags);
    }
    // A number says it of all layers at once.
    if l.keys.count_opt(list, 1)?.is_some() {
        return Ok(vec![true; layers]);
    }
    Ok((0..layers).map(|i| context < 1 << 20 || i < 2 || (i - 2).is_multiple_of(4)).collect())
}

/// DeepSeek 3.2 and GLM 5.
fn chosen(
    l: &mut Loader<'_>,
    log: bool,
    choosing: Choosing,
    own: impl Fn(&Loader<'_>, &Spec) -> Result<Vec<bool>, Error>,
) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    let mut latent = all(l, &spec)?;
    let log = if log { l.keys.float("rope.scaling.yarn_log_multiplier", 0.0, [0.0, 1e3])? } else { 0.0 };
    stretched(&mut latent, log, false);
    choosing.apply(l, &own(l, &spec)?, &mut latent)?;
    spec.latent = latent;
    spec.drafts = Some(Handed::Normed);
    spec.scaled = Scaled::All;
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    spec.moe = Some(MoeSpec { scaled: true, ..moe });
    Decoder::load(l, spec)
}

pub(super) fn deepseek32(l: &mut Loader<'_>) -> Loaded {
    let choosing = Choosing { style: RopeStyle::Neox, tail: false, eps: 1e-6 };
    chosen(l, true, choosing, |_, spec| Ok(vec![true; spec.sizes.layers]))
}

pub(super) fn glm_dsa(l: &mut Loader<'_>) -> Loaded {
    // No file says what this norm adds.
    let choosing = Choosing { style: RopeStyle::Normal, tail: false, eps: 0.0 };
    chosen(l, false, choosing, |l, spec| choosing_layers(l, spec.sizes.layers, spec.sizes.context))
}

/// dots3: layers with a window have sizes of their own; a gate for each head.
pub(super) fn dots3(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    let layers = spec.sizes.layers;
    let window = l.keys.count("attention.sliding_window", 1 << 24)?;
    let windows = windows(l, layers, window, 1)?;
    let base = window_base(l, 10000.0)?;
    for (i, window) in windows.into_iter().enumerate() {
        let suffix = if window.is_some() { "_swa" } else { "" };
        let mut layer = sizes(l, &spec, i, suffix)?;
        if window.is_some() {
            layer.rope = layer.rope.map(|rope| rope.with_base(base));
        }
        (layer.window, layer.key_norm, layer.gate) = (window, true, ResultGate::Sigmoid);
        spec.latent.push(layer);
    }
    let choosing = Choosing { style: RopeStyle::Neox, tail: false, eps: 1e-6 };
    choosing.apply(l, &vec![true; layers], &mut spec.latent)?;
    spec.scaled = Scaled::All;
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    spec.moe = Some(MoeSpec { scaled: true, ..moe });
    Decoder::load(l, spec)
}

/// MiniCPM 3: factors of embeddings, layers and logits.
pub(super) fn minicpm3(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::LongShort)?;
    spec.latent = all(l, &spec)?;
    spec.embedding_scale = 12.0;
    spec.residual_scale = 1.4 / (spec.sizes.layers as f32).sqrt();
    spec.logit_scale = 256.0 / spec.sizes.hidden as f32;
    spec.head = Head::Tied;
    Decoder::load(l, spec)
}

/// PLM: a feed-forward layer without a gate.
pub(super) fn plm(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Unused)?;
    spec.latent = all(l, &spec)?;
    (spec.head, spec.activation) = (Head::Embedding, Activation::Plain(Function::Relu2));
    Decoder::load(l, spec)
}
