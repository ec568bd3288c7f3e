//! The vocabulary: from `tokenizer.model` where there is one, else from `tokenizer.json`; what is special, how a text begins and
//! ends, and the chat template.

use std::collections::BTreeMap;
use std::path::Path;

use kiln_gguf::{Metadata, Strings};
use serde_json::Value;

use crate::config::{Config, json};
use crate::error::{Error, Result};
use crate::families::Family;
use crate::sentencepiece::pieces;

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USERS: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// Most tokens that are believed.
const MOST: usize = 1 << 22;

/// How a text is cut before pieces of it are merged: the pattern of `tokenizer.json`, and the name that GGUF has for it.
const PATTERNS: [(&str, &str); 5] = [
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "llama-bpe",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen2",
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "tekken",
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "gpt-4o",
    ),
    (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", "gpt-2"),
];

/// The tokens of a model, by number.
#[derive(Default)]
struct Tokens {
    texts: Vec<Vec<u8>>,
    kinds: Vec<i32>,
    scores: Vec<f32>,
}

impl Tokens {
    fn put(&mut self, id: usize, text: &[u8], kind: i32, score: f32) {
        if id >= self.texts.len() {
            // Ids without a token get a distinct name each.
            for gap in self.texts.len()..=id {
                self.texts.push(format!("[PAD{gap}]").into_bytes());
                self.kinds.push(UNUSED);
                self.scores.push(-1000.0);
            }
        }
        (self.texts[id], self.kinds[id], self.scores[id]) = (text.to_vec(), kind, score);
    }

    fn id(&self, text: &str) -> Option<u32> {
        let at = self.texts.iter().position(|other| other == text.as_bytes())?;
        u32::try_from(at).ok()
    }
}

fn failed(what: impl Into<String>, hint: impl Into<String>) -> Error {
    Error::Tokenizer { what: what.into(), hint: hint.into() }
}

/// Writes the keys of the vocabulary, for this many rows of embeddings.
pub(crate) fn read(
    folder: &Path,
    config: &Config,
    rows: usize,
    family: &Family,
    pre: Option<&str>,
    metadata: &mut Metadata,
) -> Result<()> {
    let settings = json(folder, "tokenizer_config.json")?.unwrap_or_default();
    let whole = json(folder, "tokenizer.json")?;
    let mut tokens = Tokens::default();
    let path = folder.join("tokenizer.model");
    let byte_level = whole.as_ref().is_some_and(is_byte_level);
    match std::fs::read(&path) {
        Ok(bytes) if !byte_level => {
            let found =
                pieces(&bytes).ok_or_else(|| Error::Damaged { path, why: "it is no SentencePiece model".into() })?;
            found.iter().enumerate().for_each(|(id, piece)| tokens.put(id, &piece.text, piece.kind, piece.score));
            metadata.set("tokenizer.ggml.model", "llama");
            metadata.set("tokenizer.ggml.pre", "default");
        }
        _ => {
            let Some(whole) = &whole else {
                let hint = "fetch the whole repository, or make tokenizer.json with a fast tokenizer's save_pretrained";
                return Err(failed("the folder has neither tokenizer.json nor tokenizer.model", hint));
            };
            from_json(whole, byte_level, pre, &mut tokens, metadata)?;
        }
    }
    added(&settings, whole.as_ref(), &mut tokens)?;
    let want = rows.max(config.count_opt("vocab_size")?.unwrap_or(0));
    if tokens.texts.len() > want && rows > 0 {
        let what = format!("the vocabulary has {} tokens, and the model {rows} embeddings", tokens.texts.len());
        return Err(failed(what, "the tokenizer is another model's"));
    }
    if rows > tokens.texts.len() && rows <= MOST {
        let last = rows - 1;
        tokens.put(last, format!("[PAD{last}]").as_bytes(), UNUSED, -1000.0);
    }
    if family.no_space_prefix && !byte_level {
        metadata.set("tokenizer.ggml.add_space_prefix", false);
    }
    special(folder, config, &settings, whole.as_ref(), &tokens, metadata)?;
    let is_spm = metadata.get_str_or("tokenizer.ggml.model", "")? == "llama";
    metadata.set("tokenizer.ggml.tokens", tokens.texts.iter().collect::<Strings>());
    if is_spm {
        metadata.set("tokenizer.ggml.scores", tokens.scores);
    }
    metadata.set("tokenizer.ggml.token_type", tokens.kinds);
    template(folder, &settings, metadata)
}

