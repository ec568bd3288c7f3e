//! The Responses API with tools of the server's own (`tools: [{"type": "mcp", "server_label": "..."}]`): the model's calls are made here, and what
//! they gave is part of the response. Only servers that the operator configured are called; a request cannot name an address.
//!
//! The loop itself is `kiln_tools::converse`. It waits for tools and for the engine on a thread of its own, whose bytes the connection takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::response::Response;
use kiln_engine::text::{Content, Function, Message, ToolCall};
use kiln_tools::{Answered, Approval, Call, Decision, Ended, Host, Listing, Output, Tool, Toolbox, converse};
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{Sender, channel};

use super::response_items::{allowed_calls, server_to_label};
use super::responses::ResponsesEncoder;
use super::tools;
use crate::api_error::{ApiError, Kind};
use crate::app::{App, fresh_id};
use crate::chat::{Chat, ToolChoice};
use crate::encoder::{Frames, Framing, ResponseEncoder as _, relay};
use crate::generate::{Generation, Part, Stop};
use crate::guard::Caller;
use crate::params::Params;
use crate::prep_pool::{SetWhenDropped, blocking};
use crate::scope::{current, scoped};

/// Conversations with tools at once. Each has a thread while it lasts.
pub(crate) const MOST_TALKS: usize = 64;
/// Pieces of a stream that may wait for the client.
const PIECES: usize = 64;
/// How often it is looked whether the client is still there.
const PACE: Duration = Duration::from_millis(250);

/// Before which calls the client wants to be asked.
enum Ask {
    /// Where the operator says so.
    Usual,
    Always,
    Never,
    /// Before all but these.
    AllBut(Vec<String>),
    /// Before these; the others are as the operator says.
    Only(Vec<String>),
}

/// What a request says of one server.
struct Rule {
    label: String,
    only: Option<Vec<String>>,
    ask: Ask,
}

impl Rule {
    fn read(at: usize, tool: &Value) -> Result<Rule, ApiError> {
        let param = |field: &str| format!("tools[{at}].{field}");
        let wrong = |field: &str, what: &str| ApiError::invalid(param(field), format!("`{}` {what}", param(field)));
        for field in ["headers", "authorization", "connector_id"] {
            if tool.get(field).is_some_and(|value| !value.is_null()) {
                let message = "servers and their keys are configured by the operator; name one by `server_label`";
                return Err(ApiError::unsupported(param(field), message));
            }
        }
        let label = tool.get("server_label").and_then(Value::as_str);
        let label = label.ok_or_else(|| wrong("server_label", "must be a string"))?.to_owned();
        let names = |value: &Value| -> Option<Vec<String>> {
            let list = value.get("tool_names").unwrap_or(value).as_array()?;
            list.iter().map(|name| name.as_str().map(str::to_owned)).collect()
        };
        let only = match tool.get("allowed_tools").filter(|value| !value.is_null()) {
            None => None,
            Some(value) => Some(names(value).ok_or_else(|| wrong("allowed_tools", "must be a list of names"))?),
        };
        let ask = match tool.get("require_approval").filter(|value| !value.is_null()) {
            None => Ask::Usual,
            Some(Value::String(text)) if text == "always" => Ask::Always,
            Some(Value::String(text)) if text == "never" => Ask::Never,
            Some(value @ Value::Object(_)) => match (value.get("never"), value.get("always")) {
                (Some(never), _) => names(never).map(Ask::AllBut),
                (None, Some(always)) => names(always).map(Ask::Only),
                (None, None) => None,
            }
            .ok_or_else(|| wrong("require_approval", "must name tools in `never` or `always`"))?,
            Some(_) => return Err(wrong("require_approval", "must be always, never, or an object")),
        };
        Ok(Rule { label, only, ask })
    }

    fn offers(&self, tool: &Tool) -> bool {
        let is_named = |only: &Vec<String>| only.contains(&tool.own_name);
        server_to_label(&tool.server) == self.label && self.only.as_ref().is_none_or(is_named)
    }

    fn asks(&self, tool: &Tool) -> bool {
        match &self.ask {
            Ask::Usual => tool.approval == Approval::Ask,
            Ask::Always => true,
            Ask::Never => false,
            Ask::AllBut(names) => !names.contains(&tool.own_name),
            Ask::Only(names) => names.contains(&tool.own_name) || tool.approval == Approval::Ask,
        }
    }
}

