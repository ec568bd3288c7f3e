//! `POST /completion`, llama-server's own way to continue texts; `/infill` answers in the same form.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use kiln_engine::run::StopRule;
use kiln_engine::sampler::Sampling;
use kiln_engine::tokenizer::{ShowSpecial, Tokenizer};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Pace, Totals, completions, finite};
use crate::api_error::ApiError;
use crate::app::App;
use crate::body::Body;
use crate::encoder::{Frames, Framing, ResponseEncoder, json as reply, stream};
use crate::generate::{Generation, Job, Part, Stop, Token};
use crate::guard::Caller;
use crate::params::Params;
use crate::prep_pool::blocking;
use crate::registry::Loaded;
use crate::response_format::ResponseFormatFields;

/// What is to be continued.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "LlamaCompletion")]
pub(crate) struct Fields {
    model: Option<String>,
    prompt: Option<Value>,
}

/// What the answer should hold.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "LlamaAnswer")]
pub(crate) struct Wishes {
    stream: Option<bool>,
    /// Return the probabilities of the N likeliest tokens.
    n_probs: Option<i64>,
    /// Those of the tokens that samplers have left, as probabilities and not as their logarithms.
    post_sampling_probs: Option<bool>,
    return_tokens: Option<bool>,
    /// Only these fields, as `content` or `generation_settings/n_predict`.
    response_fields: Option<Vec<String>>,
    timings_per_token: Option<bool>,
    return_progress: Option<bool>,
}

impl Wishes {
    fn probabilities(&self) -> Result<Option<usize>, ApiError> {
        let Some(wanted) = self.n_probs.filter(|n| *n != 0) else { return Ok(None) };
        match usize::try_from(wanted) {
            Ok(n) if n <= 100 => Ok(Some(n)),
            _ => Err(ApiError::invalid("n_probs", format!("`n_probs` is {wanted}, it must be 0 to 100"))),
        }
    }
}

/// Continues texts.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    mut body: Body,
) -> Result<Response, ApiError> {
    let fields = body.get::<Fields>()?;
    serve(&app, caller, body, move |app| {
        let loaded = app.model(fields.model.as_deref())?;
        let prompt = fields.prompt.as_ref().ok_or_else(|| ApiError::invalid("prompt", "`prompt` is missing"))?;
        let several = prompt.as_array().is_some_and(|list| completions::are_several(list));
        let tokens = completions::prompts(&loaded, Some(prompt))?;
        Ok(Prompts { loaded, tokens, several })
    })
    .await
}

/// What a model shall continue.
pub(super) struct Prompts {
    pub(super) loaded: Arc<Loaded>,
    pub(super) tokens: Vec<Vec<u32>>,
    /// The answer is a list, even of one.
    pub(super) several: bool,
}

/// Continues prompts, which take time to make, as the rest of a body wishes it.
pub(super) async fn serve(
    app: &Arc<App>,
    caller: Caller,
    mut body: Body,
    prompts: impl FnOnce(&App) -> Result<Prompts, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let (params, shape, wishes) = (body.get::<Params>()?, body.get::<ResponseFormatFields>()?, body.get::<Wishes>()?);
    let leftover = body.leftover(app)?;
    let (jobs, several) = blocking(app, move |app| {
        let Prompts { loaded, tokens, several } = prompts(app)?;
        let job = |tokens| completions::job(&loaded, &params, &shape, &caller, tokens);
        Ok((tokens.into_iter().map(job).collect::<Result<Vec<Job>, ApiError>>()?, several))
    })
    .await?;
    Ok(leftover.tell(answer(app, jobs, wishes, several).await?))
}

