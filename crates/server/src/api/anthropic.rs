//! `POST /v1/messages` and `/v1/messages/count_tokens`, as Anthropic's clients speak.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use kiln_engine::text::{Content, Function, Message, ToolCall};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::Totals;
use crate::api_error::{ApiError, Kind};
use crate::app::{App, fresh_id};
use crate::body::Body;
use crate::chat::{Chat, ThinkingBudget, ToolChoice, check_tool_name, effort, thinking};
use crate::encoder::{Frames, Framing, ResponseEncoder, json as reply, stream};
use crate::generate::{Answer, Generation, Part, Stop};
use crate::guard::Caller;
use crate::media;
use crate::params::{Params, stop_strings};
use crate::prep_pool::blocking;
use crate::response_format;

/// Letters of a tool's name at most.
const LONGEST_TOOL_NAME: usize = 128;

/// Fields that clients of this API send and that change nothing here.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "MessageWithoutEffect")]
#[allow(dead_code, reason = "they are known, which is all")]
struct WithoutEffect {
    metadata: Option<Value>,
    service_tier: Option<Value>,
    cache_control: Option<Value>,
    container: Option<Value>,
    context_management: Option<Value>,
    inference_geo: Option<Value>,
    speed: Option<Value>,
}

/// The fields of the API beside those about sampling.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "MessageRequest")]
pub(crate) struct Fields {
    model: Option<String>,
    messages: Option<Vec<Value>>,
    system: Option<Value>,
    stop_sequences: Option<Value>,
    stream: Option<bool>,
    thinking: Option<Value>,
    output_config: Option<Value>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
}

impl Fields {
    fn chat(&self) -> Result<Chat, ApiError> {
        let values = self.messages.as_deref().ok_or_else(|| ApiError::invalid("messages", "`messages` is missing"))?;
        let mut messages = Vec::new();
        if let Some(system) = self.system.as_ref().filter(|s| !s.is_null()) {
            messages.push(Message::new("system", system_text(system)?));
        }
        for (i, value) in values.iter().enumerate() {
            message(i, value, &mut messages)?;
        }
        let mut kwargs = Map::new();
        let config = self.output_config.as_ref();
        effort(&mut kwargs, "output_config.effort", config.and_then(|c| c.get("effort")).and_then(Value::as_str))?;
        match self.thinking.as_ref().and_then(|t| t.get("type")).and_then(Value::as_str) {
            Some("disabled") => thinking(&mut kwargs, Some(false), None),
            Some(_) => thinking(&mut kwargs, Some(true), None),
            None => {}
        }
        let budget = self.thinking.as_ref().and_then(|t| t.get("budget_tokens")).and_then(Value::as_i64);
        let thinking_budget = budget.map(ThinkingBudget::from_number);
        let shape = match config.and_then(|c| c.get("format")).filter(|f| !f.is_null()) {
            Some(format) => response_format::response_format("output_config.format", format)?,
            None => None,
        };
        let (tools, tool_choice, parallel_calls) = self.tools()?;
        // The client has begun the answer itself.
        let continues = messages.last().is_some_and(|m| m.role == "assistant" && m.tool_calls.is_empty());
        Ok(Chat {
            messages,
            tools,
            tool_choice,
            parallel_calls,
            shape,
            kwargs,
            continues,
            thinking_budget,
            ..Chat::default()
        })
    }

