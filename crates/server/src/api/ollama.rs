//! Ollama's API: `/api/chat`, `/api/generate`, and what its clients ask about models.

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::{Path, State};
use axum::response::Response;
use kiln_engine::media::Medium;
use kiln_engine::text::Content;
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial, Tokenizer};
use kiln_llm::chat::Format;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::models::{parameters, rfc3339};
use super::{chat_logprobs, completions, infill};
use crate::api_error::{ApiError, Kind};
use crate::app::App;
use crate::body::{Body, Leftover};
use crate::chat::{self, Chat, ToolChoice, check_length};
use crate::encode::{Purpose, encode};
use crate::encoder::{Frames, Framing, ResponseEncoder, json as reply, stream};
use crate::generate::{Answer, Call, Generation, Job, Part, Stop, Token};
use crate::guard::Caller;
use crate::media;
use crate::params::Params;
use crate::prep_pool::blocking;
use crate::registry::{Loaded, ModelEntry};
use crate::response_format::ResponseFormatFields;

/// Paths that would change which models there are.
pub(crate) async fn admin(Path(name): Path<String>) -> ApiError {
    match name.as_str() {
        "create" | "copy" | "push" | "blobs" => {
            ApiError::new(Kind::Forbidden, "models are not made or given away over HTTP")
        }
        _ => ApiError::new(Kind::Route, "there is nothing at this path"),
    }
}

/// The version of the API that is spoken.
pub(crate) async fn version() -> Response {
    reply(&json!({"version": env!("CARGO_PKG_VERSION")}))
}

fn details(loaded: &Loaded) -> Value {
    let model = loaded.scheduler.model();
    let family = model.config.architecture.name;
    let size = match parameters(loaded) {
        n if n >= 1_000_000_000 => format!("{:.1}B", n as f64 / 1e9),
        n => format!("{:.1}M", n as f64 / 1e6),
    };
    json!({
        "parent_model": "", "format": "gguf", "family": family, "families": [family], "parameter_size": size,
        "quantization_level": quantisation(loaded),
    })
}

/// The type that most of the weights have.
fn quantisation(loaded: &Loaded) -> String {
    let mut sizes: std::collections::HashMap<&str, u64> = std::collections::HashMap::new();
    for tensor in loaded.scheduler.model().gguf.tensors() {
        *sizes.entry(tensor.ty.name()).or_default() += tensor.bytes as u64;
    }
    sizes.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(name, _)| name.to_uppercase()).unwrap_or_default()
}

/// No file is hashed for a listing: the name and size stand in.
fn digest(place: &ModelEntry) -> String {
    let hash = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3);
    let seed = place.name.bytes().fold(0xcbf2_9ce4_8422_2325, hash);
    format!("{seed:016x}{:016x}", place.bytes()).repeat(2)
}

fn listed(app: &App, place: &ModelEntry) -> Value {
    let loaded = place.peek();
    let details = loaded.as_ref().map_or_else(|| json!({"format": "gguf"}), |loaded| details(loaded));
    json!({
        "name": place.name, "model": place.name, "modified_at": rfc3339(loaded.map_or(app.created, |l| l.created)),
        "size": place.bytes(), "digest": digest(place), "details": details,
    })
}

/// The models there are.
pub(crate) async fn tags(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let models: Vec<Value> = app.registry.places().iter().map(|place| listed(&app, place)).collect();
    Ok(reply(&json!({"models": models})))
}

/// The models that are loaded.
pub(crate) async fn ps(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let running = |place: &ModelEntry| {
        let loaded = place.peek()?;
        let mut model = listed(&app, place);
        model["size_vram"] = json!(loaded.scheduler.gpu_bytes().min(place.bytes()));
        model["expires_at"] = json!(app.registry.expires(place).map_or("9999-12-31T23:59:59Z".to_owned(), rfc3339));
        model["context_length"] = json!(loaded.scheduler.context());
        Some(model)
    };
    let models: Vec<Value> = app.registry.places().iter().filter_map(running).collect();
    Ok(reply(&json!({"models": models})))
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "OllamaShow")]
pub(crate) struct Show {
    model: Option<String>,
    name: Option<String>,
}

