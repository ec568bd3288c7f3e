//! `POST /v1/completions`: texts continued as they are.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use kiln_engine::run::{Entry, Request, Wanted};
use kiln_engine::sampler::logprobs;
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial, ShowSpecial, Tokenizer};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::chat_completions::{StreamOptions, WithoutEffect, fingerprint};
use super::{Pace, Totals, finish_reason, finite, infill, stop_reason, token_text};
use crate::api_error::ApiError;
use crate::app::{App, fresh_id, now};
use crate::body::Body;
use crate::chat::check_length;
use crate::encode::{Purpose, encode};
use crate::encoder::{Frames, Framing, ResponseEncoder, json as reply, stream};
use crate::generate::{Answer, Form, Generation, Job, Part, Stop, Token};
use crate::guard::Caller;
use crate::params::Params;
use crate::prep_pool::{blocking, release};
use crate::registry::Loaded;
use crate::response_format::ResponseFormatFields;

/// The tokens of an answer where a request says nothing: this API's own default.
const DEFAULT_LIMIT: usize = 16;
const MOST_PROMPTS: usize = 128;
/// Tokens of an echoed prompt that are measured at once, so that others' texts go on between.
const MEASURE: usize = 256;

/// The fields of the API beside those about sampling and shape.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "CompletionRequest")]
pub(crate) struct Fields {
    model: Option<String>,
    prompt: Option<Value>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    logprobs: Option<i64>,
    echo: Option<bool>,
    suffix: Option<String>,
    best_of: Option<i64>,
    return_token_ids: Option<bool>,
}

/// The tokens of one prompt: a text, a list of tokens with texts among them, or llama.cpp's object that may hold media.
pub(crate) fn prompt_tokens(loaded: &Loaded, param: &str, value: &Value) -> Result<Vec<u32>, ApiError> {
    let encode = |text: &str, add: AddSpecial| -> Result<Vec<u32>, ApiError> {
        encode(loaded, Purpose::Prompt, text, add, ParseSpecial::Yes)
    };
    match value {
        Value::String(text) => encode(text, AddSpecial::Yes),
        Value::Array(pieces) => {
            piece_tokens(loaded, Purpose::Prompt, param, pieces, AddSpecial::Yes, ParseSpecial::Yes)
        }
        Value::Object(object) => {
            match (object.get("prompt_string").and_then(Value::as_str), object.get("multimodal_data")) {
                (Some(text), None | Some(Value::Null)) => encode(text, AddSpecial::Yes),
                (Some(_), Some(_)) => Err(ApiError::unsupported(param, "this model takes text only")),
                (None, _) => Err(ApiError::invalid(param, format!("`{param}` must have a `prompt_string`"))),
            }
        }
        _ => Err(ApiError::invalid(param, format!("`{param}` must be a string or a list of tokens"))),
    }
}

/// The tokens of a list of texts and tokens.
pub(crate) fn piece_tokens(
    loaded: &Loaded,
    purpose: Purpose,
    param: &str,
    pieces: &[Value],
    add: AddSpecial,
    parse: ParseSpecial,
) -> Result<Vec<u32>, ApiError> {
    let (vocab, mut tokens) = (loaded.scheduler.model().config.vocab, Vec::new());
    for (i, piece) in pieces.iter().enumerate() {
        if let Value::String(text) = piece {
            tokens.extend(encode(loaded, purpose, text, if i == 0 { add } else { AddSpecial::No }, parse)?);
            continue;
        }
        let id = piece.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < vocab);
        let param = format!("{param}[{i}]");
        let message = format!("`{param}` is {piece}, no token below {vocab}");
        tokens.push(id.ok_or_else(|| ApiError::invalid(param, message))?);
    }
    Ok(tokens)
}

/// Whether a list holds prompts, and is not one of tokens.
pub(crate) fn are_several(list: &[Value]) -> bool {
    !list.is_empty() && (list.iter().all(Value::is_string) || list.iter().any(|v| v.is_array() || v.is_object()))
}