/// The tools of this server that a request may use.
pub(crate) struct Offered {
    toolbox: Arc<Toolbox>,
    listing: Listing,
    rules: Vec<Rule>,
}

impl Offered {
    /// What a request asks for; nothing where it names no server.
    pub(crate) async fn of(app: &App, caller: &Caller, asked: &[Value]) -> Result<Option<Offered>, ApiError> {
        let is_server = |tool: &&(usize, &Value)| tool.1.get("type").and_then(Value::as_str) == Some("mcp");
        let asked: Vec<(usize, &Value)> = asked.iter().enumerate().filter(|tool| is_server(&tool)).collect();
        if asked.is_empty() {
            return Ok(None);
        }
        let toolbox = tools::toolbox(app, caller)?;
        let mut rules = Vec::new();
        for (at, tool) in asked {
            let rule = Rule::read(at, tool)?;
            if rule.label != server_to_label("") && !toolbox.has_server(&rule.label) {
                let message =
                    format!("there is no MCP server {:?}; the operator of this server names them", rule.label);
                return Err(ApiError::invalid(format!("tools[{at}].server_label"), message));
            }
            let url = tool.get("server_url").and_then(Value::as_str);
            if url.is_some_and(|url| toolbox.url_of(&rule.label) != Some(url)) {
                let message = "only addresses that the operator configured are asked; leave `server_url` out";
                return Err(ApiError::invalid(format!("tools[{at}].server_url"), message));
            }
            rules.push(rule);
        }
        let mut listing = tools::listing(&toolbox).await?;
        listing.tools.retain(|tool| rules.iter().any(|rule| rule.offers(tool)));
        listing.problems.retain(|problem| rules.iter().any(|rule| rule.label == problem.server));
        Ok(Some(Offered { toolbox, listing, rules }))
    }

    /// The tools as templates have them.
    pub(crate) fn schemas(&self) -> Vec<Value> {
        self.listing.tools.iter().map(Tool::schema).collect()
    }

    fn asks(&self, tool: &Tool) -> bool {
        self.rules.iter().find(|rule| rule.offers(tool)).is_none_or(|rule| rule.asks(tool))
    }
}

/// What a conversation with tools begins with.
pub(crate) struct Begin {
    pub(crate) app: Arc<App>,
    pub(crate) caller: Caller,
    pub(crate) chat: Chat,
    pub(crate) params: Params,
    pub(crate) model: Option<String>,
    pub(crate) offered: Offered,
    pub(crate) encoder: ResponsesEncoder,
    /// Functions that the client calls.
    pub(crate) functions: Vec<String>,
    /// The first answer, where nothing is to be called before it.
    pub(crate) first: Option<Generation>,
}

impl Begin {
    fn talk(
        self,
        out: Option<Sender<Vec<u8>>>,
        gone: Arc<AtomicBool>,
    ) -> Result<(Talk, OwnedSemaphorePermit), ApiError> {
        let permit = Arc::clone(&self.app.tool_talks).try_acquire_owned();
        let full = format!("{MOST_TALKS} conversations with tools are under way, which is all this server takes");
        let permit = permit.map_err(|_| ApiError::new(Kind::QueueFull, full))?;
        let Begin { app, caller, chat, params, model, offered, encoder, functions, first } = self;
        let talk = Talk {
            app,
            caller,
            chat,
            params: Arc::new(params),
            model,
            offered: Arc::new(offered),
            encoder,
            functions,
            first,
            frames: Frames::new(Framing::Events),
            out,
            gone,
            runtime: Handle::current(),
            end: None,
        };
        Ok((talk, permit))
    }

    /// The response as a stream.
    pub(crate) fn stream(self) -> Result<Response, ApiError> {
        let keep_alive = self.app.settings.keep_alive;
        let (to, from) = channel(PIECES);
        let (mut talk, permit) = self.talk(Some(to), Arc::default())?;
        tokio::task::spawn_blocking(move || {
            talk.run();
            drop(permit);
        });
        Ok(relay(from, Framing::Events, keep_alive))
    }

