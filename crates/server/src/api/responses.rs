//! `POST /v1/responses`: OpenAI's newer API. What it keeps is found again by `stored_responses`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kiln_engine::text::{Content, Function, Message, ToolCall};
use kiln_engine::tokenizer::Tokenizer;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::chat_completions::WithoutEffect;
use super::stored_responses::owner;
use super::{Totals, chat_logprobs};
use crate::api_error::ApiError;
use crate::app::{App, fresh_id, now};
use crate::body::Body;
use crate::chat::{self, Chat, ToolChoice};
use crate::encoder::{Frames, Framing, ResponseEncoder, json as reply, stream};
use crate::generate::{Answer, Generation, Part, Stop, Token};
use crate::guard::Caller;
use crate::media;
use crate::params::Params;
use crate::prep_pool::blocking;
use crate::response_format;
use crate::response_store::{Owner, Turn};

/// Fields that clients of this API send and that change nothing here.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "ResponseWithoutEffect")]
#[allow(dead_code, reason = "they are known, which is all")]
struct MoreWithoutEffect {
    stream_options: Option<Value>,
    max_tool_calls: Option<Value>,
    truncation: Option<Value>,
    context_management: Option<Value>,
}

/// The fields of the API beside those about sampling.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "ResponseRequest")]
pub(crate) struct Fields {
    model: Option<String>,
    input: Option<Value>,
    instructions: Option<String>,
    max_output_tokens: Option<i64>,
    stream: Option<bool>,
    metadata: Option<Value>,
    text: Option<Value>,
    reasoning: Option<Value>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    include: Option<Vec<String>>,
    top_logprobs: Option<i64>,
    previous_response_id: Option<String>,
    conversation: Option<Value>,
    prompt: Option<Value>,
    background: Option<bool>,
    /// Whether the response is kept; it is where nothing is said.
    store: Option<bool>,
    /// Items of the responses before.
    #[serde(skip)]
    before: Vec<Value>,
}

impl Fields {
    /// Finds what the request only names: the responses before it, and items of others. Gives the items that it brings itself.
    fn recall(&mut self, app: &App, owner: Owner) -> Result<Vec<Value>, ApiError> {
        if let Some(id) = &self.previous_response_id {
            let before = app.responses.conversation(owner, id);
            self.before = before.ok_or_else(|| {
                let message = format!(
                    "Previous response with id {id:?} not found; it was not stored, has expired or was deleted"
                );
                ApiError::invalid("previous_response_id", message)
            })?;
        }
        let mut own = match self.input.take() {
            Some(Value::Array(items)) => items,
            Some(Value::String(text)) => {
                let content = json!([{"type": "input_text", "text": text}]);
                vec![json!({"type": "message", "role": "user", "content": content})]
            }
            None | Some(Value::Null) => Vec::new(),
            Some(_) => return Err(ApiError::invalid("input", "`input` must be a string or a list of items")),
        };
        for (i, value) in own.iter_mut().enumerate() {
            if value.get("type").and_then(Value::as_str) == Some("item_reference") {
                let id = value.get("id").and_then(Value::as_str).unwrap_or_default();
                let found = app.responses.item(owner, id);
                let message = format!("Item with id {id:?} not found");
                *value = found.ok_or_else(|| ApiError::invalid(format!("input[{i}].id"), message))?;
            }
            let is_nameless = value.get("id").is_none_or(Value::is_null);
            if let Some(item) = value.as_object_mut().filter(|_| is_nameless) {
                item.insert("id".to_owned(), fresh_id("msg_").into());
            }
        }
        self.input = Some(Value::Array(own.clone()));
        Ok(own)
    }

    fn refuse(&self) -> Result<(), ApiError> {
        let refused = [
            ("conversation", self.conversation.is_some(), "conversations are not kept; send them in `input`"),
            ("prompt", self.prompt.is_some(), "stored prompts are not there; use `instructions` and `input`"),
            ("background", self.background == Some(true), "responses are made while the client waits"),
        ];
        match refused.into_iter().find(|(_, given, _)| *given) {
            Some((name, _, why)) => Err(ApiError::unsupported(name, why)),
            None => Ok(()),
        }
    }

