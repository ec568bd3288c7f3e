//! BERT, and what sentence-transformers put around it: settings, names of tensors, how the vectors of tokens become one.

use std::path::Path;

use kiln_gguf::Metadata;
use serde_json::Value;

use crate::config::{Config, json};
use crate::error::{Error, Result};
use crate::families::{Keys, SIZES};
use crate::names::Place;

/// Classes as `config.json` names them. Only the last one makes scores.
pub(crate) const CLASSES: &[&str] = &["BertModel", "BertForMaskedLM", RANKS];
const RANKS: &str = "BertForSequenceClassification";

/// The table of embeddings, as Hugging Face calls it.
pub(crate) const EMBEDDING: &str = "embeddings.word_embeddings.weight";

/// Names outside of layers.
const WHOLE: [(&str, &str); 6] = [
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.LayerNorm", "token_embd_norm"),
    ("pooler.dense", "cls"),
    ("classifier", "cls.output"),
];

/// Names inside of a layer.
const LAYER: [(&str, &str); 8] = [
    ("attention.self.query", "attn_q"),
    ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.dense", "ffn_down"),
    ("output.LayerNorm", "layer_output_norm"),
];

/// The place of a tensor; `None` where it has none.
pub(crate) fn place(name: &str, class: &str) -> Option<Place> {
    let name = bare(name);
    // What guesses words that were left out is of no use, and what makes scores only in models that were made for it.
    let guesses = name.starts_with("cls.") || name == "embeddings.position_ids";
    if guesses || (class != RANKS && name.starts_with("pooler.")) {
        return Some(Place::Nothing);
    }
    let (stem, end) = name.rsplit_once('.').filter(|(_, end)| matches!(*end, "weight" | "bias"))?;
    if let Some((_, here)) = WHOLE.iter().find(|(there, _)| *there == stem) {
        return Some(Place::Own(format!("{here}.{end}")));
    }
    let (layer, inside) = stem.strip_prefix("encoder.layer.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    let (_, here) = LAYER.iter().find(|(there, _)| *there == inside)?;
    Some(Place::Own(format!("blk.{layer}.{here}.{end}")))
}

/// A name without the model's own prefix.
pub(crate) fn bare(name: &str) -> &str {
    name.strip_prefix("bert.").unwrap_or(name)
}

/// Tensors that a model must have, beside those of its layers.
pub(crate) const REQUIRED: [&str; 3] = ["token_embd.weight", "position_embd.weight", "token_embd_norm.weight"];
/// The tensor that tells that a layer is there.
pub(crate) const OF_LAYER: &str = "layer_output_norm.weight";

/// Writes the keys of the model.
pub(crate) fn keys(keys: &Keys<'_>, metadata: &mut Metadata) -> Result<()> {
    let config = keys.config;
    let wrong = |what: String| Err(Error::Config { what });
    match config.value("hidden_act").and_then(Value::as_str) {
        None => {}
        Some(act) if act.starts_with("gelu") => {}
        Some(act) => return wrong(format!("hidden_act is {act:?}, which models of this class do not have")),
    }
    if let Some(kind) = config.value("position_embedding_type").and_then(Value::as_str).filter(|k| *k != "absolute") {
        return wrong(format!("position_embedding_type is {kind:?}, want \"absolute\""));
    }
    for (key, name) in SIZES {
        keys.set(metadata, key, config.count(name)?);
    }
    keys.set_float(metadata, "attention.layer_norm_epsilon", config.float("layer_norm_eps").unwrap_or(1e-12));
    metadata.set(format!("{}.attention.causal", keys.architecture), false);
    metadata.set("tokenizer.ggml.token_type_count", config.count("type_vocab_size")? as u32);
    Ok(())
}

/// Writes how vectors of tokens become one, as sentence-transformers say it in `modules.json` and the folder of its pooling. A model that
/// ranks says it by its class.
pub(crate) fn pooling(folder: &Path, config: &Config, metadata: &mut Metadata) -> Result<()> {
    const KEY: &str = "bert.pooling_type";
    if config.class == RANKS {
        metadata.set(KEY, 4u32);
        let labels = config.value("id2label").and_then(Value::as_object);
        if let Some(labels) = labels.filter(|labels| !labels.is_empty()) {
            let mut named: Vec<(usize, &str)> =
                labels.iter().filter_map(|(id, name)| Some((id.parse().ok()?, name.as_str()?))).collect();
            named.sort_unstable();
            let names: kiln_gguf::Strings = named.into_iter().map(|(_, name)| name).collect();
            metadata.set("bert.classifier.output_labels", names);
        }
        return Ok(());
    }
    let modules = json(folder, "modules.json")?.unwrap_or_default();
    let is_pooling =
        |module: &&Value| module.get("type").and_then(Value::as_str).is_some_and(|t| t.ends_with("Pooling"));
    let module = modules.as_array().into_iter().flatten().find(is_pooling);
    let Some(path) = module.and_then(|module| module.get("path")?.as_str()) else { return Ok(()) };
    // The path comes from a file: it must not lead out of the folder.
    let plain = !path.is_empty() && path.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    let settings = if plain { json(&folder.join(path), "config.json")? } else { None };
    let Some(settings) = settings else { return Ok(()) };
    let on = |key: &str| settings.get(key).and_then(Value::as_bool).unwrap_or(false);
    let number = match [on("pooling_mode_mean_tokens"), on("pooling_mode_cls_token"), on("pooling_mode_lasttoken")] {
        [true, false, false] => 1u32,
        [false, true, false] => 2,
        [false, false, true] => 3,
        _ => {
            let what = format!("{path}/config.json pools in a way that is not known");
            return Err(Error::Config { what });
        }
    };
    metadata.set(KEY, number);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_have_their_places() {
        let own = |name: &str| Some(Place::Own(name.into()));
        assert_eq!(place("bert.encoder.layer.3.output.dense.bias", RANKS), own("blk.3.ffn_down.bias"));
        assert_eq!(
            place("encoder.layer.0.attention.output.LayerNorm.weight", "BertModel"),
            own("blk.0.attn_output_norm.weight")
        );
        assert_eq!(place("pooler.dense.weight", "BertModel"), Some(Place::Nothing));
        assert_eq!(place("bert.pooler.dense.weight", RANKS), own("cls.weight"));
        assert_eq!(place("classifier.bias", RANKS), own("cls.output.bias"));
        assert_eq!(place("embeddings.position_ids", "BertModel"), Some(Place::Nothing));
        assert_eq!(place("encoder.layer.0.mystery.weight", "BertModel"), None);
    }
}