/// All about a model.
pub(crate) async fn show(State(app): State<Arc<App>>, mut body: Body) -> Result<Response, ApiError> {
    let fields = body.get::<Show>()?;
    let loaded = &blocking(&app, move |app| app.model(fields.model.or(fields.name).as_deref())).await?;
    let model = loaded.scheduler.model();
    let template = loaded.setup.template.as_ref().ok();
    let mut info = Map::new();
    for (key, value) in model.gguf.metadata().iter() {
        // Lists are vocabularies, which are too long to show.
        let text = value.as_bytes().map(|b| json!(String::from_utf8_lossy(b)));
        let number = value.as_int().and_then(|i| i64::try_from(i).ok()).map(|i| json!(i));
        let shown = text.or(number).or_else(|| value.as_float().map(|f| json!(f)));
        if let Some(shown) = shown.filter(|_| key != "tokenizer.chat_template") {
            info.insert(key.to_owned(), shown);
        }
    }
    info.insert("general.parameter_count".into(), json!(parameters(loaded)));
    // Clients take it for what they may send, so it is what is served, and not what the model was trained for.
    let context = loaded.scheduler.context().min(model.config.context);
    info.insert(format!("{}.context_length", model.config.architecture.name), json!(context));
    let mut capabilities = if model.facts.encodes || model.facts.fills { Vec::new() } else { vec!["completion"] };
    let own = kiln_engine::embed::Pooling::of(model).ok().flatten();
    if app.settings.pooling.or(own).is_some() {
        capabilities.push("embedding");
    }
    for (medium, capability) in [(Medium::Picture, "vision"), (Medium::Sound, "audio")] {
        if loaded.takes(medium) {
            capabilities.push(capability);
        }
    }
    if infill::can(loaded) {
        capabilities.push("insert");
    }
    if template.is_some_and(|t| t.capabilities().tools) {
        capabilities.push("tools");
    }
    if template.is_some_and(|t| kiln_engine::text::reasoning::Markers::of_template(t.source()).is_some()) {
        capabilities.push("thinking");
    }
    Ok(reply(&json!({
        "modelfile": format!("FROM {}", loaded.name), "parameters": format!("num_ctx {context}"), "license": "",
        "template": template.map(|t| t.source()).unwrap_or_default(), "details": details(loaded), "model_info": info,
        "capabilities": capabilities, "modified_at": rfc3339(loaded.created),
    })))
}

/// What both ways of generating know.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "OllamaRequest")]
pub(crate) struct Fields {
    model: Option<String>,
    messages: Option<Vec<Value>>,
    tools: Option<Vec<Value>>,
    prompt: Option<String>,
    system: Option<String>,
    suffix: Option<String>,
    raw: Option<bool>,
    template: Option<String>,
    images: Option<Vec<Value>>,
    format: Option<Value>,
    options: Option<Map<String, Value>>,
    stream: Option<bool>,
    think: Option<Value>,
    /// How long the model stays when this is over: nothing but 0, for "not at all", counts here.
    keep_alive: Option<Value>,
    logprobs: Option<bool>,
    top_logprobs: Option<i64>,
    #[allow(dead_code, reason = "what does not fit is refused")]
    truncate: Option<Value>,
    #[allow(dead_code, reason = "what does not fit is refused")]
    shift: Option<Value>,
    #[allow(dead_code, reason = "an older way to go on, without effect")]
    context: Option<Value>,
}

