//! The table of families: classes of models as `transformers` calls them, what GGUF calls them, and the keys they have.

use kiln_gguf::Metadata;
use serde_json::Value;

use crate::config::Config;
use crate::encoders;
use crate::error::{Error, Result};

/// A family of models.
#[derive(Debug)]
pub(crate) struct Family {
    /// Classes as `config.json` names them.
    classes: &'static [&'static str],
    /// The name in GGUF, which its keys begin with.
    pub(crate) architecture: &'static str,
    /// Rows of queries and keys are stored in pairs that are turned together, where Hugging Face stores halves.
    pub(crate) pairs: bool,
    /// Norms are stored without the one that is added to them.
    pub(crate) norms_add_one: bool,
    /// Norms before and behind each half of a layer.
    pub(crate) sandwich: bool,
    /// Texts get no space before them.
    pub(crate) no_space_prefix: bool,
    /// BERT: vectors of texts, names of its own (`encoders.rs`).
    pub(crate) encoder: bool,
    /// Norms take the mean away and have a bias, and the feed-forward layer has no gate.
    layer_norms: bool,
    /// Keys that only this family has.
    more: fn(&Keys<'_>, &mut Metadata) -> Result<()>,
}

/// Keys of sizes that every model has, and what `config.json` calls them.
pub(crate) const SIZES: [(&str, &str); 5] = [
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
];

const USUAL: Family = Family {
    classes: &[],
    architecture: "",
    pairs: false,
    norms_add_one: false,
    sandwich: false,
    no_space_prefix: false,
    encoder: false,
    layer_norms: false,
    more: |_, _| Ok(()),
};

/// Architectures that come of conversions, each with the classes that it comes from.
pub fn families() -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    TABLE.iter().map(|family| (family.architecture, family.classes))
}

/// Every family that can be converted.
const TABLE: &[Family] = &[
    Family {
        classes: &["LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"],
        architecture: "llama",
        pairs: true,
        more: mixtral,
        ..USUAL
    },
    Family { classes: &["Qwen2ForCausalLM"], architecture: "qwen2", ..USUAL },
    Family { classes: &["Qwen2MoeForCausalLM"], architecture: "qwen2moe", more: qwen_experts, ..USUAL },
    Family { classes: &["Qwen3ForCausalLM"], architecture: "qwen3", ..USUAL },
    Family { classes: &["Qwen3MoeForCausalLM"], architecture: "qwen3moe", more: qwen_experts, ..USUAL },
    Family {
        classes: &["GemmaForCausalLM"],
        architecture: "gemma",
        norms_add_one: true,
        no_space_prefix: true,
        ..USUAL
    },
    Family {
        classes: &["Gemma2ForCausalLM"],
        architecture: "gemma2",
        norms_add_one: true,
        sandwich: true,
        no_space_prefix: true,
        more: gemma2,
        ..USUAL
    },
    Family {
        classes: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
        architecture: "gemma3",
        norms_add_one: true,
        sandwich: true,
        no_space_prefix: true,
        more: gemma3,
        ..USUAL
    },
    Family { classes: &["PhiForCausalLM"], architecture: "phi2", layer_norms: true, more: phi2, ..USUAL },
    Family { classes: &["Phi3ForCausalLM"], architecture: "phi3", more: phi3, ..USUAL },
    Family { classes: encoders::CLASSES, architecture: "bert", encoder: true, ..USUAL },
];

/// The family of a model.
pub(crate) fn of(config: &Config) -> Result<&'static Family> {
    let found = TABLE.iter().find(|family| family.classes.contains(&config.class.as_str()));
    found.ok_or_else(|| {
        let known = TABLE.iter().flat_map(|family| family.classes).copied().collect::<Vec<_>>().join(", ");
        Error::Family { class: config.class.clone(), known }
    })
}

/// Divisors of the frequencies of a rotary embedding, as tensors of the file.
pub(crate) type Factors = Vec<(&'static str, Vec<f32>)>;

/// Settings, and what their keys begin with.
pub(crate) struct Keys<'a> {
    pub(crate) config: &'a Config,
    pub(crate) architecture: &'static str,
}

impl Keys<'_> {
    pub(crate) fn set(&self, metadata: &mut Metadata, key: &str, value: usize) {
        metadata.set(format!("{}.{key}", self.architecture), value as u32);
    }

    pub(crate) fn set_float(&self, metadata: &mut Metadata, key: &str, value: f32) {
        metadata.set(format!("{}.{key}", self.architecture), value);
    }
}