    fn chat(&self) -> Result<Chat, ApiError> {
        self.refuse()?;
        let mut messages: Vec<Message> =
            self.instructions.iter().map(|text| Message::new("system", text.as_str())).collect();
        for (i, value) in self.before.iter().enumerate() {
            item(i, value, &mut messages)?;
        }
        match &self.input {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) => messages.push(Message::new("user", text.as_str())),
            Some(Value::Array(list)) => {
                for (i, value) in list.iter().enumerate() {
                    item(i, value, &mut messages)?;
                }
            }
            Some(_) => return Err(ApiError::invalid("input", "`input` must be a string or a list of items")),
        }
        if messages.is_empty() {
            // Clients probe with nothing.
            messages.push(Message::new("user", ""));
        }
        let mut kwargs = Map::new();
        let effort = self.reasoning.as_ref().and_then(|r| r.get("effort")).and_then(Value::as_str);
        chat::effort(&mut kwargs, "reasoning.effort", effort)?;
        let shape = match self.text.as_ref().and_then(|t| t.get("format")).filter(|f| !f.is_null()) {
            Some(format) => response_format::response_format("text.format", format)?,
            None => None,
        };
        let (tools, tool_choice) = self.tools()?;
        let (parallel_calls, logprobs) = (self.parallel_tool_calls.unwrap_or(true), self.logprobs()?);
        Ok(Chat { messages, tools, tool_choice, parallel_calls, shape, kwargs, logprobs, ..Chat::default() })
    }

    /// Whether something is to be told beside the answer itself.
    fn includes(&self, what: &str) -> bool {
        self.include.iter().flatten().any(|given| given == what)
    }

    /// Probabilities are told where they are asked for; how many is a field of its own.
    fn logprobs(&self) -> Result<Option<usize>, ApiError> {
        match (self.top_logprobs.map(usize::try_from), self.includes("message.output_text.logprobs")) {
            (None, false) => Ok(None),
            (None, true) => Ok(Some(0)),
            (Some(Ok(top)), asked) if top <= 20 => Ok(Some(top).filter(|top| asked || *top > 0)),
            _ => Err(ApiError::invalid("top_logprobs", "`top_logprobs` must be 0 to 20")),
        }
    }

    /// Functions, in the form that templates take. What other tools need is not here; they are left out.
    fn tools(&self) -> Result<(Vec<Value>, ToolChoice), ApiError> {
        let mut tools = Vec::new();
        for tool in self.tools.iter().flatten() {
            if tool.get("type").and_then(Value::as_str) != Some("function") {
                log::info!("a tool of type {} is left out", tool.get("type").unwrap_or(&Value::Null));
                continue;
            }
            let mut function = tool.clone();
            if let Some(function) = function.as_object_mut() {
                function.remove("type");
            }
            tools.push(json!({"type": "function", "function": function}));
        }
        // Without tools a wish for none of them or any of them means nothing.
        let choice = self.tool_choice.as_ref().filter(|c| !(tools.is_empty() && c.is_string()));
        super::chat_completions::tools(&tools, choice)
    }

    fn params(&self, params: &mut Params) {
        params.max_tokens = self.max_output_tokens;
        params.max_completion_tokens = None;
        params.n = None;
        params.stop = None;
    }
}