/// Options that Ollama's clients send and that change nothing here: the context and the threads are as the server was started with.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
#[allow(dead_code, reason = "they are known, which is all")]
struct OptionsWithoutEffect {
    num_ctx: Option<f64>,
    num_keep: Option<f64>,
    num_batch: Option<f64>,
    num_gpu: Option<f64>,
    main_gpu: Option<f64>,
    num_thread: Option<f64>,
    draft_num_predict: Option<f64>,
    tfs_z: Option<f64>,
    use_mmap: Option<bool>,
    use_mlock: Option<bool>,
    low_vram: Option<bool>,
    numa: Option<bool>,
    f16_kv: Option<bool>,
    logits_all: Option<bool>,
    vocab_only: Option<bool>,
    embedding_only: Option<bool>,
    penalize_newline: Option<bool>,
}

/// The number of tokens that `num_predict` means: none for as many as there is room for, which 0 and what is below mean.
fn num_predict(value: &Value) -> Result<Option<i64>, ApiError> {
    let whole = value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() < 9e15);
    match whole {
        Some(number) => Ok(Some(number as i64).filter(|number| *number > 0)),
        None => {
            let message = format!("`options.num_predict` is {value}; it must be a whole number, -1 for no limit");
            Err(ApiError::invalid("options.num_predict", message))
        }
    }
}

impl Fields {
    /// Ollama's options, under their names in the other APIs, and those that are not known.
    fn params(&self, app: &App) -> Result<(Params, Leftover), ApiError> {
        let mut options = self.options.clone().unwrap_or_default();
        let limit = options.remove("num_predict").filter(|limit| !limit.is_null());
        let limit = limit.as_ref().map(num_predict).transpose()?.flatten();
        let foreign: Vec<String> = ["max_tokens", "max_completion_tokens", "n_predict", "n"]
            .into_iter()
            .filter(|name| options.remove(*name).is_some())
            .map(str::to_owned)
            .collect();
        let within = |refusal: ApiError| {
            let param = format!("options.{}", refusal.param.clone().unwrap_or_default());
            refusal.with_param(param)
        };
        let mut body = Body::parse(Value::Object(options).to_string().as_bytes())?;
        let mut params = body.get::<Params>().map_err(within)?;
        body.get::<OptionsWithoutEffect>().map_err(within)?;
        params.n_predict = limit;
        Ok((params, body.leftover_of(app, "options.", foreign)?))
    }

    fn shape(&self) -> Result<Option<Format>, ApiError> {
        match &self.format {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) if text.is_empty() => Ok(None),
            Some(Value::String(text)) if text == "json" => Ok(Some(Format::json())),
            Some(schema @ Value::Object(_)) => Ok(Some(Format::Schema(schema.clone()))),
            Some(_) => Err(ApiError::invalid("format", "`format` must be \"json\" or a schema")),
        }
    }

    fn kwargs(&self) -> Result<Map<String, Value>, ApiError> {
        let mut kwargs = Map::new();
        match &self.think {
            None | Some(Value::Null) => {}
            Some(Value::Bool(on)) => chat::thinking(&mut kwargs, Some(*on), None),
            Some(Value::String(level)) => chat::effort(&mut kwargs, "think", Some(level))?,
            Some(_) => return Err(ApiError::invalid("think", "`think` must be true, false or a level")),
        }
        Ok(kwargs)
    }

    fn refuse(&self) -> Result<(), ApiError> {
        let refused =
            [("template", self.template.as_ref().is_some_and(|t| !t.is_empty()), "a request cannot bring a template")];
        match refused.into_iter().find(|(_, given, _)| *given) {
            Some((name, _, why)) => Err(ApiError::unsupported(name, format!("{name}: {why}"))),
            None => Ok(()),
        }
    }

    /// Probabilities, and of how many likeliest tokens.
    fn logprobs(&self) -> Result<Option<usize>, ApiError> {
        match (self.logprobs.unwrap_or(false), usize::try_from(self.top_logprobs.unwrap_or(0))) {
            (_, Ok(top)) if top > 20 => Err(ApiError::invalid("top_logprobs", "`top_logprobs` must be 0 to 20")),
            (false, Ok(_)) => Ok(None),
            (true, Ok(top)) => Ok(Some(top)),
            (_, Err(_)) => Err(ApiError::invalid("top_logprobs", "`top_logprobs` must be 0 to 20")),
        }
    }

    /// Whether the model is to go when this is over: 0, or a time of that length.
    fn lets_go(&self) -> bool {
        match &self.keep_alive {
            Some(Value::Number(number)) => number.as_f64() == Some(0.0),
            Some(Value::String(text)) => {
                let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
                digits.parse::<f64>() == Ok(0.0)
            }
            _ => false,
        }
    }

    fn chat(&self, messages: Vec<kiln_engine::text::Message>) -> Result<Chat, ApiError> {
        let (tools, _) = super::chat_completions::tools(self.tools.as_deref().unwrap_or_default(), None)?;
        let (shape, kwargs, logprobs) = (self.shape()?, self.kwargs()?, self.logprobs()?);
        let tool_choice = ToolChoice::Auto;
        Ok(Chat { messages, tools, tool_choice, parallel_calls: true, shape, kwargs, logprobs, ..Chat::default() })
    }
}