    fn tools(&self) -> Result<(Vec<Value>, ToolChoice, bool), ApiError> {
        let mut tools = Vec::new();
        for (i, tool) in self.tools.iter().flatten().enumerate() {
            if let Some(kind) = tool.get("type").and_then(Value::as_str).filter(|kind| *kind != "custom") {
                log::info!("a tool of type {kind} is run by no server of ours and left out");
                continue;
            }
            let name = tool.get("name").and_then(Value::as_str);
            let param = format!("tools[{i}].name");
            let name = name.ok_or_else(|| ApiError::invalid(param.clone(), format!("`{param}` must be a string")))?;
            check_tool_name(&param, name, LONGEST_TOOL_NAME)?;
            let mut function = json!({"name": name});
            if let Some(description) = tool.get("description").filter(|d| !d.is_null()) {
                function["description"] = description.clone();
            }
            function["parameters"] = tool.get("input_schema").cloned().unwrap_or_else(response_format::object);
            if let Some(strict) = tool.get("strict").filter(|strict| strict.is_boolean()) {
                function["strict"] = strict.clone();
            }
            tools.push(json!({"type": "function", "function": function}));
        }
        let choice = self.tool_choice.as_ref();
        let parallel = choice.and_then(|c| c.get("disable_parallel_tool_use")).and_then(Value::as_bool) != Some(true);
        let wrong = || ApiError::invalid("tool_choice", "`tool_choice.type` must be auto, any, tool or none");
        let choice = match choice.and_then(|c| c.get("type")).and_then(Value::as_str) {
            None if choice.is_none_or(Value::is_null) => ToolChoice::Auto,
            Some("auto") => ToolChoice::Auto,
            Some("any") => ToolChoice::Required,
            Some("none") => ToolChoice::None,
            Some("tool") => {
                let name = choice.and_then(|c| c.get("name")).and_then(Value::as_str).ok_or_else(wrong)?;
                ToolChoice::Named(name.to_owned())
            }
            _ => return Err(wrong()),
        };
        if tools.is_empty() && matches!(choice, ToolChoice::Required | ToolChoice::Named(_)) {
            return Err(ApiError::invalid("tool_choice", "`tool_choice` asks for a call, but there are no tools"));
        }
        Ok((tools, choice, parallel))
    }
}

/// The system prompt: a text or blocks of text.
fn system_text(system: &Value) -> Result<String, ApiError> {
    match system {
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => {
            let text = |(i, block): (usize, &Value)| {
                let text = block.get("text").and_then(Value::as_str);
                let param = format!("system[{i}].text");
                let text =
                    text.ok_or_else(|| ApiError::invalid(param.clone(), format!("`{param}` must be a string")))?;
                Ok(steady(text))
            };
            Ok(blocks.iter().enumerate().map(text).collect::<Result<Vec<String>, ApiError>>()?.join("\n"))
        }
        _ => Err(ApiError::invalid("system", "`system` must be a string or a list of blocks")),
    }
}

/// A header that some clients put in front differs in every request, which would spoil the cache of beginnings.
fn steady(text: &str) -> String {
    if !text.starts_with("x-anthropic-billing-header:") {
        return text.to_owned();
    }
    let Some(at) = text.find("cch=").map(|at| at + 4) else { return text.to_owned() };
    let end = text[at..].find(|c: char| !c.is_ascii_alphanumeric()).map_or(text.len(), |end| at + end);
    format!("{}{}{}", &text[..at], "X".repeat(end - at), &text[end..])
}