/// Whether bytes are spelled as letters, as GPT-2 began it.
fn is_byte_level(whole: &Value) -> bool {
    parts(whole, "pre_tokenizer").iter().any(|part| kind(part) == "ByteLevel")
        || parts(whole, "decoder").iter().any(|part| kind(part) == "ByteLevel")
}

fn kind(part: &Value) -> &str {
    part.get("type").and_then(Value::as_str).unwrap_or_default()
}

/// The parts of a step of `tokenizer.json`, which may be a sequence.
fn parts<'a>(whole: &'a Value, step: &str) -> Vec<&'a Value> {
    let Some(found) = whole.get(step).filter(|found| !found.is_null()) else { return Vec::new() };
    let list =
        ["pretokenizers", "decoders", "normalizers", "processors"].iter().find_map(|key| found.get(key)?.as_array());
    list.map_or_else(|| vec![found], |list| list.iter().collect())
}

fn from_json(
    whole: &Value,
    byte_level: bool,
    pre: Option<&str>,
    tokens: &mut Tokens,
    metadata: &mut Metadata,
) -> Result<()> {
    let model = whole.get("model").unwrap_or(&Value::Null);
    if kind(model) == "WordPiece" {
        return word_pieces(whole, model, tokens, metadata);
    }
    let vocab = model.get("vocab").and_then(Value::as_object).filter(|_| matches!(kind(model), "BPE" | ""));
    let Some(vocab) = vocab else {
        let what = format!("tokenizer.json holds a model of the kind {:?}, neither BPE nor WordPiece", kind(model));
        return Err(failed(what, "vocabularies of Llama, Mistral, Qwen, Gemma, Phi and BERT are of these kinds"));
    };
    let mut merges = Vec::new();
    for merge in model.get("merges").and_then(Value::as_array).into_iter().flatten() {
        let pair = match merge {
            Value::String(text) => Some(text.clone()),
            Value::Array(two) => match &two[..] {
                [Value::String(a), Value::String(b)] => Some(format!("{a} {b}")),
                _ => None,
            },
            _ => None,
        };
        merges.push(pair.ok_or_else(|| failed("a merge of tokenizer.json is no pair", "fetch the file again"))?);
    }
    let sorted = by_number(vocab)?;
    if byte_level {
        for (id, text) in sorted {
            tokens.put(id, text.as_bytes(), NORMAL, 0.0);
        }
        let pre = match pre {
            Some(named) => named.to_owned(),
            None => pattern(whole)?.to_owned(),
        };
        metadata.set("tokenizer.ggml.model", "gpt2");
        metadata.set("tokenizer.ggml.pre", pre);
        metadata.set("tokenizer.ggml.merges", merges.iter().collect::<Strings>());
        return Ok(());
    }
    // Merges in their order are what scores say: the earlier a pair is merged, the higher its score.
    let mut ranks: BTreeMap<String, usize> = BTreeMap::new();
    for (rank, merge) in merges.iter().enumerate() {
        ranks.entry(merge.replacen(' ', "", 1)).or_insert(rank);
    }
    for (id, text) in sorted {
        let byte = text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
        let kind = match text.as_str() {
            "<unk>" => UNKNOWN,
            _ if byte => BYTE,
            _ => NORMAL,
        };
        let score = ranks.get(text).map_or(-1e6, |rank| -(*rank as f32));
        tokens.put(id, text.as_bytes(), kind, if kind == NORMAL { score } else { 0.0 });
    }
    metadata.set("tokenizer.ggml.model", "llama");
    metadata.set("tokenizer.ggml.pre", "default");
    Ok(())
}

/// The texts of a vocabulary by their numbers.
fn by_number(vocab: &serde_json::Map<String, Value>) -> Result<BTreeMap<usize, &String>> {
    let mut sorted = BTreeMap::new();
    for (text, id) in vocab {
        let id = id.as_u64().and_then(|id| usize::try_from(id).ok()).filter(|id| *id < MOST);
        sorted.insert(id.ok_or_else(|| failed(format!("{text:?} has no number"), "fetch tokenizer.json again"))?, text);
    }
    Ok(sorted)
}