/// Pictures as parts of a message, before its text.
fn with_images(param: &str, images: &[Value], text: &str) -> Result<Vec<Value>, ApiError> {
    let part = |(n, image): (usize, &Value)| {
        let param = format!("{param}[{n}]");
        let data = image.as_str();
        let data = data.ok_or_else(|| ApiError::invalid(param.clone(), format!("`{param}` must be base64")))?;
        // Ollama's clients send base64 alone, and some send data URLs.
        media::of_url(&param, data)
    };
    let mut parts = images.iter().enumerate().map(part).collect::<Result<Vec<Value>, ApiError>>()?;
    parts.push(json!({"type": "text", "text": text}));
    Ok(parts)
}

/// Messages in the form that OpenAI has: pictures stand before the text, results name their tool.
fn messages(values: &[Value]) -> Result<Vec<kiln_engine::text::Message>, ApiError> {
    let mut values = values.to_vec();
    for value in &mut values {
        if let Some(name) = value.get("tool_name").cloned() {
            value["name"] = name;
        }
    }
    let mut messages = chat::messages(&values)?;
    for (i, (message, value)) in messages.iter_mut().zip(&values).enumerate() {
        let images = value.get("images").and_then(Value::as_array).filter(|images| !images.is_empty());
        if let Some(images) = images {
            let parts = with_images(&format!("messages[{i}].images"), images, &message.content.to_text())?;
            message.content = Content::Parts(parts);
        }
    }
    Ok(messages)
}

/// `POST /api/chat`.
pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let fields = body.get::<Fields>()?;
    let (params, unknown) = fields.params(&app)?;
    let leftover = body.leftover(&app)?.and(unknown);
    let came = Instant::now();
    if fields.messages.as_ref().is_none_or(Vec::is_empty) {
        return load_only(&app, fields, true).await;
    }
    let (streams, job) = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        if fields.lets_go() {
            app.registry.place(fields.model.as_deref())?.dismiss();
        }
        fields.refuse()?;
        let chat = fields.chat(messages(fields.messages.as_deref().unwrap_or_default())?)?;
        Ok((fields.stream.unwrap_or(true), chat.job(&loaded, &params, &caller)?))
    })
    .await?;
    answer(&app, job, streams, true, came).await.map(|response| leftover.tell(response))
}

