//! Requests and pieces of answers as JSON, for bindings of other languages. The fields are those of OpenAI's API and of llama.cpp.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kiln_gguf::TensorType;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::chat::{Conversation, Format, Stop, ToolChoice};
use crate::error::RequestError;
use crate::llm::{Builder, Llm};
use crate::request::{Prompt, Request};
use crate::stream::Piece;
use crate::{CACHE_TYPES, Error, Message, Placing};

/// A request as JSON has it. Every field but the prompt or the messages may be absent or null.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Fields {
    prompt: Option<Value>,
    messages: Option<Vec<Message>>,
    max_tokens: Option<i64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i32>,
    min_p: Option<f32>,
    typical_p: Option<f32>,
    repeat_penalty: Option<f32>,
    repeat_last_n: Option<i32>,
    frequency_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    mirostat: Option<u8>,
    mirostat_tau: Option<f32>,
    mirostat_eta: Option<f32>,
    seed: Option<i64>,
    stop: Option<Texts>,
    ignore_eos: Option<bool>,
    min_tokens: Option<usize>,
    logprobs: Option<usize>,
    tokens: Option<bool>,
    logit_bias: Option<BTreeMap<String, f32>>,
    cache_prompt: Option<bool>,
    response_format: Option<Value>,
    json_schema: Option<Value>,
    grammar: Option<String>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_budget: Option<usize>,
    continue_final_message: Option<bool>,
}

/// One text or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Texts {
    One(String),
    Several(Vec<String>),
}

/// Options of a builder as JSON has them.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    device: Option<String>,
    threads: Option<usize>,
    context: Option<usize>,
    parallel: Option<usize>,
    gpu_layers: Option<usize>,
    split: Option<Vec<f64>>,
    cache_type_k: Option<String>,
    cache_type_v: Option<String>,
    chat_template: Option<String>,
    adapters: Vec<AdapterOption>,
    host_cache: Option<usize>,
    reproducible: bool,
    fallback: bool,
}

/// An adapter as JSON has it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AdapterOption {
    path: PathBuf,
    scale: Option<f32>,
}

/// A type of caches by its name.
fn cache_type(name: &str, given: Option<&str>) -> Result<TensorType, Error> {
    let Some(given) = given else { return Ok(TensorType::F16) };
    let found = CACHE_TYPES.into_iter().find(|ty| ty.name().eq_ignore_ascii_case(given));
    found.ok_or_else(|| {
        field(name, format!("must be one of {}", CACHE_TYPES.map(|ty| ty.name().to_lowercase()).join(", ")))
    })
}

impl Builder {
    /// A builder of JSON, with any of `device`, `threads`, `context`, `parallel`, `gpu_layers`, `split`, `cache_type_k`, `cache_type_v`,
    /// `chat_template`, `adapters` (`[{"path": ..., "scale": ...}]`), `host_cache`, `reproducible` and `fallback`. An unknown field is an
    /// error.
    pub fn from_json(json: &str) -> Result<Builder, Error> {
        let options: Options = serde_json::from_str(json).map_err(|why| RequestError::Json { why: why.to_string() })?;
        let caches = [("cache_type_k", &options.cache_type_k), ("cache_type_v", &options.cache_type_v)];
        let [keys, values] = caches.map(|(name, given)| cache_type(name, given.as_deref()));
        let mut builder = Llm::builder().cache_types(keys?, values?).parallel(options.parallel.unwrap_or(1));
        builder = builder.reproducible(options.reproducible).fallback(options.fallback);
        builder = builder.placing(Placing { split: options.split.unwrap_or_default(), ..Placing::default() });
        macro_rules! take {
            ($($name:ident),*) => { $(if let Some(value) = options.$name { builder = builder.$name(value); })* };
        }
        take!(threads, context, gpu_layers, chat_template, host_cache);
        if let Some(device) = &options.device {
            builder = builder.device(device);
        }
        for AdapterOption { path, scale } in options.adapters {
            builder = builder.adapter(path, scale.unwrap_or(1.0));
        }
        Ok(builder)
    }
}

fn field(name: &str, what: impl std::fmt::Display) -> Error {
    RequestError::Field { field: name.to_owned(), why: what.to_string() }.into()
}