/// One message, which may become several: results of tools come first.
fn message(index: usize, value: &Value, out: &mut Vec<Message>) -> Result<(), ApiError> {
    let at = |field: &str| format!("messages[{index}]{field}");
    let role = value.get("role").and_then(Value::as_str).unwrap_or_default();
    if !["user", "assistant", "system"].contains(&role) {
        return Err(ApiError::invalid(at(".role"), format!("`{}` must be user, assistant or system", at(".role"))));
    }
    let blocks = match value.get("content") {
        Some(Value::String(text)) => {
            out.push(Message::new(role, text.as_str()));
            return Ok(());
        }
        Some(Value::Array(blocks)) => blocks,
        _ => return Err(ApiError::invalid(at(".content"), format!("`{}` must be a string or blocks", at(".content")))),
    };
    let mut message = Message { role: role.to_owned(), ..Message::default() };
    let (mut texts, mut thoughts) = (Vec::new(), Vec::new());
    for (n, block) in blocks.iter().enumerate() {
        let param = at(&format!(".content[{n}]"));
        let text = |field: &str| {
            let text = block.get(field).and_then(Value::as_str).map(str::to_owned);
            text.ok_or_else(|| {
                ApiError::invalid(format!("{param}.{field}"), format!("`{param}.{field}` must be a string"))
            })
        };
        match block.get("type").and_then(Value::as_str) {
            Some("text") => texts.push(text_part(&text("text")?)),
            Some("thinking") => thoughts.push(text("thinking")?),
            Some("redacted_thinking") => {}
            Some("tool_use") => message.tool_calls.push(ToolCall {
                id: Some(text("id")?),
                kind: "function".into(),
                function: Function { name: text("name")?, arguments: block.get("input").cloned().unwrap_or(json!({})) },
            }),
            Some("tool_result") => {
                let failed = block.get("is_error").and_then(Value::as_bool) == Some(true);
                let content = tool_answer(&format!("{param}.content"), block.get("content"), failed)?;
                out.push(Message { tool_call_id: Some(text("tool_use_id")?), content, ..Message::new("tool", "") });
            }
            Some("document") => texts.push(text_part(&document(&param, block)?)),
            Some(kind) => {
                if let Some(picture) = media::part(&param, block) {
                    texts.push(picture?);
                    continue;
                }
                let message = format!("`{param}` is of type {kind:?}, which this model does not take");
                return Err(ApiError { kind: Kind::UnsupportedValue, message, param: Some(param) });
            }
            None => return Err(ApiError::invalid(param.clone(), format!("`{param}` has no type"))),
        }
    }
    if !thoughts.is_empty() {
        message.reasoning_content = Some(thoughts.join("\n"));
    }
    if !texts.is_empty() {
        message.content = joined(texts);
    }
    if message.content != Content::None || !message.tool_calls.is_empty() || role == "assistant" {
        out.push(message);
    }
    Ok(())
}

fn text_part(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// Parts as they are where pictures are among them, else one text.
fn joined(parts: Vec<Value>) -> Content {
    let parts = Content::Parts(parts);
    if media::are_in(&parts) { parts } else { parts.to_text().into() }
}

/// A tool's answer.
fn tool_answer(param: &str, value: Option<&Value>, failed: bool) -> Result<Content, ApiError> {
    Ok(match crate::chat::content(param, value)? {
        shown @ Content::Parts(_) if media::are_in(&shown) => shown,
        told if failed => format!("Error: {}", told.to_text()).into(),
        told => told.to_text().into(),
    })
}

fn document(param: &str, block: &Value) -> Result<String, ApiError> {
    let source = block.get("source");
    let text = source.and_then(|s| s.get("data")).and_then(Value::as_str);
    match (source.and_then(|s| s.get("type")).and_then(Value::as_str), text) {
        (Some("text"), Some(text)) => Ok(text.to_owned()),
        _ => {
            let message = format!("`{param}.source` must be of type text");
            Err(ApiError { kind: Kind::UnsupportedValue, message, param: Some(format!("{param}.source")) })
        }
    }
}

/// How many tokens a conversation is.
pub(crate) async fn count(State(app): State<Arc<App>>, mut body: Body) -> Result<Response, ApiError> {
    let fields = body.get::<Fields>()?;
    let tokens = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        fields.chat()?.count(&loaded)
    })
    .await?;
    Ok(reply(&json!({"input_tokens": tokens})))
}

/// Serves the request.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let (fields, mut params) = (body.get::<Fields>()?, body.get::<Params>()?);
    body.get::<WithoutEffect>()?;
    let leftover = body.leftover(&app)?;
    let request = caller.request.clone();
    let (streams, job) = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        let stops = stop_strings("stop_sequences", fields.stop_sequences.as_ref())?;
        params.stop = Some(json!(stops));
        params.n = None;
        Ok((fields.stream.unwrap_or(false), fields.chat()?.job(&loaded, &params, &caller)?))
    })
    .await?;
    let prompt = job.request.prompt.len();
    let generation = Generation::start(&app, vec![job], "toolu_")?;
    let (id, model) = (fresh_id("msg_"), generation.loaded().name.clone());
    let response = if streams {
        let encoder = MessageEncoder { id, model, request, prompt, open: None, blocks: 0, called: false };
        stream(&app, generation, encoder, Framing::Events).await?
    } else {
        let answer = generation.collect().await?.into_iter().next().unwrap_or_default();
        reply(&whole(&id, &model, &answer))
    };
    Ok(leftover.tell(response))
}