/// All prompts of a request: a text, tokens, or a list of either.
pub(crate) fn prompts(loaded: &Loaded, value: Option<&Value>) -> Result<Vec<Vec<u32>>, ApiError> {
    let list = match value {
        None | Some(Value::Null) => vec![prompt_tokens(loaded, "prompt", &json!(""))?],
        Some(Value::Array(list)) if are_several(list) => list
            .iter()
            .enumerate()
            .map(|(i, v)| prompt_tokens(loaded, &format!("prompt[{i}]"), v))
            .collect::<Result<_, _>>()?,
        Some(one) => vec![prompt_tokens(loaded, "prompt", one)?],
    };
    if list.len() > MOST_PROMPTS {
        return Err(ApiError::invalid(
            "prompt",
            format!("{} prompts are too many, at most {MOST_PROMPTS}", list.len()),
        ));
    }
    let bos = loaded.scheduler.model().tokenizer.vocab().bos;
    list.into_iter()
        .map(|tokens| match (tokens.is_empty(), bos) {
            // Nothing to continue: the text begins.
            (true, Some(bos)) => Ok(vec![bos]),
            (true, None) => {
                Err(ApiError::invalid("prompt", "the prompt is empty, and the model has no token to begin with"))
            }
            (false, _) => check_length(loaded, tokens.len()).map(|()| tokens),
        })
        .collect()
}

/// A request for one prompt; also for the other APIs that continue plain text.
pub(crate) fn job(
    loaded: &Arc<Loaded>,
    params: &Params,
    shape: &ResponseFormatFields,
    caller: &Caller,
    prompt: Vec<u32>,
) -> Result<Job, ApiError> {
    let constraint = match (params.allowed(loaded)?, shape.shape()?) {
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid("allowed_token_ids", "allowed_token_ids and a schema exclude each other"));
        }
        (allowed, None) => allowed,
        (None, Some(shape)) => Some(loaded.setup.constraint(&shape)?),
    };
    let request = Request {
        limit: params.limit()?.or(loaded.limit),
        sampling: params.sampling(loaded)?,
        stop: params.stop_rule(loaded)?,
        constraint,
        choices: params.choices(loaded)?,
        owner: params.owner(caller),
        reuse: params.reuse(),
        most_drafted: params.most_drafted(),
        scales: params.scales(loaded)?,
        ..Request::new(prompt)
    };
    let (loaded, caller) = (Arc::clone(loaded), caller.clone());
    Ok(Job { loaded, caller, request, slot: params.slot(), form: Form::Plain, ends: Vec::new() })
}

/// What was asked, checked.
struct Plan {
    loaded: Arc<Loaded>,
    jobs: Vec<Job>,
    /// With `echo`: the prompts and what is reported of them.
    echo: Option<Vec<Echo>>,
    /// Texts that are made of each prompt, and how many of them are told: the likeliest.
    choices: usize,
    kept: usize,
    /// The prompts alone are wanted.
    nothing_more: bool,
}

/// The likeliest answers to each prompt, by the mean of their tokens.
fn likeliest(answers: Vec<Answer>, plan: &Plan) -> Vec<Answer> {
    if plan.kept == plan.choices {
        return answers;
    }
    let mean = |answer: &Answer| {
        let all: Vec<f32> = answer.tokens.iter().filter_map(|token| Some(token.logprobs.as_ref()?.logprob)).collect();
        all.iter().sum::<f32>() / all.len().max(1) as f32
    };
    let (mut answers, mut kept) = (answers.into_iter().peekable(), Vec::new());
    while answers.peek().is_some() {
        let mut of_one: Vec<Answer> = answers.by_ref().take(plan.choices).collect();
        of_one.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        kept.extend(of_one.into_iter().take(plan.kept));
    }
    kept
}

#[derive(Clone, Default)]
struct Echo {
    text: String,
    tokens: Vec<Token>,
}