/// `POST /api/generate`.
pub(crate) async fn generate(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let fields = body.get::<Fields>()?;
    let (params, unknown) = fields.params(&app)?;
    let leftover = body.leftover(&app)?.and(unknown);
    let came = Instant::now();
    if fields.prompt.as_ref().is_none_or(String::is_empty) {
        return load_only(&app, fields, false).await;
    }
    let (streams, job) = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        if fields.lets_go() {
            app.registry.place(fields.model.as_deref())?.dismiss();
        }
        fields.refuse()?;
        let prompt = fields.prompt.clone().unwrap_or_default();
        let suffix = fields.suffix.as_deref().filter(|suffix| !suffix.is_empty());
        let images = fields.images.as_deref().unwrap_or_default();
        if !images.is_empty() && (suffix.is_some() || fields.raw == Some(true) || loaded.setup.template.is_err()) {
            let message = "`images` need a chat template: they have no place in a text that is continued as it is";
            return Err(ApiError::unsupported("images", message));
        }
        let job = if let Some(suffix) = suffix {
            let tokens = infill::prompt(&loaded, &prompt, suffix, &[])?;
            raw(&loaded, &fields, &params, &caller, tokens)?
        } else if fields.raw == Some(true) || loaded.setup.template.is_err() {
            let tokens = encode(&loaded, Purpose::Prompt, &prompt, AddSpecial::Yes, ParseSpecial::Yes)?;
            raw(&loaded, &fields, &params, &caller, tokens)?
        } else {
            let system = fields.system.iter().map(|s| kiln_engine::text::Message::new("system", s.as_str()));
            let mut user = kiln_engine::text::Message::new("user", prompt.as_str());
            if !images.is_empty() {
                user.content = Content::Parts(with_images("images", images, &prompt)?);
            }
            fields.chat(system.chain([user]).collect())?.job(&loaded, &params, &caller)?
        };
        Ok((fields.stream.unwrap_or(true), job))
    })
    .await?;
    answer(&app, job, streams, false, came).await.map(|response| leftover.tell(response))
}

/// A prompt that is continued as it is.
fn raw(
    loaded: &Arc<Loaded>,
    fields: &Fields,
    params: &Params,
    caller: &Caller,
    tokens: Vec<u32>,
) -> Result<Job, ApiError> {
    check_length(loaded, tokens.len())?;
    let mut job = completions::job(loaded, params, &ResponseFormatFields::default(), caller, tokens)?;
    job.request.logprobs = fields.logprobs()?;
    if let Some(shape) = fields.shape()? {
        job.request.constraint = Some(loaded.setup.constraint(&shape)?);
    }
    Ok(job)
}

async fn answer(app: &Arc<App>, job: Job, streams: bool, chat: bool, came: Instant) -> Result<Response, ApiError> {
    if job.request.choices != 1 {
        return Err(ApiError::new(Kind::Invalid, "this API makes one text"));
    }
    let generation = Generation::start(app, vec![job], "call_")?;
    let tokenizer = Arc::clone(&generation.loaded().scheduler.model().tokenizer);
    let encoder = OllamaEncoder { model: generation.loaded().name.clone(), chat, came, call: None, tokenizer };
    if streams {
        return stream(app, generation, encoder, Framing::Lines).await;
    }
    let answer = generation.collect().await?.into_iter().next().unwrap_or_default();
    Ok(reply(&encoder.whole(&answer)))
}

fn timestamp() -> String {
    jiff::Timestamp::now().to_string()
}

/// Nothing was asked: the model is to be loaded, or to go.
async fn load_only(app: &Arc<App>, fields: Fields, chat: bool) -> Result<Response, ApiError> {
    let (name, reason) = blocking(app, move |app| {
        if fields.lets_go() {
            let place = app.registry.place(fields.model.as_deref())?;
            // A model that the server was started for stays, and is not said to go.
            let reason = if place.dismiss() { "unload" } else { "load" };
            return Ok((place.name.clone(), reason));
        }
        Ok((app.model(fields.model.as_deref())?.name.clone(), "load"))
    })
    .await?;
    let mut line = line(&name, chat, "", "", &[]);
    line["done"] = json!(true);
    line["done_reason"] = json!(reason);
    Ok(reply(&line))
}