    /// The whole response.
    pub(crate) async fn whole(self) -> Result<Value, ApiError> {
        let gone = Arc::<AtomicBool>::default();
        let _set = SetWhenDropped(Arc::clone(&gone));
        let (mut talk, permit) = self.talk(None, gone)?;
        let work = move || {
            let failed = talk.run();
            drop(permit);
            match (failed, talk.encoder.finished.take()) {
                (None, Some(response)) => Ok(response),
                (Some(refusal), _) => Err(refusal),
                (None, None) => Err(ApiError::new(Kind::Unavailable, "the client has gone")),
            }
        };
        tokio::task::spawn_blocking(work).await.map_err(|error| ApiError::internal(&error))?
    }
}

/// One response on its way.
struct Talk {
    app: Arc<App>,
    caller: Caller,
    chat: Chat,
    params: Arc<Params>,
    model: Option<String>,
    offered: Arc<Offered>,
    encoder: ResponsesEncoder,
    functions: Vec<String>,
    first: Option<Generation>,
    frames: Frames,
    /// To the client, where it wants a stream.
    out: Option<Sender<Vec<u8>>>,
    gone: Arc<AtomicBool>,
    runtime: Handle,
    /// The end of the last answer; that of the response is told once.
    end: Option<Part>,
}

/// What the model says in one answer.
#[derive(Default)]
struct Said {
    text: String,
    reasoning: String,
    calls: Vec<Call>,
}

impl Talk {
    /// Everything, from the beginning to the end. Gives what went wrong.
    fn run(&mut self) -> Option<ApiError> {
        self.encoder.begin(&mut self.frames);
        let offered = Arc::clone(&self.offered);
        let labels: Vec<String> = offered.rules.iter().map(|rule| rule.label.clone()).collect();
        for label in labels {
            self.encoder.listed(&label, &offered.listing, &mut self.frames);
        }
        self.flush();
        let waiting = allowed_calls(&self.chat.messages);
        let toolbox = Arc::clone(&offered.toolbox);
        let failed = match converse(self, &toolbox, &offered.listing, waiting) {
            Ok(Ended::Cancelled) => None,
            Ok(Ended::Answered | Ended::Waiting) => {
                if let Some(end) = self.end.take() {
                    self.encoder.part(end, &mut self.frames);
                }
                None
            }
            Err(refusal) => {
                self.encoder.part(Part::Failed(refusal.clone()), &mut self.frames);
                Some(refusal)
            }
        };
        self.flush();
        failed
    }

    /// Sends what was said. A client that takes nothing holds only its own conversation up.
    fn flush(&mut self) {
        let bytes = self.frames.take();
        if let Some(out) = &self.out
            && !bytes.is_empty()
            && out.blocking_send(bytes).is_err()
        {
            self.gone.store(true, Ordering::Relaxed);
        }
    }

    /// Hands the conversation, as it is now, to the engine.
    fn start(&mut self, may_call: bool) -> Result<Generation, ApiError> {
        let mut chat = self.chat.clone();
        chat.tool_choice = match chat.tool_choice {
            _ if !may_call => ToolChoice::None,
            // What had to be called was.
            ToolChoice::Required | ToolChoice::Named(_) => ToolChoice::Auto,
            other => other,
        };
        let (app, model, caller, params) =
            (Arc::clone(&self.app), self.model.clone(), self.caller.clone(), Arc::clone(&self.params));
        let work = async move {
            current().set_model(model.as_deref().unwrap_or_default());
            blocking(&app, move |app| chat.job(&app.model(model.as_deref())?, &params, &caller)).await
        };
        let mut job = self.runtime.block_on(scoped(work))?;
        // The limit of a response is that of all its answers.
        let written = self.encoder.totals.generated;
        job.request.limit = job.request.limit.map(|limit| limit.saturating_sub(written).max(1));
        Generation::start(&self.app, vec![job], "call_")
    }

    /// Whether a call is made here; those of names that nobody offered are refused here, too.
    fn is_ours(&self, name: &str) -> bool {
        !self.functions.iter().any(|function| function == name)
    }