fn stop_names(stop: &Stop, called: bool) -> (&'static str, Value) {
    match stop {
        Stop::Limit => ("max_tokens", Value::Null),
        Stop::Context => ("model_context_window_exceeded", Value::Null),
        _ if called => ("tool_use", Value::Null),
        Stop::Text(text) => ("stop_sequence", json!(text)),
        Stop::End | Stop::Token(_) | Stop::Cancelled => ("end_turn", Value::Null),
    }
}

fn usage(totals: &Totals) -> Value {
    json!({
        "input_tokens": totals.prompt.saturating_sub(totals.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": totals.cached,
        "output_tokens": totals.generated,
    })
}

fn whole(id: &str, model: &str, answer: &Answer) -> Value {
    let mut content = Vec::new();
    if !answer.reasoning.is_empty() {
        content.push(json!({"type": "thinking", "thinking": answer.reasoning, "signature": "kiln"}));
    }
    if !answer.text.is_empty() || answer.calls.is_empty() {
        content.push(json!({"type": "text", "text": answer.text}));
    }
    for call in &answer.calls {
        // Arguments that a limit cut short are no JSON.
        let input = serde_json::from_str::<Value>(&call.arguments).ok().filter(Value::is_object);
        let input = input.unwrap_or_else(|| json!({}));
        content.push(json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input}));
    }
    let stop = answer.stop.clone().unwrap_or(Stop::End);
    let (reason, sequence) = stop_names(&stop, !answer.calls.is_empty());
    json!({
        "id": id, "type": "message", "role": "assistant", "model": model, "content": content, "stop_reason": reason,
        "stop_sequence": sequence, "usage": usage(&Totals::of(std::slice::from_ref(answer), 1)),
    })
}

/// A block of the answer; one is open at a time.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    Call(usize),
}

struct MessageEncoder {
    id: String,
    model: String,
    request: String,
    prompt: usize,
    open: Option<Block>,
    blocks: usize,
    called: bool,
}

impl MessageEncoder {
    fn close(&mut self, out: &mut Frames) {
        let Some(open) = self.open.take() else { return };
        let index = self.blocks - 1;
        if open == Block::Thinking {
            let delta = json!({"type": "signature_delta", "signature": "kiln"});
            out.event("content_block_delta", &json!({"type": "content_block_delta", "index": index, "delta": delta}));
        }
        out.event("content_block_stop", &json!({"type": "content_block_stop", "index": index}));
    }

    fn open(&mut self, block: Block, start: &Value, out: &mut Frames) {
        if self.open == Some(block) {
            return;
        }
        self.close(out);
        self.open = Some(block);
        self.blocks += 1;
        let index = self.blocks - 1;
        let event = json!({"type": "content_block_start", "index": index, "content_block": start});
        out.event("content_block_start", &event);
    }

    fn delta(&self, delta: &Value, out: &mut Frames) {
        let event = json!({"type": "content_block_delta", "index": self.blocks.saturating_sub(1), "delta": delta});
        out.event("content_block_delta", &event);
    }
}