/// OpenAI's `response_format`.
fn response_format(format: &Value) -> Result<Option<Format>, Error> {
    let schema = || format.get("schema").filter(|schema| !schema.is_null()).cloned();
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(schema().map_or_else(Format::json, Format::Schema))),
        Some("json_schema") => {
            let schema = format.pointer("/json_schema/schema").cloned().or_else(schema);
            Ok(Some(Format::Schema(schema.ok_or_else(|| field("response_format", "has no schema"))?)))
        }
        _ => Err(field("response_format.type", "must be text, json_object or json_schema")),
    }
}

/// OpenAI's `tool_choice`.
fn tool_choice(choice: &Value) -> Result<ToolChoice, Error> {
    match choice {
        Value::Null => Ok(ToolChoice::Auto),
        Value::String(word) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            _ => Err(field("tool_choice", "must be auto, none, required or a function")),
        },
        other => match other.pointer("/function/name").and_then(Value::as_str) {
            Some(name) => Ok(ToolChoice::Named(name.to_owned())),
            None => Err(field("tool_choice", "must be auto, none, required or a function")),
        },
    }
}

impl Fields {
    fn prompt(&mut self) -> Result<Prompt, Error> {
        match (self.prompt.take(), self.messages.take()) {
            (Some(_), Some(_)) => Err(field("prompt", "and `messages` exclude each other")),
            (None, Some(messages)) => self.conversation(messages).map(|chat| Prompt::Chat(Box::new(chat))),
            (Some(Value::String(text)), None) => Ok(Prompt::Text(text)),
            (Some(Value::Array(ids)), None) => {
                let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
                let ids: Option<Vec<u32>> = ids.iter().map(id).collect();
                ids.map(Prompt::Tokens).ok_or_else(|| field("prompt", "must hold ids of tokens"))
            }
            (Some(_), None) => Err(field("prompt", "must be a text or a list of ids")),
            (None, None) => Err(field("messages", "or `prompt` must be given")),
        }
    }

    fn conversation(&mut self, messages: Vec<Message>) -> Result<Conversation, Error> {
        let tools = self.tools.take().unwrap_or_default();
        let tool_choice = self.tool_choice.as_ref().map(tool_choice).transpose()?.unwrap_or_default();
        if tools.is_empty() && matches!(tool_choice, ToolChoice::Required | ToolChoice::Named(_)) {
            return Err(field("tool_choice", "asks for a call, and there are no tools"));
        }
        Ok(Conversation {
            messages,
            tools,
            tool_choice,
            parallel_calls: self.parallel_tool_calls.unwrap_or(true),
            kwargs: self.chat_template_kwargs.take().unwrap_or_default(),
            continues: self.continue_final_message.unwrap_or(false),
            thinking_budget: self.reasoning_budget,
            ..Conversation::default()
        })
    }

    fn format(&mut self) -> Result<Option<Format>, Error> {
        let mut found = Vec::new();
        if let Some(format) = self.response_format.take() {
            found.extend(response_format(&format)?);
        }
        found.extend(self.json_schema.take().map(Format::Schema));
        found.extend(self.grammar.take().map(Format::Grammar));
        found.extend(self.regex.take().map(Format::Regex));
        found.extend(self.choice.take().map(Format::Choice));
        if found.len() > 1 {
            return Err(field("response_format", "json_schema, grammar, regex and choice exclude each other"));
        }
        Ok(found.pop())
    }
}