/// An item of the input. Thoughts, words and calls that follow each other are one message.
fn item(index: usize, value: &Value, out: &mut Vec<Message>) -> Result<(), ApiError> {
    let param = format!("input[{index}]");
    let text = |field: &str| {
        let text = value.get(field).and_then(Value::as_str).map(str::to_owned);
        text.ok_or_else(|| ApiError::invalid(format!("{param}.{field}"), format!("`{param}.{field}` must be a string")))
    };
    let kind = value.get("type").and_then(Value::as_str);
    match kind {
        None | Some("message") => {
            let role = text("role")?;
            let content = chat::content(&format!("{param}.content"), value.get("content"))?;
            if role == "assistant" {
                let last = assistant(out, |m| m.content == Content::None && m.tool_calls.is_empty());
                last.content = content;
            } else if ["user", "system", "developer"].contains(&role.as_str()) {
                out.push(Message { role, content, ..Message::default() });
            } else {
                let message = format!("`{param}.role` is {role:?}; it must be user, assistant, system or developer");
                return Err(ApiError::invalid(format!("{param}.role"), message));
            }
        }
        Some("reasoning") => {
            let parts = value.get("content").and_then(Value::as_array).into_iter().flatten();
            let texts: Vec<&str> = parts.filter_map(|part| part.get("text").and_then(Value::as_str)).collect();
            // Clients that keep nothing send back what they were given in the place of the text.
            let sealed = value.get("encrypted_content").and_then(Value::as_str).filter(|_| texts.is_empty());
            // What another server has sealed is lost, as it would be there.
            let text = sealed.map_or_else(|| texts.join("\n"), |sealed| unsealed(sealed).unwrap_or_default());
            assistant(out, |m| m.content == Content::None && m.tool_calls.is_empty()).reasoning_content =
                Some(text).filter(|text| !text.is_empty());
        }
        Some("function_call") => {
            let (id, name) = (text("call_id")?, text("name")?);
            let arguments = value.get("arguments").cloned().unwrap_or(Value::Null);
            let function = Function { name, arguments };
            let call = ToolCall { id: Some(id), kind: "function".into(), function };
            assistant(out, |_| true).tool_calls.push(call);
        }
        Some("function_call_output") => {
            let output = chat::content(&format!("{param}.output"), value.get("output"))?;
            let content = if media::are_in(&output) { output } else { output.to_text().into() };
            out.push(Message { tool_call_id: Some(text("call_id")?), content, ..Message::new("tool", "") });
        }
        Some(other) => {
            return Err(ApiError::unsupported(
                format!("{param}.type"),
                format!("`{param}` is of type {other:?}, which is not served"),
            ));
        }
    }
    Ok(())
}

/// What begins reasoning that a client carries for the server.
const SEAL: &[u8] = b"kiln1:";

/// Reasoning as clients carry it to the next request without looking at it. It is theirs: nothing in it is secret.
fn sealed(text: &str) -> String {
    STANDARD.encode([SEAL, text.as_bytes()].concat())
}

fn unsealed(text: &str) -> Option<String> {
    let bytes = STANDARD.decode(text).ok()?;
    String::from_utf8(bytes.strip_prefix(SEAL)?.to_vec()).ok()
}

/// The assistant's message at the end, if it can take more, else a new one.
fn assistant(out: &mut Vec<Message>, takes: impl Fn(&Message) -> bool) -> &mut Message {
    if !out.last().is_some_and(|m| m.role == "assistant" && takes(m)) {
        out.push(Message { role: "assistant".into(), ..Message::default() });
    }
    let last = out.len() - 1;
    &mut out[last]
}

/// How many tokens an input is.
pub(crate) async fn count(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let mut fields = body.get::<Fields>()?;
    let tokens = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        fields.recall(app, owner(app, &caller))?;
        fields.chat()?.count(&loaded)
    })
    .await?;
    Ok(reply(&json!({"object": "response.input_tokens", "input_tokens": tokens})))
}

