//! What llama-server's own clients ask for: `/props`, `/slots`, `/completion`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Query, State};
use axum::response::Response;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Totals, completions, token_text};
use crate::app::App;
use crate::body::Body;
use crate::chat::{blocking, check_length};
use crate::generate::{Generation, Job, Part, Stop, Token};
use crate::guard::Caller;
use crate::params::Params;
use crate::refusal::{Kind, Refusal};
use crate::shape::ShapeFields;
use crate::shelf::Loaded;
use crate::wire::{Frames, Framing, Wire, json as reply, stream};

fn settings(loaded: &Loaded) -> Value {
    let mut params = serde_json::to_value(&loaded.defaults).unwrap_or_default();
    params["n_predict"] = json!(-1);
    json!({"n_ctx": loaded.scheduler.context(), "params": params})
}

/// What the server can do.
pub(crate) async fn props(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    let loaded = app.loaded()?;
    let tokenizer = &loaded.scheduler.model().tokenizer;
    let text = |id: Option<u32>| id.map(|id| token_text(tokenizer, id)).unwrap_or_default();
    let template = loaded.template.as_ref().ok();
    let caps = template.map(|t| {
        let caps = t.capabilities();
        json!({
            "supports_system_role": caps.system, "supports_tools": caps.tools, "supports_tool_calls": caps.tool_calls,
            "supports_parallel_tool_calls": caps.parallel_calls, "supports_typed_content": caps.part_content,
        })
    });
    Ok(reply(&json!({
        "default_generation_settings": settings(&loaded),
        "total_slots": loaded.sequences,
        "model_alias": loaded.name,
        "model_path": loaded.name,
        "chat_template": template.map(|t| t.source()).unwrap_or_default(),
        "chat_template_caps": caps,
        "modalities": {"vision": false, "audio": false},
        "bos_token": text(tokenizer.vocab().bos),
        "eos_token": text(tokenizer.vocab().eos),
        "build_info": format!("kiln {}", env!("CARGO_PKG_VERSION")),
        "is_sleeping": false,
    })))
}

/// Flags of `/slots`.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct SlotsQuery {
    fail_on_no_slot: Option<String>,
}

/// How many texts are being written. Slots have no identity here: the first ones count as busy.
pub(crate) async fn slots(State(app): State<Arc<App>>, Query(query): Query<SlotsQuery>) -> Result<Response, Refusal> {
    let loaded = app.loaded()?;
    let load = loaded.scheduler.load();
    let busy = load.reading + load.writing + load.swapped;
    if query.fail_on_no_slot.is_some_and(|flag| flag == "1") && busy >= loaded.sequences {
        return Err(Refusal::new(Kind::Unavailable, "no slot is free"));
    }
    let params = settings(&loaded)["params"].clone();
    let slot = |id: usize| {
        json!({
            "id": id, "id_task": -1, "n_ctx": loaded.scheduler.context(), "is_processing": id < busy, "params": params,
            "next_token": {"n_decoded": 0, "n_remain": -1},
        })
    };
    Ok(reply(&(0..loaded.sequences).map(slot).collect()))
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "LlamaCompletion")]
pub(crate) struct Fields {
    model: Option<String>,
    prompt: Option<Value>,
    stream: Option<bool>,
    n_probs: Option<i64>,
    return_tokens: Option<bool>,
}

/// A text continued, in llama-server's own form.
pub(crate) async fn completion(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, Refusal> {
    let (fields, params, shape) = (body.get::<Fields>()?, body.get::<Params>()?, body.get::<ShapeFields>()?);
    let leftover = body.leftover(&app)?;
    if fields.n_probs.is_some_and(|n| n > 0) {
        return Err(Refusal::unsupported("n_probs", "`n_probs` is not served here; /v1/completions has `logprobs`"));
    }
    let (streams, tokens) = (fields.stream.unwrap_or(false), fields.return_tokens.unwrap_or(false));
    let job = blocking(&app, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        let prompt = fields.prompt.as_ref().ok_or_else(|| Refusal::invalid("prompt", "`prompt` is missing"))?;
        let tokens = completions::prompt_tokens(&loaded, "prompt", prompt)?;
        check_length(&loaded, tokens.len())?;
        completions::job(&loaded, &params, &shape, &caller, tokens)
    })
    .await?;
    Ok(leftover.tell(answer(&app, job, streams, tokens).await?))
}

/// One text in llama-server's form, with its tokens where they are wanted.
pub(super) async fn answer(app: &Arc<App>, job: Job, streams: bool, tokens: bool) -> Result<Response, Refusal> {
    if job.request.choices != 1 {
        return Err(Refusal::unsupported("n", "this path makes one text; /v1/completions has `n`"));
    }
    let generation = Generation::start(app, vec![job], "call_")?;
    let model = generation.loaded().name.clone();
    if streams {
        let wire = CompletionWire { model, totals: Totals::default() };
        return Ok(stream(generation, wire, Framing::Events, app.settings.keep_alive));
    }
    let answer = generation.collect().await?.into_iter().next().unwrap_or_default();
    let totals = Totals::of(std::slice::from_ref(&answer), 1);
    let tokens: &[Token] = if tokens { &answer.tokens } else { &[] };
    Ok(reply(&last(&model, &answer.text, tokens, answer.stop.as_ref().unwrap_or(&Stop::End), &totals)))
}

fn last(model: &str, content: &str, tokens: &[Token], stop: &Stop, totals: &Totals) -> Value {
    let (stop_type, word) = match stop {
        Stop::End | Stop::Token(_) => ("eos", ""),
        Stop::Text(text) => ("word", text.as_str()),
        Stop::Limit | Stop::Context => ("limit", ""),
    };
    json!({
        "index": 0, "content": content, "tokens": tokens.iter().map(|t| t.id).collect::<Vec<_>>(), "stop": true,
        "stop_type": stop_type, "stopping_word": word, "model": model, "timings": totals.timings(),
        "tokens_predicted": totals.generated, "tokens_evaluated": totals.prompt, "tokens_cached": totals.cached,
        "truncated": *stop == Stop::Context,
    })
}

struct CompletionWire {
    model: String,
    totals: Totals,
}

impl Wire for CompletionWire {
    fn begin(&mut self, _out: &mut Frames) {}

    fn part(&mut self, part: Part, out: &mut Frames) {
        match part {
            Part::Text { text, tokens, .. } => {
                let tokens: Vec<u32> = tokens.iter().map(|t| t.id).collect();
                out.data(&json!({"index": 0, "content": text, "tokens": tokens, "stop": false}));
            }
            Part::End { choice, stop, usage, reasoning_tokens, .. } => {
                self.totals.add(choice, 1, &usage, reasoning_tokens);
                out.data(&last(&self.model, "", &[], &stop, &self.totals));
            }
            Part::Failed(refusal) => out.data(&refusal.openai()),
            _ => {}
        }
    }

    fn finish(&mut self, _out: &mut Frames) {}
}