/// Texts in llama-server's form: a list where there were several prompts, else one object.
async fn answer(app: &Arc<App>, mut jobs: Vec<Job>, wishes: Wishes, several: bool) -> Result<Response, ApiError> {
    let probabilities = wishes.probabilities()?;
    for job in &mut jobs {
        if job.request.choices != 1 {
            return Err(ApiError::unsupported("n", "this path makes one text of a prompt; /v1/completions has `n`"));
        }
        job.request.logprobs = probabilities;
        job.request.after_sampling = wishes.post_sampling_probs == Some(true);
    }
    let mut texts: Vec<Text> = jobs.iter().map(Text::new).collect();
    let generation = Generation::start(app, jobs, "call_")?;
    texts.iter_mut().zip(generation.slots()).for_each(|(text, slot)| text.slot = slot);
    let head = Head { loaded: Arc::clone(generation.loaded()), wishes };
    if head.wishes.stream.unwrap_or(false) {
        return stream(app, generation, CompletionEncoder { head, texts }, Framing::Events).await;
    }
    let answers = generation.collect().await?;
    let whole = |(index, (mut text, answer)): (usize, (Text, crate::generate::Answer))| {
        let totals = Totals::of(std::slice::from_ref(&answer), 1);
        text.new_line = answer.text.contains('\n');
        let stop = answer.stop.as_ref().unwrap_or(&Stop::End);
        head.picked(head.last(index, &text, &answer.text, &answer.tokens, stop, &totals))
    };
    let mut answers: Vec<Value> = texts.into_iter().zip(answers).enumerate().map(whole).collect();
    Ok(reply(&if several { Value::Array(answers) } else { answers.swap_remove(0) }))
}

/// How tokens were chosen, under llama-server's names.
pub(super) fn settings(loaded: &Loaded, sampling: &Sampling, limit: Option<usize>, stop: &StopRule) -> Value {
    let mut value = serde_json::to_value(sampling).unwrap_or_default();
    let limit = limit.map_or(-1, |limit| i64::try_from(limit).unwrap_or(i64::MAX));
    value["n_predict"] = json!(limit);
    value["max_tokens"] = json!(limit);
    // What llama-server shows where each text gets another seed.
    value["seed"] = json!(sampling.seed.unwrap_or(u64::from(u32::MAX)));
    value["stop"] = json!(stop.strings);
    value["ignore_eos"] = json!(stop.ignore_end);
    // A sampler that is not here: this is how llama-server says that it is off.
    value["adaptive_target"] = json!(-1.0);
    value["adaptive_decay"] = json!(0.9);
    let forbidden = |bias: f32| if bias.is_finite() { json!(bias) } else { Value::Null };
    let biases = sampling.logit_bias.iter().map(|(token, bias)| json!({"token": token, "bias": forbidden(*bias)}));
    let ends = loaded.scheduler.model().tokenizer.end_ids().iter().filter(|_| stop.ignore_end);
    value["logit_bias"] = biases.chain(ends.map(|token| json!({"token": token, "bias": null}))).collect();
    value
}

/// What one text was asked for.
struct Text {
    prompt: Vec<u32>,
    sampling: Sampling,
    limit: Option<usize>,
    stop: StopRule,
    slot: usize,
    new_line: bool,
    pace: Pace,
}

impl Text {
    fn new(job: &Job) -> Text {
        let request = &job.request;
        Text {
            prompt: request.prompt.clone(),
            sampling: request.sampling.clone(),
            limit: request.limit,
            stop: request.stop.clone(),
            slot: 0,
            new_line: false,
            pace: Pace::new(request.prompt.len()),
        }
    }
}

struct Head {
    loaded: Arc<Loaded>,
    wishes: Wishes,
}

impl Head {
    fn tokenizer(&self) -> &Tokenizer {
        &self.loaded.scheduler.model().tokenizer
    }

    /// What is told when a text is over.
    fn last(&self, index: usize, text: &Text, content: &str, tokens: &[Token], stop: &Stop, totals: &Totals) -> Value {
        let (stop_type, word) = match stop {
            Stop::End | Stop::Token(_) | Stop::Cancelled => ("eos", ""),
            Stop::Text(text) => ("word", text.as_str()),
            Stop::Limit | Stop::Context => ("limit", ""),
        };
        let told: &[Token] = if self.wishes.return_tokens == Some(true) { tokens } else { &[] };
        let mut value = json!({
            "index": index, "content": content, "tokens": told.iter().map(|t| t.id).collect::<Vec<_>>(), "id_slot": text.slot,
            "stop": true, "model": self.loaded.name, "tokens_predicted": totals.generated, "tokens_evaluated": totals.prompt,
            "generation_settings": settings(&self.loaded, &text.sampling, text.limit, &text.stop),
            "prompt": self.tokenizer().decode(&text.prompt, ShowSpecial::Yes).unwrap_or_default(),
            "has_new_line": text.new_line, "truncated": *stop == Stop::Context, "stop_type": stop_type, "stopping_word": word,
            "tokens_cached": totals.cached, "timings": totals.timings(),
        });
        self.add_probabilities(&mut value, tokens);
        value
    }