/// BERT's vocabulary. GGUF marks the beginning of a word where `tokenizer.json` marks what continues one.
fn word_pieces(whole: &Value, model: &Value, tokens: &mut Tokens, metadata: &mut Metadata) -> Result<()> {
    let vocab = model.get("vocab").and_then(Value::as_object);
    let vocab = vocab.ok_or_else(|| failed("tokenizer.json has no vocabulary", "fetch the file again"))?;
    let lowers = |part: &&Value| part.get("lowercase").and_then(Value::as_bool) == Some(true);
    if !parts(whole, "normalizer").iter().any(lowers) {
        let hint = "GGUF has no name for such vocabularies; uncased models can be converted";
        return Err(failed("the vocabulary tells capitals from small letters", hint));
    }
    let continues = model.get("continuing_subword_prefix").and_then(Value::as_str).unwrap_or("##");
    for (id, text) in by_number(vocab)? {
        let spelled = match text.strip_prefix(continues) {
            _ if text.starts_with('[') && text.ends_with(']') => text.clone(),
            Some(rest) => rest.to_owned(),
            None => format!("\u{2581}{text}"),
        };
        tokens.put(id, spelled.as_bytes(), NORMAL, 0.0);
    }
    metadata.set("tokenizer.ggml.model", "bert");
    metadata.set("tokenizer.ggml.pre", "bert-bge");
    Ok(())
}

/// The name that GGUF has for how texts are cut.
fn pattern(whole: &Value) -> Result<&'static str> {
    let parts = parts(whole, "pre_tokenizer");
    let regex = |part: &&Value| part.get("pattern")?.get("Regex")?.as_str().map(str::to_owned);
    let regexes: Vec<String> = parts.iter().filter_map(regex).collect();
    let digits = parts.iter().any(|part| kind(part) == "Digits");
    let own = parts.iter().any(|part| kind(part) == "ByteLevel" && part.get("use_regex") != Some(&Value::Bool(false)));
    match (&regexes[..], digits, own) {
        ([], true, true) => return Ok("smollm"),
        ([], false, true) => return Ok("gpt-2"),
        ([only], false, false) => {
            // Where words that are tokens are merged all the same, the same pattern has another name.
            let takes = whole.get("model").and_then(|model| model.get("ignore_merges")?.as_bool()).unwrap_or(false);
            match PATTERNS.iter().find(|(pattern, _)| pattern == only) {
                Some((_, "llama-bpe")) if !takes => return Ok("dbrx"),
                Some((_, name)) => return Ok(name),
                None => {}
            }
        }
        _ => {}
    }
    let shown = kiln_system::text::shown(&regexes.join("  "));
    let hint =
        "--pre names it, if you know it: llama-bpe, qwen2, tekken, gpt-4o, gpt-2, smollm or another of GGUF's names";
    Err(failed(format!("how texts are cut before merging has no name that is known: {shown}"), hint))
}

/// Tokens that were added behind a vocabulary, in any of the places they are told in.
fn added(settings: &Value, whole: Option<&Value>, tokens: &mut Tokens) -> Result<()> {
    let mut all: BTreeMap<usize, (String, bool)> = BTreeMap::new();
    let mut add = |id: Option<usize>, token: &Value| {
        let text = token.get("content").and_then(Value::as_str);
        let special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
        if let (Some(id), Some(text)) = (id.filter(|id| *id < MOST), text) {
            all.insert(id, (text.to_owned(), special));
        }
    };
    for token in whole.and_then(|whole| whole.get("added_tokens")?.as_array()).into_iter().flatten() {
        add(token.get("id").and_then(Value::as_u64).map(|id| id as usize), token);
    }
    for (id, token) in settings.get("added_tokens_decoder").and_then(Value::as_object).into_iter().flatten() {
        add(id.parse().ok(), token);
    }
    for (id, (text, special)) in all {
        let known = tokens.kinds.get(id).copied();
        // What SentencePiece calls unknown or a byte stays so.
        if matches!(known, Some(UNKNOWN | BYTE)) {
            continue;
        }
        let score = if known.is_some() { tokens.scores[id] } else { -1000.0 };
        tokens.put(id, text.as_bytes(), if special { CONTROL } else { USERS }, score);
    }
    Ok(())
}