/// Tells work that its client has gone.
struct Gone(Arc<AtomicBool>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn plan(
    app: &App,
    fields: &Fields,
    params: &mut Params,
    shape: &ResponseFormatFields,
    caller: &Caller,
    gone: &AtomicBool,
) -> Result<Plan, ApiError> {
    let loaded = &app.model(fields.model.as_deref())?;
    let kept = params.choices(loaded)?;
    if let Some(best_of) = fields.best_of.filter(|best_of| *best_of != kept as i64) {
        if best_of < kept as i64 || fields.stream == Some(true) {
            let message =
                format!("`best_of` is {best_of}; it must be at least `n` ({kept}), and `n` itself in a stream");
            return Err(ApiError::invalid("best_of", message));
        }
        params.n = Some(best_of);
    }
    if fields.stream_options.is_some() && fields.stream != Some(true) {
        return Err(ApiError::invalid("stream_options", "`stream_options` may only be given with `stream: true`"));
    }
    let top = match fields.logprobs.map(usize::try_from) {
        None => None,
        Some(Ok(top)) if top <= 20 => Some(top),
        Some(_) => return Err(ApiError::invalid("logprobs", "`logprobs` must be 0 to 20")),
    };
    let echo = fields.echo.unwrap_or(false);
    let nothing_more = params.max_tokens == Some(0) && echo;
    if nothing_more {
        params.max_tokens = None;
    }
    let choices = params.choices(loaded).map_err(|refusal| match params.n == Some(kept as i64) {
        true => refusal,
        false => refusal.with_param("best_of"),
    })?;
    let prompts = match (fields.suffix.as_deref().filter(|suffix| !suffix.is_empty()), &fields.prompt) {
        (None, prompt) => prompts(loaded, prompt.as_ref())?,
        (Some(suffix), Some(Value::String(prefix))) => vec![infill::prompt(loaded, prefix, suffix, &[])?],
        (Some(_), _) => return Err(ApiError::invalid("suffix", "`suffix` needs one `prompt` that is a string")),
    };
    let echo = match echo {
        true => Some(prompts.iter().map(|prompt| echoed(loaded, prompt, top, gone)).collect::<Result<_, _>>()?),
        false => None,
    };
    let jobs = prompts.into_iter().map(|prompt| {
        let mut job = job(loaded, params, shape, caller, prompt)?;
        job.request.limit = Some(job.request.limit.unwrap_or(DEFAULT_LIMIT));
        // The best are found by their probability.
        job.request.logprobs = top.or((choices > kept).then_some(0));
        Ok(job)
    });
    let jobs = jobs.collect::<Result<_, ApiError>>()?;
    Ok(Plan { loaded: Arc::clone(loaded), jobs, echo, choices, kept, nothing_more })
}

/// The prompt as part of the answer, with the probability of each token after those before it.
fn echoed(loaded: &Loaded, prompt: &[u32], top: Option<usize>, gone: &AtomicBool) -> Result<Echo, ApiError> {
    let tokenizer = &loaded.scheduler.model().tokenizer;
    let text = tokenizer.decode(prompt, ShowSpecial::No).map_err(kiln_engine::Error::from)?;
    let Some(top) = top else { return Ok(Echo { text, tokens: Vec::new() }) };
    let mut tokens = vec![Token { id: prompt[0], logprobs: None }];
    let fed = &prompt[..prompt.len() - 1];
    if fed.is_empty() {
        return Ok(Echo { text, tokens });
    }
    // A cache scope of its own: nothing is shared with other requests.
    release();
    let sequence = loaded.scheduler.with_engine(|engine| engine.open(u64::MAX))??;
    for (piece, at) in fed.chunks(MEASURE).zip((0..).step_by(MEASURE)) {
        let (piece, next) = (piece.to_vec(), prompt[at + 1..].to_vec());
        let measured = loaded.scheduler.with_engine(move |engine| {
            let entry = Entry { sequence, tokens: &piece, wanted: Wanted::All };
            let rows = engine.feed(&[entry])?;
            let vocab = engine.model().config.vocab;
            let rows = rows.iter().flat_map(|rows| rows.chunks_exact(vocab));
            let of = |(row, id): (&[f32], &u32)| Token { id: *id, logprobs: Some(logprobs(row, *id, top)) };
            Ok::<_, kiln_engine::Error>(rows.zip(&next).map(of).collect::<Vec<Token>>())
        });
        let left = gone.load(Ordering::Relaxed).then_some(kiln_engine::Error::Stopped);
        match measured.and_then(|result| left.map_or(result, Err)) {
            Ok(more) => tokens.extend(more),
            Err(error) => {
                loaded.scheduler.with_engine(move |engine| engine.close(sequence))?;
                return Err(error.into());
            }
        }
    }
    loaded.scheduler.with_engine(move |engine| engine.close(sequence))?;
    Ok(Echo { text, tokens })
}

/// Serves the request.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let (fields, mut params, shape) =
        (body.get::<Fields>()?, body.get::<Params>()?, body.get::<ResponseFormatFields>()?);
    body.get::<WithoutEffect>()?;
    let leftover = body.leftover(&app)?;
    // Scoring a prompt takes long: closing the connection drops this.
    let gone = Gone(Arc::default());
    let seen = Arc::clone(&gone.0);
    let (fields, mut plan) = blocking(&app, move |app| {
        let plan = plan(app, &fields, &mut params, &shape, &caller, &seen)?;
        Ok((fields, plan))
    })
    .await?;
    drop(gone);
    let head = Head {
        id: fresh_id("cmpl-"),
        created: now(),
        model: plan.loaded.name.clone(),
        tokenizer: Arc::clone(&plan.loaded.scheduler.model().tokenizer),
        token_ids: fields.return_token_ids.unwrap_or(false),
    };
    let wants_logprobs = fields.logprobs.is_some();
    let response = if plan.nothing_more {
        let streams = fields.stream.unwrap_or(false);
        let usage = fields.stream_options.unwrap_or_default().include_usage.unwrap_or(false);
        match head.only_prompts(&plan, wants_logprobs) {
            whole if streams => once(whole, usage),
            whole => reply(&whole),
        }
    } else if fields.stream.unwrap_or(false) {
        let texts = plan.jobs.len() * plan.choices;
        let pace = Pace::new(plan.jobs.iter().map(|job| job.request.prompt.len()).sum());
        let generation = Generation::start(&app, plan.jobs, "call_")?;
        let options = fields.stream_options.unwrap_or_default();
        let encoder = TextEncoder {
            head,
            choices: plan.choices,
            echo: plan.echo,
            wants_logprobs,
            offsets: vec![0; texts],
            include_usage: options.include_usage.unwrap_or(false),
            continuous: options.continuous_usage_stats.unwrap_or(false),
            pace,
            totals: Totals::default(),
        };
        stream(&app, generation, encoder, Framing::Events).await?
    } else {
        let generation = Generation::start(&app, std::mem::take(&mut plan.jobs), "call_")?;
        let answers = generation.collect().await?;
        let totals = Totals::of(&answers, plan.choices);
        let mut answers = likeliest(answers, &plan);
        for (i, answer) in answers.iter_mut().enumerate() {
            if let Some(echo) = plan.echo.as_ref().map(|echo| echo[i / plan.kept].clone()) {
                answer.text.insert_str(0, &echo.text);
                answer.tokens.splice(0..0, echo.tokens);
            }
        }
        reply(&head.whole(&answers, &totals, wants_logprobs))
    };
    Ok(leftover.tell(response))
}