/// Serves the request.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let (mut fields, mut params) = (body.get::<Fields>()?, body.get::<Params>()?);
    body.get::<WithoutEffect>()?;
    body.get::<MoreWithoutEffect>()?;
    let leftover = body.leftover(&app)?;
    let stores = fields.store.unwrap_or(true) && app.responses.keeps();
    let (whose, keeper) = (owner(&app, &caller), Arc::clone(&app));
    let (fields, params, job, input) = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        fields.params(&mut params);
        let input = fields.recall(app, whose)?;
        let job = fields.chat()?.job(&loaded, &params, &caller)?;
        Ok((fields, params, job, input))
    })
    .await?;
    let generation = Generation::start(&app, vec![job], "call_")?;
    let frame = Frame {
        fields,
        temperature: params.temperature,
        top_p: params.top_p,
        id: fresh_id("resp_"),
        created: now(),
        model: generation.loaded().name.clone(),
        tokenizer: Some(Arc::clone(&generation.loaded().scheduler.model().tokenizer)),
        keeps: stores.then_some(Keeps { app: keeper, owner: whose, input }),
    };
    let response = if frame.fields.stream.unwrap_or(false) {
        let encoder = ResponsesEncoder { frame, number: 0, items: Vec::new(), open: None, totals: Totals::default() };
        stream(generation, encoder, Framing::Events, app.settings.keep_alive)
    } else {
        let answer = generation.collect().await?.into_iter().next().unwrap_or_default();
        let response = frame.whole(&answer);
        frame.keep(&response);
        reply(&response)
    };
    Ok(leftover.tell(response))
}

/// What a response says of its request.
struct Frame {
    fields: Fields,
    temperature: Option<f32>,
    top_p: Option<f32>,
    id: String,
    created: u64,
    model: String,
    /// Names the tokens whose probabilities are told.
    tokenizer: Option<Arc<Tokenizer>>,
    /// Where it is kept; none where it is not.
    keeps: Option<Keeps>,
}

/// Keeps a response when it is whole.
struct Keeps {
    app: Arc<App>,
    owner: Owner,
    /// The items that the request brought.
    input: Vec<Value>,
}

impl Frame {
    /// Stores the response for later requests.
    fn keep(&self, response: &Value) {
        if let Some(keeps) = &self.keeps {
            let (input, previous) = (keeps.input.clone(), self.fields.previous_response_id.clone());
            keeps.app.responses.keep(keeps.owner, &Turn { response: response.clone(), input, previous });
        }
    }

    /// The probabilities of tokens, where they were asked for.
    fn logprobs(&self, tokens: &[Token]) -> Vec<Value> {
        let told = self.tokenizer.as_ref().map(|tokenizer| chat_logprobs(tokenizer, tokens)).unwrap_or_default();
        told["content"].as_array().cloned().unwrap_or_default()
    }

    /// An item as it is when it is whole, or cut short.
    fn value(&self, item: &Item, status: &str) -> Value {
        let mut value = item.value(status);
        if let (Kind::Reasoning(text), true) = (&item.content, self.fields.includes("reasoning.encrypted_content")) {
            value["encrypted_content"] = json!(sealed(text));
        }
        value
    }

