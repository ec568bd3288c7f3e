//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial, Tokenizer};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Pace, Totals, chat_logprobs, finish_reason, stop_reason};
use crate::api_error::ApiError;
use crate::app::{App, fresh_id, now};
use crate::body::Body;
use crate::chat::{self, Chat, ThinkingBudget, ToolChoice};
use crate::encode::{Purpose, encode};
use crate::encoder::{Frames, Framing, ResponseEncoder, json as reply, stream};
use crate::generate::{Answer, Generation, Job, Part};
use crate::guard::Caller;
use crate::params::Params;
use crate::prep_pool::blocking;
use crate::registry::Loaded;
use crate::response_format::ResponseFormatFields;

/// What a client may ask of a stream.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "StreamOptions")]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: Option<bool>,
    pub(crate) continuous_usage_stats: Option<bool>,
    #[allow(dead_code, reason = "clients send it; it has no meaning here")]
    include_obfuscation: Option<bool>,
}

/// Fields that clients send and that change nothing here.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "WithoutEffect")]
#[allow(dead_code, reason = "they are known, which is all")]
pub(crate) struct WithoutEffect {
    user: Option<Value>,
    safety_identifier: Option<Value>,
    metadata: Option<Value>,
    store: Option<Value>,
    service_tier: Option<Value>,
    prompt_cache_key: Option<Value>,
    prompt_cache_retention: Option<Value>,
    prompt_cache_options: Option<Value>,
    verbosity: Option<Value>,
    moderation: Option<Value>,
    priority: Option<Value>,
}

/// The fields of the API beside those about sampling and shape.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "ChatRequest")]
pub(crate) struct Fields {
    pub(crate) model: Option<String>,
    messages: Option<Vec<Value>>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    logprobs: Option<bool>,
    top_logprobs: Option<i64>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    functions: Option<Value>,
    function_call: Option<Value>,
    reasoning_effort: Option<String>,
    reasoning_format: Option<String>,
    /// Tokens that the model may think, in llama.cpp's words.
    thinking_budget_tokens: Option<i64>,
    reasoning_budget_tokens: Option<i64>,
    /// The same in vLLM's words.
    thinking_token_budget: Option<i64>,
    include_reasoning: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    chat_template: Option<Value>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    return_token_ids: Option<bool>,
    return_progress: Option<bool>,
    timings_per_token: Option<bool>,
    documents: Option<Vec<Value>>,
    /// What the answer will probably be: `{"type": "content", "content": "..."}`. Where it is right, the answer comes faster.
    prediction: Option<Value>,
    audio: Option<Value>,
    modalities: Option<Vec<String>>,
    web_search_options: Option<Value>,
}

impl Fields {
    fn refuse(&self) -> Result<(), ApiError> {
        let refused = [
            ("functions", self.functions.is_some(), "`functions` is now `tools`"),
            ("function_call", self.function_call.is_some(), "`function_call` is now `tool_choice`"),
            ("chat_template", self.chat_template.is_some(), "a request cannot bring a template of its own"),
            ("audio", self.audio.is_some(), "this server makes no audio"),
            ("web_search_options", self.web_search_options.is_some(), "this server searches no web"),
        ];
        if let Some((name, _, why)) = refused.into_iter().find(|(_, given, _)| *given) {
            return Err(ApiError::unsupported(name, why));
        }
        if self.modalities.iter().flatten().any(|kind| kind != "text") {
            return Err(ApiError::unsupported("modalities", "this server makes text only"));
        }
        if self.stream_options.is_some() && self.stream != Some(true) {
            return Err(ApiError::invalid("stream_options", "`stream_options` may only be given with `stream: true`"));
        }
        if self.add_generation_prompt == Some(true) && self.continue_final_message == Some(true) {
            let message = "`continue_final_message` and `add_generation_prompt` exclude each other";
            return Err(ApiError::invalid("continue_final_message", message));
        }
        Ok(())
    }