    fn add_probabilities(&self, value: &mut Value, tokens: &[Token]) {
        if tokens.iter().any(|token| token.logprobs.is_some()) {
            value["completion_probabilities"] = tokens.iter().filter_map(|token| self.probabilities(token)).collect();
        }
    }

    fn probabilities(&self, token: &Token) -> Option<Value> {
        let found = token.logprobs.as_ref()?;
        let after_sampling = self.wishes.post_sampling_probs == Some(true);
        let entry = |id: u32, logprob: f32| {
            let bytes = self.tokenizer().piece(id).unwrap_or_default();
            let (name, value) = if after_sampling { ("prob", logprob.exp()) } else { ("logprob", finite(logprob)) };
            json!({"id": id, "token": String::from_utf8_lossy(bytes), "bytes": bytes, (name): value})
        };
        let mut value = entry(token.id, found.logprob);
        let top = found.top.iter().filter(|(_, logprob)| !after_sampling || logprob.exp() > 0.0);
        let name = if after_sampling { "top_probs" } else { "top_logprobs" };
        value[name] = top.map(|(id, logprob)| entry(*id, *logprob)).collect();
        Some(value)
    }

    /// Only what was asked for, where that was said, each under the path that it was asked by.
    fn picked(&self, value: Value) -> Value {
        let Some(paths) = self.wishes.response_fields.as_ref().filter(|paths| !paths.is_empty()) else { return value };
        let mut picked = Map::new();
        for path in paths {
            let found = path.split('/').try_fold(&value, |value, name| value.get(name));
            if let Some(found) = found {
                picked.insert(path.clone(), found.clone());
            }
        }
        Value::Object(picked)
    }
}

struct CompletionEncoder {
    head: Head,
    texts: Vec<Text>,
}

impl ResponseEncoder for CompletionEncoder {
    fn begin(&mut self, _out: &mut Frames) {}

    fn part(&mut self, part: Part, out: &mut Frames) {
        let head = &self.head;
        match part {
            Part::Text { choice, text, tokens } => {
                let about = &mut self.texts[choice];
                about.new_line |= text.contains('\n');
                about.pace.write(tokens.len());
                let ids: Vec<u32> = tokens.iter().map(|t| t.id).collect();
                let mut chunk = json!({
                    "index": choice, "content": text, "tokens": ids, "stop": false, "id_slot": about.slot,
                    "tokens_predicted": about.pace.written(), "tokens_evaluated": about.prompt.len(),
                });
                head.add_probabilities(&mut chunk, &tokens);
                if head.wishes.timings_per_token == Some(true) {
                    chunk["timings"] = about.pace.timings();
                }
                out.data(&chunk);
            }
            Part::End { choice, stop, usage, reasoning_tokens, tokens } => {
                let mut totals = Totals::default();
                totals.add(0, 1, &usage, reasoning_tokens);
                let last = head.last(choice, &self.texts[choice], "", &tokens, &stop, &totals);
                out.data(&head.picked(last));
            }
            Part::Progress { cached, read } => {
                // Only for one prompt: with several, the progress could not be attributed.
                if let [about] = self.texts.as_mut_slice() {
                    about.pace.read(cached, read);
                    if head.wishes.return_progress == Some(true) {
                        out.data(&json!({
                            "index": 0, "content": "", "tokens": [], "stop": false, "id_slot": about.slot,
                            "tokens_predicted": 0, "tokens_evaluated": read, "prompt_progress": about.pace.progress(),
                        }));
                    }
                }
            }
            Part::Failed(refusal) => out.data(&refusal.openai()),
            _ => {}
        }
    }

    fn finish(&mut self, _out: &mut Frames) {}
}