    fn take(&mut self, part: Part, said: &mut Said) -> Result<(), ApiError> {
        let is_ours = |said: &Said, index: usize| said.calls.get(index).is_some_and(|call| self.is_ours(&call.name));
        let hidden = match &part {
            Part::Text { text, .. } => {
                said.text += text;
                false
            }
            Part::Reasoning { text, .. } => {
                said.reasoning += text;
                false
            }
            Part::CallStart { id, name, .. } => {
                let is_ours = self.is_ours(name);
                let id = if is_ours { fresh_id("mcp_") } else { id.clone() };
                said.calls.push(Call { id, name: name.clone(), arguments: String::new() });
                is_ours
            }
            Part::CallArguments { index, text, .. } => {
                if let Some(call) = said.calls.get_mut(*index) {
                    call.arguments += text;
                }
                is_ours(said, *index)
            }
            Part::CallEnd { index } => is_ours(said, *index),
            Part::Progress { .. } => true,
            Part::End { .. } => {
                self.end = Some(part);
                return Ok(());
            }
            Part::Failed(refusal) => return Err(refusal.clone()),
        };
        if !hidden {
            self.encoder.part(part, &mut self.frames);
        }
        Ok(())
    }

    /// Adds an answer with calls to the conversation.
    fn remember(&mut self, said: &Said) {
        let call = |call: &Call| ToolCall {
            id: Some(call.id.clone()),
            kind: "function".into(),
            function: Function { name: call.name.clone(), arguments: call.arguments.clone().into() },
        };
        self.chat.messages.push(Message {
            role: "assistant".into(),
            content: if said.text.is_empty() { Content::None } else { said.text.as_str().into() },
            reasoning_content: Some(said.reasoning.clone()).filter(|text| !text.is_empty()),
            tool_calls: said.calls.iter().map(call).collect(),
            ..Message::default()
        });
    }
}

impl Host for Talk {
    type Error = ApiError;

    fn answer(&mut self, may_call: bool) -> Result<Answered, ApiError> {
        if let Some(Part::End { usage, reasoning_tokens, .. }) = self.end.take() {
            self.encoder.totals.add(0, 1, &usage, reasoning_tokens);
        }
        let mut generation = match self.first.take() {
            Some(first) => first,
            None => self.start(may_call)?,
        };
        let mut said = Said::default();
        loop {
            let next = async { tokio::time::timeout(PACE, generation.next()).await };
            match self.runtime.block_on(next) {
                Ok(None) => break,
                Ok(Some(part)) => self.take(part, &mut said)?,
                Err(_) => {}
            }
            while let Some(part) = generation.try_next() {
                self.take(part, &mut said)?;
            }
            self.flush();
            if self.is_cancelled() {
                return Ok(Answered { calls: Vec::new(), is_last: true });
            }
        }
        // The place in the engine is for others while tools are called.
        drop(generation);
        // A call that was cut off is none.
        let is_cut = matches!(&self.end, Some(Part::End { stop: Stop::Limit | Stop::Context, .. }));
        if said.calls.is_empty() || is_cut {
            return Ok(Answered { calls: Vec::new(), is_last: true });
        }
        self.remember(&said);
        let (ours, others): (Vec<Call>, Vec<Call>) = said.calls.into_iter().partition(|call| self.is_ours(&call.name));
        Ok(Answered { calls: ours, is_last: !others.is_empty() })
    }

    fn decide(&mut self, tool: &Tool, call: &Call) -> Decision {
        if !self.offered.asks(tool) {
            return Decision::Run;
        }
        self.encoder.asks(tool, call, &mut self.frames);
        self.flush();
        Decision::Later
    }

    fn begin(&mut self, tool: &Tool, call: &Call) {
        self.encoder.call_begins(Some(tool), call, &mut self.frames);
        self.flush();
    }

    fn done(&mut self, tool: Option<&Tool>, call: &Call, output: &Output) {
        self.encoder.call_ended(tool, call, output, &mut self.frames);
        self.flush();
        let is_place =
            |m: &&mut Message| m.content == Content::None && m.tool_call_id.as_deref() == Some(call.id.as_str());
        let text = output.for_model();
        match self.chat.messages.iter_mut().find(is_place) {
            Some(place) => place.content = text.into(),
            None => {
                self.chat.messages.push(Message { tool_call_id: Some(call.id.clone()), ..Message::new("tool", text) })
            }
        }
    }

    fn is_cancelled(&self) -> bool {
        self.gone.load(Ordering::Relaxed) || self.out.as_ref().is_some_and(Sender::is_closed)
    }
}