/// A line of an answer.
fn line(model: &str, chat: bool, text: &str, thinking: &str, calls: &[Call]) -> Value {
    let mut line = json!({"model": model, "created_at": timestamp()});
    if chat {
        let mut message = json!({"role": "assistant", "content": text});
        if !thinking.is_empty() {
            message["thinking"] = json!(thinking);
        }
        if !calls.is_empty() {
            let call = |(index, call): (usize, &Call)| {
                let arguments = serde_json::from_str::<Value>(&call.arguments).ok().filter(Value::is_object);
                let arguments = arguments.unwrap_or_else(|| json!({}));
                json!({"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}})
            };
            message["tool_calls"] = calls.iter().enumerate().map(call).collect();
        }
        line["message"] = message;
    } else {
        line["response"] = json!(text);
        if !thinking.is_empty() {
            line["thinking"] = json!(thinking);
        }
    }
    line["done"] = json!(false);
    line
}

struct OllamaEncoder {
    model: String,
    chat: bool,
    came: Instant,
    /// A call whose arguments are not whole yet.
    call: Option<Call>,
    tokenizer: Arc<Tokenizer>,
}

impl OllamaEncoder {
    fn line(&self, text: &str, thinking: &str, calls: &[Call], tokens: &[Token]) -> Value {
        let mut line = line(&self.model, self.chat, text, thinking, calls);
        // The same entries as OpenAI's, in a list of their own.
        if let Some(list) = chat_logprobs(&self.tokenizer, tokens).get_mut("content") {
            line["logprobs"] = list.take();
        }
        line
    }

    /// A line that is the last one, and says how it went.
    fn last(&self, mut line: Value, stop: &Stop, usage: &kiln_engine::run::Usage) -> Value {
        let reason = if matches!(stop, Stop::Limit | Stop::Context) { "length" } else { "stop" };
        let nanos = |d: std::time::Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        let fields = json!({
            "done": true, "done_reason": reason, "total_duration": nanos(self.came.elapsed()),
            "load_duration": nanos(usage.waiting), "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanos(usage.reading), "eval_count": usage.generated_tokens,
            "eval_duration": nanos(usage.writing),
        });
        if let (Value::Object(line), Value::Object(fields)) = (&mut line, fields) {
            line.extend(fields);
        }
        line
    }

    fn whole(&self, answer: &Answer) -> Value {
        let line = self.line(&answer.text, &answer.reasoning, &answer.calls, &answer.tokens);
        self.last(line, answer.stop.as_ref().unwrap_or(&Stop::End), &answer.usage)
    }
}

impl ResponseEncoder for OllamaEncoder {
    fn begin(&mut self, _out: &mut Frames) {}

    fn part(&mut self, part: Part, out: &mut Frames) {
        match part {
            Part::Text { text, tokens, .. } => out.data(&self.line(&text, "", &[], &tokens)),
            Part::Reasoning { text, tokens, .. } => out.data(&self.line("", &text, &[], &tokens)),
            Part::CallStart { id, name, .. } => self.call = Some(Call { id, name, arguments: String::new() }),
            Part::CallArguments { text, .. } => {
                if let Some(call) = &mut self.call {
                    call.arguments += &text;
                }
            }
            // A call is one line.
            Part::CallEnd { index, .. } => {
                if let Some(call) = self.call.take() {
                    let mut line = self.line("", "", &[call], &[]);
                    line["message"]["tool_calls"][0]["function"]["index"] = json!(index);
                    out.data(&line);
                }
            }
            Part::End { stop, usage, tokens, .. } => {
                out.data(&self.last(self.line("", "", &[], &tokens), &stop, &usage));
            }
            Part::Failed(refusal) => out.data(&json!({"error": refusal.text(crate::api_error::Dialect::Ollama)})),
            Part::Progress { .. } => {}
        }
    }

    fn finish(&mut self, _out: &mut Frames) {}
}