/// A whole answer as the only piece of a stream.
fn once(mut whole: Value, include_usage: bool) -> Response {
    let mut frames = Frames::new(Framing::Events);
    let usage = whole["usage"].take();
    let mut last = whole.clone();
    if let Some(whole) = whole.as_object_mut().filter(|_| !include_usage) {
        whole.remove("usage");
    }
    frames.data(&whole);
    if include_usage {
        (last["choices"], last["usage"]) = (json!([]), usage);
        frames.data(&last);
    }
    frames.done();
    frames.whole()
}

struct Head {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    token_ids: bool,
}

impl Head {
    fn envelope(&self, choices: Value) -> Value {
        json!({
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.model,
            "system_fingerprint": fingerprint(), "choices": choices,
        })
    }

    fn whole(&self, answers: &[Answer], totals: &Totals, wants_logprobs: bool) -> Value {
        let choice = |(index, answer): (usize, &Answer)| {
            let stop = answer.stop.clone().unwrap_or(Stop::End);
            let mut offset = 0;
            let logprobs = match wants_logprobs {
                true => text_logprobs(&self.tokenizer, &answer.tokens, &mut offset),
                false => Value::Null,
            };
            let mut choice = json!({
                "index": index, "text": answer.text, "logprobs": logprobs,
                "finish_reason": finish_reason(&stop, false), "stop_reason": stop_reason(&stop),
            });
            if self.token_ids {
                choice["token_ids"] = answer.tokens.iter().map(|t| json!(t.id)).collect();
            }
            choice
        };
        let mut whole = self.envelope(answers.iter().enumerate().map(choice).collect());
        whole["usage"] = totals.openai();
        whole["timings"] = totals.timings();
        whole
    }

