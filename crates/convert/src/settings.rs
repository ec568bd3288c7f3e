//! Settings of `config.json` that no key of the file stands for: those that must have the value the architecture takes for granted,
//! those that change nothing, and all others, which are refused.

use serde_json::Value;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::families::Family;

/// Settings that change nothing in what a model computes from a prompt: where it came from, how it was trained, how
/// `transformers` runs it and draws tokens, and parts of models that also see.
const HARMLESS: &[&str] = &[
    "architectures",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_implementation",
    "auto_map",
    "boi_token_index",
    "cache_implementation",
    "classifier_dropout",
    "dtype",
    "embd_pdrop",
    "eoi_token_index",
    "finetuning_task",
    "full_attn_mod",
    "generation_config",
    "hidden_act",
    "hidden_activation",
    "hidden_dropout_prob",
    "id2label",
    "image_token_index",
    "initializer_factor",
    "initializer_range",
    "interpolate_factor",
    "is_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "layer_norm_eps",
    "length_penalty",
    "max_length",
    "max_window_layers",
    "mm_tokens_per_image",
    "model_type",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_router_logits",
    "pretraining_tp",
    "problem_type",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "rms_norm_eps",
    "rope_local_base_freq",
    "rope_theta",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sentence_transformers",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    "vision_config",
];

/// Whether a value switches nothing on.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

/// Whether a setting is the concern of `transformers` alone.
fn is_harmless(key: &str) -> bool {
    HARMLESS.contains(&key) || key.ends_with("_token_id") || key.starts_with('_')
}

/// Checks what the architecture takes for granted, and refuses what is not known. Called when all keys were read. Gives notes for the
/// user.
pub(crate) fn check(config: &Config, family: &Family) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    notes.extend(windows(config, family)?);
    if let Some(normed) = config.value("norm_topk_prob").and_then(Value::as_bool) {
        let want = family.architecture == "qwen3moe";
        if normed != want && family.architecture.ends_with("moe") {
            let what = format!("norm_topk_prob is {normed}, which models of this class do not have");
            return Err(Error::Config { what });
        }
    }
    let unknown = config.unasked().into_iter().find(|(key, value)| !is_harmless(key) && !is_off(value));
    match unknown {
        Some((key, value)) => {
            let value: String = value.to_string().chars().take(60).collect();
            Err(Error::Setting { key: key.to_owned(), value })
        }
        None => Ok(notes),
    }
}

/// Windows of attention that the file has no key for.
fn windows(config: &Config, family: &Family) -> Result<Option<String>> {
    let types = config.value("layer_types").and_then(Value::as_array);
    let slides = config.value("use_sliding_window").and_then(Value::as_bool);
    // Of these the file says which layers have a window, or readers know it.
    if matches!(family.architecture, "gemma2" | "gemma3" | "phi3") {
        return Ok(None);
    }
    let window = config.count_opt("sliding_window")?;
    let sliding = types.is_some_and(|all| all.iter().any(|kind| kind == "sliding_attention"));
    if slides == Some(true) || sliding {
        let what = "layers have a sliding window, which files of this architecture cannot say".into();
        return Err(Error::Config { what });
    }
    // Qwen names a window that is not used.
    let used = window.filter(|_| slides.is_none());
    let context = config.count_opt("max_position_embeddings")?.unwrap_or(0);
    Ok(used.filter(|window| *window < context).map(|window| {
        format!("sliding_window is {window}: the file cannot say it, and longer contexts attend to all tokens")
    }))
}