impl ResponseEncoder for MessageEncoder {
    fn begin(&mut self, out: &mut Frames) {
        // How much of the prompt is cached is not known yet; the last event has the whole truth.
        let totals = Totals { prompt: self.prompt, ..Totals::default() };
        let message = json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": [],
            "stop_reason": null, "stop_sequence": null, "usage": usage(&totals),
        });
        out.event("message_start", &json!({"type": "message_start", "message": message}));
        out.event("ping", &json!({"type": "ping"}));
    }

    fn part(&mut self, part: Part, out: &mut Frames) {
        match part {
            Part::Text { text, .. } => {
                self.open(Block::Text, &json!({"type": "text", "text": ""}), out);
                self.delta(&json!({"type": "text_delta", "text": text}), out);
            }
            Part::Reasoning { text, .. } => {
                self.open(Block::Thinking, &json!({"type": "thinking", "thinking": "", "signature": ""}), out);
                self.delta(&json!({"type": "thinking_delta", "thinking": text}), out);
            }
            Part::CallStart { index, id, name, .. } => {
                self.called = true;
                let start = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                self.open(Block::Call(index), &start, out);
            }
            Part::CallArguments { text, .. } => {
                self.delta(&json!({"type": "input_json_delta", "partial_json": text}), out);
            }
            Part::CallEnd { .. } => self.close(out),
            Part::End { stop, usage: used, reasoning_tokens, .. } => {
                if self.blocks == 0 {
                    self.open(Block::Text, &json!({"type": "text", "text": ""}), out);
                }
                self.close(out);
                let mut totals = Totals::default();
                totals.add(0, 1, &used, reasoning_tokens);
                let (reason, sequence) = stop_names(&stop, self.called);
                let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
                out.event("message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage(&totals)}));
            }
            Part::Failed(refusal) => out.event("error", &refusal.anthropic(&self.request)),
            Part::Progress { .. } => {}
        }
    }

    fn finish(&mut self, out: &mut Frames) {
        out.event("message_stop", &json!({"type": "message_stop"}));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_open_one_at_a_time_and_count_up() {
        let mut encoder = MessageEncoder {
            id: "msg_1".into(),
            model: "m".into(),
            request: "r".into(),
            prompt: 3,
            open: None,
            blocks: 0,
            called: false,
        };
        let mut out = Frames::new(Framing::Events);
        let text = |text: &str| text.to_owned();
        let parts = [
            Part::Reasoning { choice: 0, text: text("hm"), tokens: Vec::new() },
            Part::Text { choice: 0, text: text("a"), tokens: Vec::new() },
            Part::Text { choice: 0, text: text("b"), tokens: Vec::new() },
            Part::CallStart { choice: 0, index: 0, id: text("toolu_1"), name: text("f") },
            Part::CallArguments { choice: 0, index: 0, text: text("{}") },
            Part::CallEnd { index: 0 },
            Part::End {
                choice: 0,
                stop: Stop::End,
                usage: Default::default(),
                tokens: Vec::new(),
                reasoning_tokens: 1,
            },
        ];
        encoder.begin(&mut out);
        parts.into_iter().for_each(|part| encoder.part(part, &mut out));
        encoder.finish(&mut out);
        let text = out.text();
        let events: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
        let (start, delta, stop) = ("content_block_start", "content_block_delta", "content_block_stop");
        let want = [
            "message_start",
            "ping",
            start,
            delta,
            delta,
            stop,
            start,
            delta,
            delta,
            stop,
            start,
            delta,
            stop,
            "message_delta",
            "message_stop",
        ];
        assert_eq!(events, want);
        assert!(text.contains(r#""stop_reason":"tool_use""#), "{text}");
    }

    #[test]
    fn results_of_tools_come_before_what_the_user_says() {
        let value = json!({"role": "user", "content": [
            {"type": "text", "text": "and?"},
            {"type": "tool_result", "tool_use_id": "t", "is_error": true, "content": [{"type": "text", "text": "no"}]},
        ]});
        let mut messages = Vec::new();
        message(0, &value, &mut messages).expect("it is sound");
        assert_eq!(messages.iter().map(|m| m.role.as_str()).collect::<Vec<_>>(), ["tool", "user"]);
        assert_eq!(messages[0].content, Content::Text("Error: no".into()));
        let image = json!({"role": "user", "content": [{"type": "image"}]});
        assert_eq!(
            message(3, &image, &mut messages).expect_err("it has no data").param.as_deref(),
            Some("messages[3].content[0].source")
        );
    }

    #[test]
    fn what_changes_in_every_request_is_masked() {
        let text = "x-anthropic-billing-header: a=1; cch=a1b2c; z";
        assert_eq!(steady(text), "x-anthropic-billing-header: a=1; cch=XXXXX; z");
        assert_eq!(steady("cch=12"), "cch=12");
    }
}