    /// With `echo` and no tokens to make, the prompts are the answer.
    fn only_prompts(&self, plan: &Plan, wants_logprobs: bool) -> Value {
        let echo = plan.echo.as_deref().unwrap_or_default();
        let usage =
            |job: &Job| kiln_engine::run::Usage { prompt_tokens: job.request.prompt.len(), ..Default::default() };
        let answer = |(echo, job): (&Echo, &Job)| Answer {
            text: echo.text.clone(),
            tokens: echo.tokens.clone(),
            stop: Some(Stop::Limit),
            usage: usage(job),
            ..Answer::default()
        };
        let answers: Vec<Answer> = echo.iter().zip(&plan.jobs).map(answer).collect();
        self.whole(&answers, &Totals::of(&answers, 1), wants_logprobs)
    }
}

/// The lists that this API reports probabilities in; a first token of a text has none.
fn text_logprobs(tokenizer: &Tokenizer, tokens: &[Token], offset: &mut usize) -> Value {
    let (mut texts, mut values, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for token in tokens {
        let text = token_text(tokenizer, token.id);
        offsets.push(json!(*offset));
        *offset += text.chars().count();
        values.push(token.logprobs.as_ref().map_or(Value::Null, |l| json!(finite(l.logprob))));
        tops.push(token.logprobs.as_ref().map_or(Value::Null, |found| {
            let mut top = Map::new();
            for (id, logprob) in &found.top {
                // Of tokens that look the same as text, the likelier one stays.
                top.entry(token_text(tokenizer, *id)).or_insert(json!(finite(*logprob)));
            }
            top.entry(text.clone()).or_insert(json!(finite(found.logprob)));
            Value::Object(top)
        }));
        texts.push(text);
    }
    json!({"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets})
}

struct TextEncoder {
    head: Head,
    choices: usize,
    echo: Option<Vec<Echo>>,
    wants_logprobs: bool,
    /// Characters of each text so far.
    offsets: Vec<usize>,
    include_usage: bool,
    /// Every piece says what was used so far.
    continuous: bool,
    pace: Pace,
    totals: Totals,
}

impl TextEncoder {
    fn chunk(&mut self, index: usize, text: &str, tokens: &[Token], stop: Option<&Stop>) -> Value {
        let logprobs = match self.wants_logprobs && !tokens.is_empty() {
            true => text_logprobs(&self.head.tokenizer, tokens, &mut self.offsets[index]),
            false => Value::Null,
        };
        let finish = stop.map(|stop| finish_reason(stop, false));
        let mut choice = json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish});
        if let Some(stop) = stop {
            choice["stop_reason"] = stop_reason(stop);
        }
        if self.head.token_ids {
            choice["token_ids"] = tokens.iter().map(|t| json!(t.id)).collect();
        }
        let mut chunk = self.head.envelope(json!([choice]));
        if self.continuous {
            chunk["usage"] = self.pace.usage();
        } else if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

impl ResponseEncoder for TextEncoder {
    fn begin(&mut self, out: &mut Frames) {
        let Some(echo) = self.echo.take() else { return };
        for index in 0..self.offsets.len() {
            let echo = &echo[index / self.choices];
            let chunk = self.chunk(index, &echo.text, &echo.tokens, None);
            out.data(&chunk);
        }
    }

    fn part(&mut self, part: Part, out: &mut Frames) {
        match part {
            Part::Text { choice, text, tokens } | Part::Reasoning { choice, text, tokens } => {
                self.pace.write(tokens.len());
                let chunk = self.chunk(choice, &text, &tokens, None);
                out.data(&chunk);
            }
            Part::End { choice, stop, usage, tokens, reasoning_tokens } => {
                self.totals.add(choice, self.choices, &usage, reasoning_tokens);
                self.pace.write(tokens.len());
                let chunk = self.chunk(choice, "", &tokens, Some(&stop));
                out.data(&chunk);
            }
            Part::Failed(refusal) => out.data(&refusal.openai()),
            Part::Progress { .. } | Part::CallStart { .. } | Part::CallArguments { .. } | Part::CallEnd { .. } => {}
        }
    }

    fn finish(&mut self, out: &mut Frames) {
        if self.include_usage {
            let mut chunk = self.head.envelope(json!([]));
            chunk["usage"] = self.totals.openai();
            chunk["timings"] = self.totals.timings();
            out.data(&chunk);
        }
        out.done();
    }
}