    /// The response object; `stop` is none while it is being made.
    fn response(&self, output: &[Value], stop: Option<(&Stop, &Totals)>) -> Value {
        let fields = &self.fields;
        let status = match stop {
            None => "in_progress",
            Some((Stop::Limit | Stop::Context, _)) => "incomplete",
            Some(_) => "completed",
        };
        let incomplete = if status == "incomplete" { json!({"reason": "max_output_tokens"}) } else { Value::Null };
        let effort = fields.reasoning.as_ref().and_then(|r| r.get("effort")).cloned().unwrap_or_default();
        let text = fields.text.clone().filter(|t| t.get("format").is_some_and(|f| !f.is_null()));
        let mut response = json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "background": false,
            "error": null, "incomplete_details": incomplete, "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens, "metadata": fields.metadata.clone().unwrap_or_else(|| json!({})),
            "model": self.model, "output": output, "parallel_tool_calls": fields.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": fields.previous_response_id, "reasoning": {"effort": effort, "summary": null}, "store": self.keeps.is_some(),
            "temperature": self.temperature.unwrap_or(1.0),
            "text": text.unwrap_or_else(|| json!({"format": {"type": "text"}})),
            "tool_choice": fields.tool_choice.clone().unwrap_or_else(|| json!("auto")),
            "tools": fields.tools.clone().unwrap_or_default(), "top_p": self.top_p.unwrap_or(1.0),
            "truncation": "disabled", "usage": null,
        });
        if let Some((_, totals)) = stop {
            response["completed_at"] = json!(now());
            response["usage"] = json!({
                "input_tokens": totals.prompt,
                "input_tokens_details": {"cached_tokens": totals.cached, "cache_write_tokens": 0},
                "output_tokens": totals.generated,
                "output_tokens_details": {"reasoning_tokens": totals.reasoning},
                "total_tokens": totals.prompt + totals.generated,
            });
        }
        response
    }

    fn whole(&self, answer: &Answer) -> Value {
        let stop = answer.stop.clone().unwrap_or(Stop::End);
        let cut = if matches!(stop, Stop::Limit | Stop::Context) { "incomplete" } else { "completed" };
        let mut items = Vec::new();
        let mut item = |prefix, content| items.push(Item::new(prefix, content));
        if !answer.reasoning.is_empty() {
            item("rs_", Kind::Reasoning(answer.reasoning.clone()));
        }
        if !answer.text.is_empty() || answer.calls.is_empty() {
            item("msg_", Kind::Message(answer.text.clone()));
        }
        for call in &answer.calls {
            let (id, name, arguments) = (call.id.clone(), call.name.clone(), call.arguments.clone());
            item("fc_", Kind::Call { id, name, arguments });
        }
        let last = items.len().saturating_sub(1);
        let output: Vec<Value> = items
            .iter_mut()
            .enumerate()
            .map(|(at, item)| {
                if let Kind::Message(_) = item.content {
                    item.logprobs = self.logprobs(&answer.tokens);
                }
                // What is not the last was finished before the text was cut.
                self.value(item, if at == last { cut } else { "completed" })
            })
            .collect();
        self.response(&output, Some((&stop, &Totals::of(std::slice::from_ref(answer), 1))))
    }
}

/// An item of the output while it grows.
struct Item {
    id: String,
    content: Kind,
    /// Probabilities of its tokens.
    logprobs: Vec<Value>,
}

enum Kind {
    Reasoning(String),
    Message(String),
    Call { id: String, name: String, arguments: String },
}

impl Item {
    fn new(prefix: &str, content: Kind) -> Item {
        Item { id: fresh_id(prefix), content, logprobs: Vec::new() }
    }

    /// The part that holds text.
    fn part(&self, text: &str) -> Value {
        match self.content {
            Kind::Reasoning(_) => json!({"type": "reasoning_text", "text": text}),
            _ => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}),
        }
    }

    fn value(&self, status: &str) -> Value {
        let empty = status == "in_progress";
        let parts = |text: &str| if empty { json!([]) } else { json!([self.part(text)]) };
        match &self.content {
            Kind::Reasoning(text) => {
                json!({"id": self.id, "type": "reasoning", "summary": [], "content": parts(text), "status": status})
            }
            Kind::Message(text) => {
                json!({"id": self.id, "type": "message", "role": "assistant", "status": status, "content": parts(text)})
            }
            Kind::Call { id, name, arguments } => json!({
                "id": self.id, "type": "function_call", "call_id": id, "name": name,
                "arguments": if empty { "" } else { arguments.as_str() }, "status": status,
            }),
        }
    }
}

struct ResponsesEncoder {
    frame: Frame,
    number: usize,
    items: Vec<Value>,
    open: Option<Item>,
    totals: Totals,
}

impl ResponsesEncoder {
    fn send(&mut self, name: &str, mut event: Value, out: &mut Frames) {
        let kind = format!("response.{name}");
        event["type"] = json!(kind);
        event["sequence_number"] = json!(self.number);
        self.number += 1;
        out.event(&kind, &event);
    }