/// What a call was asked for as: its id is that of the approval request, where there was one.
const ASKED: &str = "mcpr_";

impl ResponsesEncoder {
    /// The tools of a server, where the conversation does not have them yet.
    fn listed(&mut self, label: &str, listing: &Listing, out: &mut Frames) {
        if self.frame.has_listed(label) {
            return;
        }
        let tools: Vec<Value> = listing
            .tools
            .iter()
            .filter(|tool| server_to_label(&tool.server) == label)
            .map(|tool| json!({"name": tool.own_name, "description": tool.description, "input_schema": tool.parameters, "annotations": null}))
            .collect();
        let problem = listing.problems.iter().find(|problem| problem.server == label && tools.is_empty());
        let error = problem.map(|problem| format!("the MCP server {label} {}", problem.why));
        let (id, index) = (fresh_id("mcpl_"), self.items.len());
        let item = |tools: &[Value]| json!({"id": id, "type": "mcp_list_tools", "server_label": label, "tools": tools, "error": error});
        self.send("output_item.added", json!({"output_index": index, "item": item(&[])}), out);
        let place = || json!({"item_id": id, "output_index": index});
        self.send("mcp_list_tools.in_progress", place(), out);
        self.send(if error.is_some() { "mcp_list_tools.failed" } else { "mcp_list_tools.completed" }, place(), out);
        self.finish_item(item(&tools), out);
    }

    /// Asks the client before a call.
    fn asks(&mut self, tool: &Tool, call: &Call, out: &mut Frames) {
        self.close("completed", out);
        let item = json!({
            "id": call.id.replacen("mcp_", ASKED, 1), "type": "mcp_approval_request", "server_label": server_to_label(&tool.server),
            "name": tool.own_name, "arguments": call.arguments,
        });
        self.send("output_item.added", json!({"output_index": self.items.len(), "item": item}), out);
        self.finish_item(item, out);
    }

    /// A call as an item; its last field but one says what came of it.
    fn call_item(&self, id: &str, tool: Option<&Tool>, call: &Call, status: &str) -> Value {
        let asked = call.id.starts_with(ASKED).then_some(&call.id);
        let label = tool.map_or("", |tool| server_to_label(&tool.server));
        let name = tool.map_or(call.name.as_str(), |tool| tool.own_name.as_str());
        json!({
            "id": id, "type": "mcp_call", "status": status, "approval_request_id": asked, "server_label": label, "name": name,
            "arguments": call.arguments, "output": null, "error": null,
        })
    }

    fn call_begins(&mut self, tool: Option<&Tool>, call: &Call, out: &mut Frames) {
        self.close("completed", out);
        let id = if call.id.starts_with(ASKED) { fresh_id("mcp_") } else { call.id.clone() };
        let index = self.items.len();
        let mut item = self.call_item(&id, tool, call, "in_progress");
        item["arguments"] = json!("");
        self.send("output_item.added", json!({"output_index": index, "item": item}), out);
        let place = || json!({"item_id": id, "output_index": index});
        let with = |name: &str, value: &str| {
            let mut event = place();
            event[name] = json!(value);
            event
        };
        self.send("mcp_call_arguments.delta", with("delta", &call.arguments), out);
        self.send("mcp_call_arguments.done", with("arguments", &call.arguments), out);
        self.send("mcp_call.in_progress", place(), out);
        self.calling = Some(id);
    }

    fn call_ended(&mut self, tool: Option<&Tool>, call: &Call, output: &Output, out: &mut Frames) {
        // A call that was refused has not begun.
        if self.calling.is_none() {
            self.call_begins(tool, call, out);
        }
        let id = self.calling.take().unwrap_or_default();
        let (text, status) = (output.for_model(), if output.is_error { "failed" } else { "completed" });
        let place = json!({"item_id": id, "output_index": self.items.len()});
        self.send(&format!("mcp_call.{status}"), place, out);
        let mut item = self.call_item(&id, tool, call, status);
        item[if output.is_error { "error" } else { "output" }] = json!(text);
        self.finish_item(item, out);
    }

    fn finish_item(&mut self, item: Value, out: &mut Frames) {
        self.send("output_item.done", json!({"output_index": self.items.len(), "item": item}), out);
        self.items.push(item);
    }
}
