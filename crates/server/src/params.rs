//! The fields about choosing tokens and ending texts that all APIs share, with the names of OpenAI, vLLM and llama.cpp.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::PoisonError;

use kiln_engine::run::{Constraint, StopRule};
use kiln_engine::sampler::{Kind as SamplerKind, Sampling};
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial, Tokenizer};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use crate::api::lora;
use crate::api_error::ApiError;
use crate::guard::Caller;
use crate::registry::Loaded;

/// What a request may say about choosing tokens. Every field may be absent or null.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Sampling")]
pub(crate) struct Params {
    pub(crate) max_completion_tokens: Option<i64>,
    pub(crate) max_tokens: Option<i64>,
    pub(crate) n_predict: Option<i64>,
    pub(crate) temperature: Option<f32>,
    dynatemp_range: Option<f32>,
    dynatemp_exponent: Option<f32>,
    pub(crate) top_p: Option<f32>,
    min_p: Option<f32>,
    pub(crate) top_k: Option<i32>,
    typical_p: Option<f32>,
    top_n_sigma: Option<f32>,
    xtc_probability: Option<f32>,
    xtc_threshold: Option<f32>,
    frequency_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    repetition_penalty: Option<f32>,
    repeat_penalty: Option<f32>,
    repeat_last_n: Option<i32>,
    dry_multiplier: Option<f32>,
    dry_base: Option<f32>,
    dry_allowed_length: Option<u32>,
    dry_penalty_last_n: Option<i32>,
    dry_sequence_breakers: Option<Vec<String>>,
    mirostat: Option<u8>,
    mirostat_tau: Option<f32>,
    mirostat_eta: Option<f32>,
    min_keep: Option<u32>,
    samplers: Option<Value>,
    seed: Option<i64>,
    pub(crate) stop: Option<Value>,
    include_stop_str_in_output: Option<bool>,
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    min_tokens: Option<usize>,
    bad_words: Option<Vec<String>>,
    pub(crate) allowed_token_ids: Option<Vec<u32>>,
    logit_bias: Option<Value>,
    pub(crate) n: Option<i64>,
    cache_prompt: Option<bool>,
    /// Tokens of a draft at most; 0 for no drafts.
    #[serde(rename = "speculative.n_max")]
    most_drafted: Option<u32>,
    /// Prompts share their beginnings only with those of the same salt.
    cache_salt: Option<String>,
    id_slot: Option<i64>,
    lora: Option<Vec<lora::Scale>>,
    /// Read here for adapters that have the name of a model.
    #[schemars(skip)]
    model: Option<String>,
    guided_json: Option<Value>,
    guided_regex: Option<Value>,
    guided_choice: Option<Value>,
    guided_grammar: Option<Value>,
}

/// The most texts of one prompt.
const MOST_CHOICES: i64 = 128;
const MOST_STOPS: usize = 16;
const LONGEST_STOP: usize = 256;

fn between(name: &str, value: Option<f32>, low: f32, high: f32) -> Result<(), ApiError> {
    match value {
        Some(v) if !(low..=high).contains(&v) => {
            Err(ApiError::invalid(name, format!("`{name}` is {v}, it must be {low} to {high}")))
        }
        _ => Ok(()),
    }
}