    fn close(&mut self, status: &str, out: &mut Frames) {
        let Some(item) = self.open.take() else { return };
        let (id, index) = (item.id.clone(), self.items.len());
        let place = json!({"item_id": id, "output_index": index});
        let with = |more: Value| {
            let mut event = place.clone();
            if let (Value::Object(event), Value::Object(more)) = (&mut event, more) {
                event.extend(more);
            }
            event
        };
        match &item.content {
            Kind::Call { arguments, name, .. } => {
                self.send("function_call_arguments.done", with(json!({"arguments": arguments, "name": name})), out);
            }
            Kind::Reasoning(text) => {
                self.send("reasoning_text.done", with(json!({"content_index": 0, "text": text})), out);
                self.send("content_part.done", with(json!({"content_index": 0, "part": item.part(text)})), out);
            }
            Kind::Message(text) => {
                self.send(
                    "output_text.done",
                    with(json!({"content_index": 0, "text": text, "logprobs": item.logprobs})),
                    out,
                );
                self.send("content_part.done", with(json!({"content_index": 0, "part": item.part(text)})), out);
            }
        }
        let value = self.frame.value(&item, status);
        self.send("output_item.done", json!({"output_index": index, "item": value}), out);
        self.items.push(value);
    }

    fn begin_item(&mut self, item: Item, out: &mut Frames) {
        self.close("completed", out);
        let index = self.items.len();
        self.send("output_item.added", json!({"output_index": index, "item": item.value("in_progress")}), out);
        if !matches!(item.content, Kind::Call { .. }) {
            let part = item.part("");
            let event = json!({"item_id": item.id, "output_index": index, "content_index": 0, "part": part});
            self.send("content_part.added", event, out);
        }
        self.open = Some(item);
    }

    fn text(&mut self, text: &str, tokens: &[Token], reasoning: bool, out: &mut Frames) {
        let fits = match self.open.as_ref().map(|item| &item.content) {
            Some(Kind::Reasoning(_)) => reasoning,
            Some(Kind::Message(_)) => !reasoning,
            _ => false,
        };
        if !fits {
            let item = match reasoning {
                true => Item::new("rs_", Kind::Reasoning(String::new())),
                false => Item::new("msg_", Kind::Message(String::new())),
            };
            self.begin_item(item, out);
        }
        let logprobs = if reasoning { Vec::new() } else { self.frame.logprobs(tokens) };
        let Some(item) = &mut self.open else { return };
        if let Kind::Reasoning(all) | Kind::Message(all) = &mut item.content {
            *all += text;
        }
        let mut event =
            json!({"item_id": item.id, "output_index": self.items.len(), "content_index": 0, "delta": text});
        if !reasoning {
            event["logprobs"] = json!(logprobs);
            item.logprobs.extend(logprobs);
        }
        self.send(if reasoning { "reasoning_text.delta" } else { "output_text.delta" }, event, out);
    }
}

impl ResponseEncoder for ResponsesEncoder {
    fn begin(&mut self, out: &mut Frames) {
        let response = self.frame.response(&[], None);
        self.send("created", json!({"response": response}), out);
        self.send("in_progress", json!({"response": response}), out);
    }