impl Family {
    /// Writes the keys of the model; gives the tensors that are computed from them.
    pub(crate) fn keys(&self, config: &Config, metadata: &mut Metadata) -> Result<Factors> {
        let keys = Keys { config, architecture: self.architecture };
        if self.encoder {
            encoders::keys(&keys, metadata)?;
            return Ok(Vec::new());
        }
        let act = config.value("hidden_activation").or_else(|| config.value("hidden_act")).and_then(Value::as_str);
        let fits = match act {
            None => true,
            Some(act) if self.norms_add_one || self.layer_norms => act.starts_with("gelu"),
            Some(act) => matches!(act, "silu" | "swish"),
        };
        if let Some(act) = act.filter(|_| !fits) {
            let what = format!("hidden_act is {act:?}, which models of this class do not have");
            return Err(Error::Config { what });
        }
        for (key, name) in SIZES {
            keys.set(metadata, key, config.count(name)?);
        }
        keys.set(metadata, "attention.head_count_kv", config.kv_heads()?);
        let head = config.head_dim()?;
        let part = config.rope_float("partial_rotary_factor").unwrap_or(1.0);
        keys.set(metadata, "rope.dimension_count", (head as f32 * part) as usize);
        if config.count_opt("head_dim")?.is_some() {
            keys.set(metadata, "attention.key_length", head);
            keys.set(metadata, "attention.value_length", head);
        }
        let (key, name, usual) = match self.layer_norms {
            true => ("attention.layer_norm_epsilon", "layer_norm_eps", 1e-5),
            false => ("attention.layer_norm_rms_epsilon", "rms_norm_eps", 1e-6),
        };
        keys.set_float(metadata, key, config.float(name).unwrap_or(usual));
        keys.set_float(metadata, "rope.freq_base", config.rope_float("rope_theta").unwrap_or(10_000.0));
        if let Some(vocab) = config.count_opt("vocab_size")? {
            keys.set(metadata, "vocab_size", vocab);
        }
        (self.more)(&keys, metadata)?;
        scaling(&keys, metadata)
    }
}

/// Keys and tensors of a rotary embedding that is scaled.
fn scaling(keys: &Keys<'_>, metadata: &mut Metadata) -> Result<Factors> {
    let config = keys.config;
    let Some(kind) = config.rope_kind() else { return Ok(Vec::new()) };
    let missing = |what: &str| Error::Config { what: format!("the scaling {kind:?} lacks {what}") };
    let number = |key: &str| config.rope_float(key).ok_or_else(|| missing(key));
    let key = format!("{}.rope.scaling.type", keys.architecture);
    match kind {
        "linear" | "yarn" => {
            metadata.set(key, kind);
            keys.set_float(metadata, "rope.scaling.factor", number("factor")?);
            if kind == "yarn" {
                let own = config.count("max_position_embeddings")?;
                let original = config.rope_float("original_max_position_embeddings").map_or(own, |n| n as usize);
                keys.set(metadata, "rope.scaling.original_context_length", original);
            }
            Ok(Vec::new())
        }
        "llama3" => {
            let scale = Llama3 {
                factor: number("factor")?,
                low: number("low_freq_factor")?,
                high: number("high_freq_factor")?,
                context: number("original_max_position_embeddings")?,
            };
            let base = config.rope_float("rope_theta").unwrap_or(10_000.0);
            Ok(vec![("rope_freqs.weight", scale.factors(base, config.head_dim()?))])
        }
        "longrope" | "su" => {
            let list = |key: &str| -> Result<Vec<f32>> {
                let list = config.rope(key).and_then(Value::as_array).ok_or_else(|| missing(key))?;
                let floats = list.iter().map(|value| value.as_f64().map(|value| value as f32));
                floats.collect::<Option<Vec<f32>>>().ok_or_else(|| missing(key))
            };
            Ok(vec![
                ("rope_factors_long.weight", list("long_factor")?),
                ("rope_factors_short.weight", list("short_factor")?),
            ])
        }
        other => Err(Error::Config { what: format!("the scaling {other:?} of the rotary embedding is not known") }),
    }
}

/// The scaling of Llama 3.1: slow waves are stretched, fast ones stay, those between go over smoothly.
struct Llama3 {
    factor: f32,
    low: f32,
    high: f32,
    context: f32,
}

impl Llama3 {
    fn factors(&self, base: f32, head: usize) -> Vec<f32> {
        let divisor = |pair: usize| {
            let frequency = f64::from(base).powf(-((2 * pair) as f64) / head as f64);
            let wave = (2.0 * std::f64::consts::PI / frequency) as f32;
            if wave < self.context / self.high {
                return 1.0;
            }
            if wave > self.context / self.low {
                return self.factor;
            }
            let smooth = (self.context / wave - self.low) / (self.high - self.low);
            1.0 / ((1.0 - smooth) / self.factor + smooth)
        };
        (0..head / 2).map(divisor).collect()
    }
}

fn mixtral(keys: &Keys<'_>, metadata: &mut Metadata) -> Result<()> {
    if let Some(experts) = keys.config.count_opt("num_local_experts")? {
        keys.set(metadata, "expert_count", experts);
        keys.set(metadata, "expert_used_count", keys.config.count("num_experts_per_tok")?);
    }
    Ok(())
}