impl Params {
    /// How tokens are chosen: what the request says, else the model's own settings.
    pub(crate) fn sampling(&self, loaded: &Loaded) -> Result<Sampling, ApiError> {
        between("temperature", self.temperature, 0.0, 100.0)?;
        between("top_p", self.top_p, 0.0, 1.0)?;
        between("min_p", self.min_p, 0.0, 1.0)?;
        between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        between("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        self.refuse_old_names()?;
        let mut s = loaded.setup.sampling.clone();
        macro_rules! take {
            ($($field:ident),*) => { $(if let Some(value) = self.$field.clone() { s.$field = value; })* };
        }
        take!(temperature, dynatemp_range, dynatemp_exponent, top_p, min_p, top_k, typical_p, top_n_sigma, min_keep);
        take!(xtc_probability, xtc_threshold, frequency_penalty, presence_penalty, repeat_penalty, repeat_last_n);
        take!(dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers);
        take!(mirostat, mirostat_tau, mirostat_eta);
        // These names come from APIs that look at the whole text.
        let whole = self.frequency_penalty.is_some() || self.presence_penalty.is_some();
        if self.repeat_last_n.is_none() && (whole || self.repetition_penalty.is_some()) {
            s.repeat_last_n = -1;
        }
        if let Some(penalty) = self.repetition_penalty {
            s.repeat_penalty = penalty;
        }
        if let Some(seed) = self.seed {
            s.seed = Some(seed).filter(|seed| *seed != -1).map(i64::cast_unsigned);
        }
        if let Some(samplers) = &self.samplers {
            s.samplers = sampler_names(samplers)?;
        }
        let vocab = loaded.scheduler.model().config.vocab;
        if self.logit_bias.is_some() || self.bad_words.is_some() {
            s.logit_bias = self.bias(&loaded.scheduler.model().tokenizer, vocab)?;
        }
        s.check(vocab).map_err(kiln_engine::Error::from)?;
        Ok(s)
    }

    fn refuse_old_names(&self) -> Result<(), ApiError> {
        let old = [
            ("guided_json", &self.guided_json, "json"),
            ("guided_regex", &self.guided_regex, "regex"),
            ("guided_choice", &self.guided_choice, "choice"),
            ("guided_grammar", &self.guided_grammar, "grammar"),
        ];
        match old.iter().find(|(_, value, _)| value.is_some()) {
            Some((name, _, new)) => {
                Err(ApiError::unsupported(*name, format!("`{name}` is now `structured_outputs: {{\"{new}\": ...}}`")))
            }
            None => Ok(()),
        }
    }

    /// The slot that is wanted; -1 means any.
    pub(crate) fn slot(&self) -> Option<usize> {
        self.id_slot.and_then(|slot| usize::try_from(slot).ok())
    }

    /// What ends a text.
    pub(crate) fn stop_rule(&self, loaded: &Loaded) -> Result<StopRule, ApiError> {
        let vocab = loaded.scheduler.model().config.vocab;
        let tokens = self.stop_token_ids.clone().unwrap_or_default();
        if let Some(token) = tokens.iter().find(|t| **t as usize >= vocab) {
            let message = format!("token {token} is not in the vocabulary of {vocab} tokens");
            return Err(ApiError::invalid("stop_token_ids", message));
        }
        Ok(StopRule {
            strings: stop_strings("stop", self.stop.as_ref())?,
            tokens,
            ignore_end: self.ignore_eos.unwrap_or(false),
            min_tokens: self.min_tokens.unwrap_or(0),
            include: self.include_stop_str_in_output.unwrap_or(false),
        })
    }

    /// Tokens to make at most; none for as many as fit, 0 where the prompt alone is to be read.
    pub(crate) fn limit(&self) -> Result<Option<usize>, ApiError> {
        let all = [
            ("max_completion_tokens", self.max_completion_tokens),
            ("max_tokens", self.max_tokens),
            ("n_predict", self.n_predict),
        ];
        let Some((name, value)) = all.into_iter().find_map(|(name, value)| Some((name, value?))) else {
            return Ok(None);
        };
        match usize::try_from(value) {
            // llama.cpp's way to say "no limit".
            Err(_) if value == -1 && name != "max_completion_tokens" => Ok(None),
            Ok(value) => Ok(Some(value)),
            Err(_) => Err(ApiError::invalid(name, format!("`{name}` is {value}, it must be 0 or more"))),
        }
    }

    /// Texts of one prompt.
    pub(crate) fn choices(&self, loaded: &Loaded) -> Result<usize, ApiError> {
        let n = self.n.unwrap_or(1);
        let most = MOST_CHOICES.min(i64::try_from(loaded.sequences).unwrap_or(MOST_CHOICES));
        match usize::try_from(n) {
            Ok(choices) if (1..=most).contains(&n) => Ok(choices),
            _ => Err(ApiError::invalid("n", format!("`n` is {n}, this server makes 1 to {most} texts of a prompt"))),
        }
    }

    /// Whether the beginning of the prompt may come from the cache.
    pub(crate) fn reuse(&self) -> bool {
        self.cache_prompt.unwrap_or(true)
    }

    /// Tokens of a draft at most.
    pub(crate) fn most_drafted(&self) -> usize {
        self.most_drafted.map_or(usize::MAX, |most| most as usize)
    }

    /// Whom a prompt shares its beginning with: others of the same key, and of the same salt where there is one.
    pub(crate) fn owner(&self, caller: &Caller) -> u64 {
        let Some(salt) = self.cache_salt.as_deref().filter(|salt| !salt.is_empty()) else { return caller.owner };
        let mut hash = DefaultHasher::new();
        (caller.owner, salt).hash(&mut hash);
        // Scopes of keys have the highest bit clear, and the largest number belongs to no key.
        (hash.finish() | 1 << 63) & !1
    }

    /// How strongly each adapter counts; none for as the model was loaded.
    pub(crate) fn scales(&self, loaded: &Loaded) -> Result<Option<Vec<f32>>, ApiError> {
        match &self.lora {
            Some(list) => lora::scales(loaded, "lora", list).map(Some),
            None => match loaded.adapter(self.model.as_deref()) {
                Some(adapter) => Ok(Some(lora::with_one(loaded, adapter.number))),
                None => Ok(loaded.scales.lock().unwrap_or_else(PoisonError::into_inner).clone()),
            },
        }
    }

    /// A rule that allows only the named tokens.
    pub(crate) fn allowed(&self, loaded: &Loaded) -> Result<Option<Box<dyn Constraint>>, ApiError> {
        let Some(ids) = &self.allowed_token_ids else { return Ok(None) };
        let model = loaded.scheduler.model();
        let vocab = model.config.vocab;
        let mut mask = vec![0u32; vocab.div_ceil(32)];
        for &id in ids {
            if id as usize >= vocab {
                let message = format!("token {id} is not in the vocabulary of {vocab} tokens");
                return Err(ApiError::invalid("allowed_token_ids", message));
            }
            mask[id as usize / 32] |= 1 << (id % 32);
        }
        if ids.is_empty() {
            return Err(ApiError::invalid("allowed_token_ids", "`allowed_token_ids` allows no token at all"));
        }
        Ok(Some(Box::new(Allowed { mask })))
    }

    fn bias(&self, tokenizer: &Tokenizer, vocab: usize) -> Result<Vec<(u32, f32)>, ApiError> {
        let mut all = Vec::new();
        let number = |value: &Value| match value {
            Value::Bool(false) => Some(f32::NEG_INFINITY),
            other => other.as_f64().map(|v| v as f32),
        };
        let wrong = |what: String| ApiError::invalid("logit_bias", what);
        let encode = |text: &str| -> Result<Vec<u32>, ApiError> {
            Ok(tokenizer.encode(text, AddSpecial::No, ParseSpecial::No).map_err(kiln_engine::Error::from)?)
        };
        match &self.logit_bias {
            None => {}
            Some(Value::Object(map)) => {
                for (key, bias) in map {
                    let bias = number(bias).filter(|b| (-100.0..=100.0).contains(b));
                    let bias = bias.ok_or_else(|| wrong(format!("the bias of {key:?} must be -100 to 100")))?;
                    match key.parse::<u32>() {
                        Ok(id) => all.push((id, bias)),
                        // llama.cpp's users write texts here.
                        Err(_) => all.extend(encode(key)?.into_iter().map(|id| (id, bias))),
                    }
                }
            }
            Some(Value::Array(pairs)) => {
                for pair in pairs {
                    let (Some(what), Some(bias)) = (pair.get(0), pair.get(1).and_then(number)) else {
                        return Err(wrong(format!("`logit_bias` has {pair}; a token and a number or false is wanted")));
                    };
                    match what {
                        Value::String(text) => {
                            all.extend(encode(text)?.into_iter().map(|id| (id, bias)));
                        }
                        other => {
                            let id = other.as_u64().and_then(|id| u32::try_from(id).ok());
                            all.push((id.ok_or_else(|| wrong(format!("{other} is no token")))?, bias));
                        }
                    }
                }
            }
            Some(other) => return Err(wrong(format!("`logit_bias` is {other}, an object or a list is wanted"))),
        }
        if let Some((id, _)) = all.iter().find(|(id, _)| *id as usize >= vocab) {
            return Err(wrong(format!("token {id} is not in the vocabulary of {vocab} tokens")));
        }
        for word in self.bad_words.iter().flatten() {
            for text in [word.clone(), format!(" {}", word.trim_start())] {
                let ids = encode(&text)?;
                match ids[..] {
                    [id] => all.push((id, f32::NEG_INFINITY)),
                    _ if text != *word => {}
                    _ => {
                        let message = format!("{word:?} is {} tokens; only single ones can be forbidden", ids.len());
                        return Err(ApiError::unsupported("bad_words", message));
                    }
                }
            }
        }
        // The sampler takes the tokens in order, each once.
        all.sort_by_key(|(id, _)| *id);
        all.dedup_by_key(|(id, _)| *id);
        Ok(all)
    }
}

/// Texts that end an answer: one, or a list.
pub(crate) fn stop_strings(name: &str, value: Option<&Value>) -> Result<Vec<String>, ApiError> {
    let strings = match value {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(list)) => list
            .iter()
            .enumerate()
            .map(|(i, v)| {
                let text = v.as_str().map(str::to_owned);
                text.ok_or_else(|| ApiError::invalid(format!("{name}[{i}]"), format!("`{name}[{i}]` must be a string")))
            })
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(ApiError::invalid(name, format!("`{name}` must be a string or a list of strings"))),
    };
    if strings.len() > MOST_STOPS {
        return Err(ApiError::invalid(
            name,
            format!("`{name}` has {} texts, at most {MOST_STOPS} may be given", strings.len()),
        ));
    }
    // An empty text ends nothing; clients send it to say so.
    let strings: Vec<String> = strings.into_iter().filter(|s| !s.is_empty()).collect();
    match strings.iter().find(|s| s.chars().count() > LONGEST_STOP) {
        Some(_) => Err(ApiError::invalid(name, format!("a text of `{name}` is longer than {LONGEST_STOP} characters"))),
        None => Ok(strings),
    }
}