    fn part(&mut self, part: Part, out: &mut Frames) {
        match part {
            Part::Text { text, tokens, .. } => self.text(&text, &tokens, false, out),
            Part::Reasoning { text, tokens, .. } => self.text(&text, &tokens, true, out),
            Part::CallStart { id, name, .. } => {
                let content = Kind::Call { id, name, arguments: String::new() };
                self.begin_item(Item::new("fc_", content), out);
            }
            Part::CallArguments { text, .. } => {
                let Some(item) = &mut self.open else { return };
                if let Kind::Call { arguments, .. } = &mut item.content {
                    *arguments += &text;
                }
                let event = json!({"item_id": item.id, "output_index": self.items.len(), "delta": text});
                self.send("function_call_arguments.delta", event, out);
            }
            Part::CallEnd { .. } => self.close("completed", out),
            Part::End { stop, usage, reasoning_tokens, .. } => {
                if self.items.is_empty() && self.open.is_none() {
                    self.begin_item(Item::new("msg_", Kind::Message(String::new())), out);
                }
                let cut = matches!(stop, Stop::Limit | Stop::Context);
                self.close(if cut { "incomplete" } else { "completed" }, out);
                self.totals.add(0, 1, &usage, reasoning_tokens);
                let response = self.frame.response(&self.items, Some((&stop, &self.totals)));
                self.frame.keep(&response);
                self.send(if cut { "incomplete" } else { "completed" }, json!({"response": response}), out);
            }
            Part::Failed(refusal) => {
                let mut response = self.frame.response(&self.items, None);
                response["status"] = json!("failed");
                let error = &refusal.openai()["error"];
                let code = if error["code"].is_null() { error["type"].clone() } else { error["code"].clone() };
                response["error"] = json!({"code": code, "message": error["message"]});
                self.send("failed", json!({"response": response}), out);
            }
            Part::Progress { .. } => {}
        }
    }

    fn finish(&mut self, _out: &mut Frames) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thoughts_words_and_calls_become_one_message() {
        let items = json!([
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ]);
        let mut messages = Vec::new();
        for (i, value) in items.as_array().into_iter().flatten().enumerate() {
            item(i, value, &mut messages).expect("it is sound");
        }
        assert_eq!(messages.iter().map(|m| m.role.as_str()).collect::<Vec<_>>(), ["user", "assistant", "tool"]);
        assert_eq!(messages[1].reasoning_content.as_deref(), Some("hm"));
        assert_eq!(messages[1].tool_calls.len(), 2);
        assert!(item(7, &json!({"type": "item_reference"}), &mut messages).is_err());
        // Reasoning that the client carried, and some that it has from elsewhere.
        let carried = json!({"type": "reasoning", "summary": [], "encrypted_content": sealed("I know")});
        item(8, &carried, &mut messages).expect("it is sound");
        assert_eq!(messages.last().and_then(|m| m.reasoning_content.as_deref()), Some("I know"));
        let foreign = json!({"type": "reasoning", "summary": [], "encrypted_content": "Zm9yZWlnbg=="});
        item(9, &foreign, &mut messages).expect("it is another server's");
        assert_eq!(messages.last().and_then(|m| m.reasoning_content.as_deref()), None);
    }

    #[test]
    fn events_count_up_and_every_item_is_done_before_the_end() {
        let fields = Fields::default();
        let frame = Frame {
            fields,
            temperature: None,
            top_p: None,
            id: "resp_1".into(),
            created: 1,
            model: "m".into(),
            tokenizer: None,
            keeps: None,
        };
        let mut encoder =
            ResponsesEncoder { frame, number: 0, items: Vec::new(), open: None, totals: Totals::default() };
        let mut out = Frames::new(Framing::Events);
        encoder.begin(&mut out);
        encoder.part(Part::Reasoning { choice: 0, text: "hm".into(), tokens: Vec::new() }, &mut out);
        encoder.part(Part::Text { choice: 0, text: "hey".into(), tokens: Vec::new() }, &mut out);
        let end = Part::End {
            choice: 0,
            stop: Stop::Limit,
            usage: Default::default(),
            tokens: Vec::new(),
            reasoning_tokens: 1,
        };
        encoder.part(end, &mut out);
        let text = out.text();
        let data: Vec<Value> = text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .map(|json| serde_json::from_str(json).expect("it is JSON"))
            .collect();
        assert!(data.iter().enumerate().all(|(i, event)| event["sequence_number"] == json!(i)), "{text}");
        let last = data.last().expect("there are events");
        assert_eq!(last["type"], "response.incomplete");
        assert_eq!(last["response"]["output"].as_array().map(Vec::len), Some(2));
        assert_eq!(data.iter().filter(|e| e["type"] == "response.output_item.done").count(), 2);
    }
}