    fn logprobs(&self) -> Result<Option<usize>, ApiError> {
        match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (false, None | Some(0)) => Ok(None),
            (false, Some(_)) => Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs: true`")),
            (true, top) => match usize::try_from(top.unwrap_or(0)) {
                Ok(top) if top <= 20 => Ok(Some(top)),
                _ => Err(ApiError::invalid("top_logprobs", "`top_logprobs` must be 0 to 20")),
            },
        }
    }

    fn keep_reasoning(&self) -> Result<Option<bool>, ApiError> {
        match self.reasoning_format.as_deref() {
            None | Some("auto") => Ok(None),
            Some("none") => Ok(Some(true)),
            Some("deepseek" | "deepseek-legacy") => Ok(Some(false)),
            Some(other) => {
                let message = format!("`reasoning_format` is {other:?}; it must be none, auto or deepseek");
                Err(ApiError::invalid("reasoning_format", message))
            }
        }
    }

    /// The tokens that the client predicts, as far as they fit the context.
    fn predicted(&self, loaded: &Loaded) -> Result<Option<Vec<u32>>, ApiError> {
        let wrong = || {
            let want = "`prediction` must be {\"type\": \"content\", \"content\": a text or a list of texts}";
            ApiError::invalid("prediction", want)
        };
        let Some(prediction) = self.prediction.as_ref().filter(|value| !value.is_null()) else { return Ok(None) };
        if prediction.get("type").and_then(Value::as_str).is_some_and(|kind| kind != "content") {
            return Err(wrong());
        }
        let part = |part: &Value| part.get("text").and_then(Value::as_str).map(str::to_owned).ok_or_else(wrong);
        let text = match prediction.get("content") {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(parts)) => parts.iter().map(part).collect::<Result<String, _>>()?,
            _ => return Err(wrong()),
        };
        encode(loaded, Purpose::Cut, &text, AddSpecial::No, ParseSpecial::No).map(Some)
    }

    /// The conversation that the fields describe.
    pub(crate) fn chat(&self) -> Result<Chat, ApiError> {
        self.refuse()?;
        let values = self.messages.as_deref().ok_or_else(|| ApiError::invalid("messages", "`messages` is missing"))?;
        let mut kwargs = self.chat_template_kwargs.clone().unwrap_or_default();
        if let Some(documents) = &self.documents {
            kwargs.insert("documents".to_owned(), Value::Array(documents.clone()));
        }
        chat::effort(&mut kwargs, "reasoning_effort", self.reasoning_effort.as_deref())?;
        let (tools, tool_choice) = tools(self.tools.as_deref().unwrap_or_default(), self.tool_choice.as_ref())?;
        Ok(Chat {
            messages: chat::messages(values)?,
            tools,
            tool_choice,
            parallel_calls: self.parallel_tool_calls.unwrap_or(true),
            kwargs,
            continues: self.continue_final_message.unwrap_or(false),
            no_generation_prompt: self.add_generation_prompt == Some(false),
            keep_reasoning: self.keep_reasoning()?,
            thinking_budget: self
                .thinking_budget_tokens
                .or(self.reasoning_budget_tokens)
                .or(self.thinking_token_budget)
                .map(ThinkingBudget::from_number),
            logprobs: self.logprobs()?,
            shape: None,
        })
    }
}

/// Letters of a tool's name at most.
const LONGEST_TOOL_NAME: usize = 64;

/// Tools as they were sent, checked, and which of them may be called.
pub(crate) fn tools(tools: &[Value], choice: Option<&Value>) -> Result<(Vec<Value>, ToolChoice), ApiError> {
    if tools.len() > 128 {
        return Err(ApiError::invalid(
            "tools",
            format!("{} tools are too many, at most 128 may be given", tools.len()),
        ));
    }
    for (i, tool) in tools.iter().enumerate() {
        match tool.get("type").and_then(Value::as_str) {
            Some("function") => {}
            other => {
                let message = format!("`tools[{i}].type` is {}; only functions are served", other.unwrap_or("missing"));
                return Err(ApiError::unsupported(format!("tools[{i}].type"), message));
            }
        }
        let param = format!("tools[{i}].function.name");
        let name = tool.get("function").and_then(|f| f.get("name")).and_then(Value::as_str);
        let name = name.ok_or_else(|| ApiError::invalid(param.clone(), format!("`{param}` must be a string")))?;
        chat::check_tool_name(&param, name, LONGEST_TOOL_NAME)?;
    }
    let mut tools = tools.to_vec();
    let wrong = || ApiError::invalid("tool_choice", "`tool_choice` must be none, auto, required or name a function");
    let choice = match choice {
        None | Some(Value::Null) => ToolChoice::Auto,
        Some(Value::String(text)) => mode(text).ok_or_else(wrong)?,
        Some(object) => match object.get("type").and_then(Value::as_str) {
            Some("function") => {
                let name = object.get("function").and_then(|f| f.get("name")).or_else(|| object.get("name"));
                ToolChoice::Named(name.and_then(Value::as_str).ok_or_else(wrong)?.to_owned())
            }
            Some("allowed_tools") => {
                let allowed = object.get("allowed_tools").unwrap_or(object);
                let named = allowed.get("tools").and_then(Value::as_array).ok_or_else(wrong)?;
                let name = |tool: &Value| tool.get("function").unwrap_or(tool).get("name").cloned();
                let names: Vec<Value> = named.iter().filter_map(name).collect();
                tools.retain(|tool| names.contains(&tool["function"]["name"]));
                mode(allowed.get("mode").and_then(Value::as_str).unwrap_or("auto")).ok_or_else(wrong)?
            }
            _ => return Err(wrong()),
        },
    };
    match choice {
        ToolChoice::Required | ToolChoice::Named(_) if tools.is_empty() => {
            Err(ApiError::invalid("tool_choice", "`tool_choice` asks for a call, but there are no tools"))
        }
        choice => Ok((tools, choice)),
    }
}

fn mode(text: &str) -> Option<ToolChoice> {
    match text {
        "auto" => Some(ToolChoice::Auto),
        "none" => Some(ToolChoice::None),
        "required" => Some(ToolChoice::Required),
        _ => None,
    }
}

/// Serves the request.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let (fields, params, shape) = (body.get::<Fields>()?, body.get::<Params>()?, body.get::<ResponseFormatFields>()?);
    body.get::<WithoutEffect>()?;
    let leftover = body.leftover(&app)?;
    let (fields, job, choices) = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        let chat = Chat { shape: shape.shape()?, ..fields.chat()? };
        let mut job: Job = chat.job(&loaded, &params, &caller)?;
        job.request.prediction = fields.predicted(&loaded)?;
        let choices = job.request.choices;
        Ok((fields, job, choices))
    })
    .await?;
    let pace = Pace::new(job.request.prompt.len());
    let generation = Generation::start(&app, vec![job], "call_")?;
    let head = Head {
        id: fresh_id("chatcmpl-"),
        created: now(),
        model: generation.loaded().name.clone(),
        tokenizer: Arc::clone(&generation.loaded().scheduler.model().tokenizer),
        token_ids: fields.return_token_ids.unwrap_or(false),
        hide_reasoning: fields.include_reasoning == Some(false),
        reasoning_field: match app.settings.request_defaults.reasoning_field {
            "" => "reasoning_content",
            named => named,
        },
    };
    let response = if fields.stream.unwrap_or(false) {
        let options = fields.stream_options.unwrap_or_default();
        let encoder = ChatEncoder {
            head,
            choices,
            include_usage: options.include_usage.unwrap_or(false),
            continuous: options.continuous_usage_stats.unwrap_or(false),
            progress: fields.return_progress.unwrap_or(false),
            timings: fields.timings_per_token.unwrap_or(false),
            pace,
            called: vec![false; choices],
            totals: Totals::default(),
        };
        stream(&app, generation, encoder, Framing::Events).await?
    } else {
        reply(&head.whole(&generation.collect().await?, choices))
    };
    Ok(leftover.tell(response))
}

/// What all answers to one request have in common.
struct Head {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    token_ids: bool,
    hide_reasoning: bool,
    reasoning_field: &'static str,
}

impl Head {
    fn whole(&self, answers: &[Answer], choices: usize) -> Value {
        let totals = Totals::of(answers, choices);
        let choices: Vec<Value> = answers.iter().enumerate().map(|(i, answer)| self.choice(i, answer)).collect();
        json!({
            "id": self.id, "object": "chat.completion", "created": self.created, "model": self.model,
            "system_fingerprint": fingerprint(), "choices": choices, "usage": totals.openai(), "timings": totals.timings(),
        })
    }

    fn choice(&self, index: usize, answer: &Answer) -> Value {
        let only_calls = answer.text.is_empty() && !answer.calls.is_empty();
        let content = if only_calls { Value::Null } else { json!(answer.text) };
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !answer.reasoning.is_empty() && !self.hide_reasoning {
            message[self.reasoning_field] = json!(answer.reasoning);
        }
        if !answer.calls.is_empty() {
            let call = |call: &crate::generate::Call| {
                let function = json!({"name": call.name, "arguments": call.arguments});
                json!({"id": call.id, "type": "function", "function": function})
            };
            message["tool_calls"] = answer.calls.iter().map(call).collect();
        }
        let stop = answer.stop.clone().unwrap_or(crate::generate::Stop::End);
        let mut choice = json!({
            "index": index, "message": message, "logprobs": chat_logprobs(&self.tokenizer, &answer.tokens),
            "finish_reason": finish_reason(&stop, !answer.calls.is_empty()), "stop_reason": stop_reason(&stop),
        });
        if self.token_ids {
            choice["token_ids"] = answer.tokens.iter().map(|t| json!(t.id)).collect();
        }
        choice
    }
}

/// Says which program and model answered.
pub(crate) fn fingerprint() -> String {
    format!("kiln-{}", env!("CARGO_PKG_VERSION"))
}

struct ChatEncoder {
    head: Head,
    choices: usize,
    include_usage: bool,
    continuous: bool,
    progress: bool,
    timings: bool,
    pace: Pace,
    called: Vec<bool>,
    totals: Totals,
}

impl ChatEncoder {
    fn chunk(&self, choices: Value) -> Value {
        let head = &self.head;
        let mut chunk = json!({
            "id": head.id, "object": "chat.completion.chunk", "created": head.created, "model": head.model,
            "system_fingerprint": fingerprint(), "choices": choices,
        });
        if self.continuous {
            chunk["usage"] = self.pace.usage();
        } else if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    fn delta(&self, index: usize, delta: Value, tokens: &[crate::generate::Token], finish: Option<&str>) -> Value {
        let logprobs = chat_logprobs(&self.head.tokenizer, tokens);
        let mut choice = json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish});
        if self.head.token_ids {
            choice["token_ids"] = tokens.iter().map(|t| json!(t.id)).collect();
        }
        self.chunk(json!([choice]))
    }
}

impl ChatEncoder {
    /// A piece of what is said or thought.
    fn said(&mut self, choice: usize, name: &str, text: &str, tokens: &[crate::generate::Token], out: &mut Frames) {
        self.pace.write(tokens.len());
        let mut chunk = self.delta(choice, json!({ name: text }), tokens, None);
        if self.timings {
            chunk["timings"] = self.pace.timings();
        }
        out.data(&chunk);
    }
}

impl ResponseEncoder for ChatEncoder {
    fn begin(&mut self, out: &mut Frames) {
        // A client may not see a choice before all lower ones.
        for index in 0..self.choices {
            out.data(&self.delta(index, json!({"role": "assistant", "content": ""}), &[], None));
        }
    }

    fn part(&mut self, part: Part, out: &mut Frames) {
        match part {
            Part::Text { choice, text, tokens } => self.said(choice, "content", &text, &tokens, out),
            Part::Reasoning { tokens, .. } if self.head.hide_reasoning => self.pace.write(tokens.len()),
            Part::Reasoning { choice, text, tokens } => {
                self.said(choice, self.head.reasoning_field, &text, &tokens, out);
            }
            Part::CallStart { choice, index, id, name } => {
                self.called[choice] = true;
                let function = json!({"name": name, "arguments": ""});
                let call = json!({"index": index, "id": id, "type": "function", "function": function});
                out.data(&self.delta(choice, json!({"tool_calls": [call]}), &[], None));
            }
            Part::CallArguments { choice, index, text } => {
                let call = json!({"index": index, "function": {"arguments": text}});
                out.data(&self.delta(choice, json!({"tool_calls": [call]}), &[], None));
            }
            Part::End { choice, stop, usage, tokens, reasoning_tokens } => {
                self.totals.add(choice, self.choices, &usage, reasoning_tokens);
                self.pace.write(tokens.len());
                let finish = finish_reason(&stop, self.called[choice]);
                let mut chunk = self.delta(choice, json!({}), &tokens, Some(finish));
                chunk["choices"][0]["stop_reason"] = stop_reason(&stop);
                if !self.include_usage {
                    chunk["timings"] = self.totals.timings();
                }
                out.data(&chunk);
            }
            Part::Progress { cached, read } => {
                self.pace.read(cached, read);
                if self.progress {
                    let mut chunk = self.chunk(json!([]));
                    chunk["prompt_progress"] = self.pace.progress();
                    out.data(&chunk);
                }
            }
            Part::Failed(refusal) => out.data(&refusal.openai()),
            Part::CallEnd { .. } => {}
        }
    }

    fn finish(&mut self, out: &mut Frames) {
        if self.include_usage {
            let mut chunk = self.chunk(json!([]));
            chunk["usage"] = self.totals.openai();
            chunk["timings"] = self.totals.timings();
            out.data(&chunk);
        }
        out.done();
    }
}