fn qwen_experts(keys: &Keys<'_>, metadata: &mut Metadata) -> Result<()> {
    let config = keys.config;
    keys.set(metadata, "expert_count", config.count("num_experts")?);
    keys.set(metadata, "expert_used_count", config.count("num_experts_per_tok")?);
    keys.set(metadata, "expert_feed_forward_length", config.count("moe_intermediate_size")?);
    if let Some(shared) = config.count_opt("shared_expert_intermediate_size")? {
        keys.set(metadata, "expert_shared_feed_forward_length", shared);
    }
    let plain = config.value("mlp_only_layers").and_then(Value::as_array).is_none_or(Vec::is_empty);
    let every = config.count_opt("decoder_sparse_step")?.unwrap_or(1) == 1;
    if !plain || !every {
        return Err(Error::Config { what: "only some layers have experts".into() });
    }
    Ok(())
}

/// How scores are scaled is not in the file: readers know it from the class and the number of layers.
fn check_scores(keys: &Keys<'_>, largest: usize) -> Result<()> {
    let config = keys.config;
    let Some(scalar) = config.count_opt("query_pre_attn_scalar")? else { return Ok(()) };
    let by_width = config.count("hidden_size")? / config.count("num_attention_heads")?;
    let want = if config.count("num_hidden_layers")? == largest { by_width } else { config.head_dim()? };
    if scalar != want {
        return Err(Error::Config { what: format!("query_pre_attn_scalar is {scalar}, want {want}") });
    }
    Ok(())
}

fn gemma2(keys: &Keys<'_>, metadata: &mut Metadata) -> Result<()> {
    check_scores(keys, 46)?;
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        keys.set_float(metadata, key, keys.config.float(key).unwrap_or(0.0));
    }
    keys.set(metadata, "attention.sliding_window", keys.config.count("sliding_window")?);
    Ok(())
}

fn gemma3(keys: &Keys<'_>, metadata: &mut Metadata) -> Result<()> {
    let config = keys.config;
    check_scores(keys, 62)?;
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if config.float(key).is_some_and(|cap| cap != 0.0) {
            return Err(Error::Config { what: format!("{key} is set, which models of this class do not have") });
        }
    }
    let pattern = match config.count_opt("sliding_window_pattern")? {
        Some(pattern) => pattern,
        None => config.count_opt("_sliding_window_pattern")?.unwrap_or(6),
    };
    if pattern != 6 {
        return Err(Error::Config { what: format!("every layer number {pattern} is without a window, want 6") });
    }
    keys.set(metadata, "attention.sliding_window", config.count("sliding_window")?);
    let local =
        config.value("rope_parameters").and_then(|all| all.get("sliding_attention")?.get("rope_theta")?.as_f64());
    let local = local.map(|base| base as f32).or_else(|| config.float("rope_local_base_freq"));
    keys.set_float(metadata, "rope.freq_base_swa", local.unwrap_or(10_000.0));
    // Left out where it is what `transformers` takes anyway.
    if config.rope("rope_theta").is_none() {
        keys.set_float(metadata, "rope.freq_base", 1_000_000.0);
    }
    Ok(())
}

/// What turns at half of each head is what `transformers` takes where a folder does not say it.
fn phi2(keys: &Keys<'_>, metadata: &mut Metadata) -> Result<()> {
    let config = keys.config;
    if config.switch("qk_layernorm") {
        return Err(Error::Config { what: "qk_layernorm is set: norms of queries and keys are not known here".into() });
    }
    if config.rope_float("partial_rotary_factor").is_none() {
        keys.set(metadata, "rope.dimension_count", config.head_dim()? / 2);
    }
    metadata.set("tokenizer.ggml.add_bos_token", false);
    Ok(())
}

fn phi3(keys: &Keys<'_>, metadata: &mut Metadata) -> Result<()> {
    let config = keys.config;
    let context = config.count("max_position_embeddings")?;
    let original = config.count_opt("original_max_position_embeddings")?;
    let original = original.or(config.rope_float("original_max_position_embeddings").map(|n| n as usize));
    let original = original.unwrap_or(context);
    keys.set(metadata, "rope.scaling.original_context_length", original);
    if let Some(window) = config.count_opt("sliding_window")? {
        keys.set(metadata, "attention.sliding_window", window);
    }
    if matches!(config.rope_kind(), Some("longrope" | "su")) {
        let scale = context as f64 / original as f64;
        let factor = if scale <= 1.0 { 1.0 } else { (1.0 + scale.ln() / (original as f64).ln()).sqrt() };
        keys.set_float(metadata, "rope.scaling.attn_factor", factor as f32);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scaling_of_llama_3_1_goes_from_one_to_its_factor() {
        let scale = Llama3 { factor: 8.0, low: 1.0, high: 4.0, context: 8192.0 };
        let factors = scale.factors(500_000.0, 128);
        assert_eq!((factors.len(), factors[0], factors[63]), (64, 1.0, 8.0));
        assert!(factors.windows(2).all(|w| w[0] <= w[1]) && factors.iter().any(|f| *f > 1.0 && *f < 8.0));
    }
}