/// Which tokens begin and end a text, and whether they are put there.
fn special(
    folder: &Path,
    config: &Config,
    settings: &Value,
    whole: Option<&Value>,
    tokens: &Tokens,
    metadata: &mut Metadata,
) -> Result<()> {
    let generation = json(folder, "generation_config.json")?.unwrap_or_default();
    let named = |role: &str| {
        let value = settings.get(format!("{role}_token"))?;
        let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
        tokens.id(text)
    };
    let number = |value: Option<&Value>| {
        let value = value?;
        let id = value.as_u64().or_else(|| value.as_array()?.first()?.as_u64())?;
        u32::try_from(id).ok().filter(|id| (*id as usize) < tokens.texts.len())
    };
    let mut begin = None;
    let is_wpm = metadata.get_str_or("tokenizer.ggml.model", "")? == "bert";
    let usual = [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")];
    let further = [("cls", "cls"), ("sep", "seperator"), ("mask", "mask")];
    for (role, key) in usual.into_iter().chain(further.into_iter().filter(|_| is_wpm)) {
        let field = format!("{role}_token_id");
        let found = named(role).or_else(|| number(config.value(&field))).or_else(|| number(generation.get(&field)));
        if let Some(id) = found {
            metadata.set(format!("tokenizer.ggml.{key}_token_id"), id);
        }
        if role == "bos" {
            begin = found;
        }
    }
    if is_wpm {
        // Two texts are read as `[CLS] one [SEP] other [SEP]`: every text ends by the separator, and no further one comes between.
        for (key, added) in [("bos", true), ("eos", true), ("sep", false)] {
            metadata.set(format!("tokenizer.ggml.add_{key}_token"), added);
        }
        return Ok(());
    }
    // The post-processor puts the first token there, whatever the settings say.
    let template = whole.map(|whole| parts(whole, "post_processor")).unwrap_or_default();
    let first = template.iter().find_map(|part| {
        let first = part.get("single")?.as_array()?.first()?;
        tokens.id(first.get("SpecialToken")?.get("id")?.as_str()?)
    });
    let begins = match (first, settings.get("add_bos_token").and_then(Value::as_bool)) {
        (Some(first), _) => Some(Some(first) == begin),
        (None, Some(said)) => Some(said && begin.is_some()),
        (None, None) if whole.is_some() => Some(false),
        (None, None) => None,
    };
    if let Some(begins) = begins {
        metadata.set("tokenizer.ggml.add_bos_token", begins);
    }
    if let Some(ends) = settings.get("add_eos_token").and_then(Value::as_bool) {
        metadata.set("tokenizer.ggml.add_eos_token", ends);
    }
    Ok(())
}

fn template(folder: &Path, settings: &Value, metadata: &mut Metadata) -> Result<()> {
    let file = std::fs::read_to_string(folder.join("chat_template.jinja")).ok();
    let said = settings.get("chat_template");
    if let Some(text) = file.or_else(|| said.and_then(Value::as_str).map(str::to_owned)) {
        metadata.set("tokenizer.chat_template", text);
        return Ok(());
    }
    for named in said.and_then(Value::as_array).into_iter().flatten() {
        let field = |key: &str| named.get(key).and_then(Value::as_str);
        if let (Some(name), Some(text)) = (field("name"), field("template")) {
            let key = if name == "default" { String::new() } else { format!(".{name}") };
            metadata.set(format!("tokenizer.chat_template{key}"), text);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn patterns_are_known_by_their_text() {
        let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"});
        let bytes = |own: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": own});
        let sequence = |list: Vec<Value>| json!({"model": {"ignore_merges": true}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": list}});
        for (regex, name) in PATTERNS {
            assert_eq!(pattern(&sequence(vec![split(regex), bytes(false)])).unwrap(), name);
        }
        assert_eq!(pattern(&json!({"pre_tokenizer": bytes(true)})).unwrap(), "gpt-2");
        let merging = json!({"pre_tokenizer": {"pretokenizers": [split(PATTERNS[0].0), bytes(false)]}});
        assert_eq!(pattern(&merging).unwrap(), "dbrx");
        let digits = json!({"type": "Digits", "individual_digits": true});
        assert_eq!(pattern(&sequence(vec![digits, bytes(true)])).unwrap(), "smollm");
        let error = pattern(&sequence(vec![split("[a-z]+"), bytes(false)])).unwrap_err().to_string();
        assert!(error.contains("[a-z]+") && error.contains("--pre"), "{error}");
    }

    #[test]
    fn ids_without_a_token_are_filled() {
        let mut tokens = Tokens::default();
        tokens.put(2, b"c", NORMAL, 1.0);
        assert_eq!((tokens.texts[0].as_slice(), tokens.kinds[0], tokens.kinds[2]), (&b"[PAD0]"[..], UNUSED, NORMAL));
        assert_eq!((tokens.id("c"), tokens.id("d")), (Some(2), None));
    }
}