fn sampler_names(value: &Value) -> Result<Vec<SamplerKind>, ApiError> {
    let parsed = match value {
        Value::String(letters) => SamplerKind::parse_letters(letters),
        Value::Array(names) => names.iter().map(|n| SamplerKind::from_name(n.as_str().unwrap_or_default())).collect(),
        _ => return Err(ApiError::invalid("samplers", "`samplers` must be a list of names")),
    };
    parsed.map_err(|error| ApiError::invalid("samplers", error.to_string()))
}

/// Only some tokens, whatever came before.
struct Allowed {
    mask: Vec<u32>,
}

impl Constraint for Allowed {
    fn mask(&mut self) -> Result<Vec<u32>, String> {
        Ok(self.mask.clone())
    }

    fn accept(&mut self, _token: u32) -> Result<(), String> {
        Ok(())
    }

    fn is_complete(&mut self) -> bool {
        false
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Allowed { mask: self.mask.clone() })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn stops_are_one_text_or_a_list() {
        let strings = |value: Value| stop_strings("stop", Some(&value));
        assert_eq!(strings(json!("a")).expect("a text"), ["a"]);
        assert_eq!(strings(json!(["a", "", "b"])).expect("a list"), ["a", "b"]);
        assert_eq!(strings(json!(["a", 1])).expect_err("a number").param.as_deref(), Some("stop[1]"));
        assert!(strings(json!(1)).is_err() && strings(json!(vec!["x"; 17])).is_err());
        assert!(strings(json!("x".repeat(257))).is_err());
    }

    #[test]
    fn limits_have_many_names() {
        let params = |value: Value| serde_json::from_value::<Params>(value).expect("they parse").limit();
        assert_eq!(params(json!({"max_tokens": 5, "max_completion_tokens": 7})).expect("fine"), Some(7));
        assert_eq!(params(json!({"n_predict": -1})).expect("fine"), None);
        assert_eq!(params(json!({"max_tokens": null})).expect("fine"), None);
        assert_eq!(params(json!({"max_tokens": 0})).expect("fine"), Some(0));
        assert!(params(json!({"max_tokens": -2})).is_err() && params(json!({"max_completion_tokens": -1})).is_err());
    }
}