impl Request {
    /// A request of JSON: `{"messages": [...]}` or `{"prompt": "..."}`, with `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`,
    /// `seed`, `stop`, `tools`, `tool_choice`, `response_format`, `logprobs` and others. An unknown field is an error.
    pub fn from_json(llm: &Llm, json: &str) -> Result<Request, Error> {
        let mut fields: Fields =
            serde_json::from_str(json).map_err(|why| RequestError::Json { why: why.to_string() })?;
        let (prompt, format) = (fields.prompt()?, fields.format()?);
        let bias = match fields.logit_bias.take() {
            None => Vec::new(),
            Some(all) => {
                let one = |(id, bias): (String, f32)| id.parse().map(|id| (id, bias));
                all.into_iter()
                    .map(one)
                    .collect::<Result<Vec<(u32, f32)>, _>>()
                    .map_err(|why| field("logit_bias", why))?
            }
        };
        let mut request = llm.generate(prompt).sampling(|s| {
            macro_rules! take {
                ($($name:ident),*) => { $(if let Some(value) = fields.$name { s.$name = value; })* };
            }
            take!(temperature, top_p, top_k, min_p, typical_p, repeat_penalty, repeat_last_n);
            take!(frequency_penalty, presence_penalty, mirostat, mirostat_tau, mirostat_eta);
            if let Some(seed) = fields.seed {
                s.seed = Some(seed).filter(|seed| *seed != -1).map(i64::cast_unsigned);
            }
            if !bias.is_empty() {
                s.logit_bias = bias;
            }
        });
        // A negative number is no limit, as llama.cpp has it.
        if let Some(tokens) = fields.max_tokens.and_then(|tokens| usize::try_from(tokens).ok()) {
            request = request.max_tokens(tokens);
        }
        if let Some(format) = format {
            request = request.format(format);
        }
        if let Some(top) = fields.logprobs {
            request = request.logprobs(top);
        }
        if fields.tokens == Some(true) {
            request = request.tokens();
        }
        Ok(request.reuse(fields.cache_prompt.unwrap_or(true)).stop_rule(|rule| {
            match fields.stop.take() {
                None => {}
                Some(Texts::One(text)) => rule.strings.push(text),
                Some(Texts::Several(texts)) => rule.strings.extend(texts),
            }
            rule.ignore_end = fields.ignore_eos.unwrap_or(false);
            rule.min_tokens = fields.min_tokens.unwrap_or(0);
        }))
    }
}

impl Stop {
    /// OpenAI's word for it: `stop` or `length`; `cancelled` for a request that was.
    pub fn finish_reason(&self) -> &'static str {
        match self {
            Stop::End | Stop::Text(_) | Stop::Token(_) => "stop",
            Stop::Limit | Stop::Context => "length",
            Stop::Cancelled => "cancelled",
        }
    }
}

impl Piece {
    /// The piece as a JSON object whose `type` is `prompt`, `token`, `text`, `reasoning`, `call`, `arguments`, `call_end` or `end`.
    pub fn to_json(&self, llm: &Llm) -> Value {
        match self {
            Piece::Prompt(tokens) => json!({"type": "prompt", "tokens": tokens}),
            Piece::Token(token) => {
                let spelled = |id: u32| {
                    let bytes = llm.model().tokenizer.piece(id).unwrap_or_default();
                    String::from_utf8_lossy(bytes).into_owned()
                };
                let mut said = json!({"type": "token", "id": token.id, "text": spelled(token.id)});
                if let Some(logprobs) = &token.logprobs {
                    said["logprob"] = json!(logprobs.logprob);
                    let top = logprobs
                        .top
                        .iter()
                        .map(|(id, logprob)| json!({"id": id, "text": spelled(*id), "logprob": logprob}));
                    said["top_logprobs"] = top.collect();
                }
                said
            }
            Piece::Text(text) => json!({"type": "text", "text": text}),
            Piece::Reasoning(text) => json!({"type": "reasoning", "text": text}),
            Piece::CallStart { index, id, name } => json!({"type": "call", "index": index, "id": id, "name": name}),
            Piece::CallArguments { index, text } => json!({"type": "arguments", "index": index, "text": text}),
            Piece::CallEnd { index } => json!({"type": "call_end", "index": index}),
            Piece::End { stop, usage } => json!({
                "type": "end",
                "finish_reason": stop.finish_reason(),
                "stop_text": if let Stop::Text(text) = stop { Some(text) } else { None },
                "usage": {
                    "prompt_tokens": usage.prompt_tokens,
                    "cached_tokens": usage.cached_tokens,
                    "completion_tokens": usage.generated_tokens,
                    "total_tokens": usage.prompt_tokens + usage.generated_tokens,
                },
                "timings": {
                    "waiting_ms": usage.waiting.as_secs_f64() * 1e3,
                    "prompt_ms": usage.reading.as_secs_f64() * 1e3,
                    "predicted_ms": usage.writing.as_secs_f64() * 1e3,
                },
            }),
        }
    }
}
