//! From a request to a stream of parts: hands requests to the engine, and reads reasoning, tool calls and plain text out of
//! what it writes. Every API is built on this one stream.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_engine::run::{Cancel, EndReason, Event, Request, Usage};
use kiln_engine::sampler::Logprobs;
use kiln_engine::text;
use kiln_llm::chat::AnswerReader;
pub(crate) use kiln_llm::chat::Stop;
use serde_json::json;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::api_error::{ApiError, Kind};
use crate::app::{App, Permit, fresh_id};
use crate::guard::{Caller, facts};
use crate::metrics::{Watch, finish_reason};
use crate::registry::Loaded;
use crate::slots::SlotClaim;
use crate::trace::Trace;

/// How the text of an answer is to be understood.
#[derive(Default)]
pub(crate) enum Form {
    /// Text and nothing else.
    #[default]
    Plain,
    /// What an assistant says, with reasoning and calls.
    Chat(Box<kiln_llm::chat::Form>),
}

/// One request to the engine.
pub(crate) struct Job {
    /// The model that it is for; it stays as long as the request does.
    pub(crate) loaded: Arc<Loaded>,
    /// Who asks.
    pub(crate) caller: Caller,
    pub(crate) request: Request,
    /// The slot that it wants.
    pub(crate) slot: Option<usize>,
    pub(crate) form: Form,
    /// Tokens that end a turn by the template: they end a text as the model's own do.
    pub(crate) ends: Vec<u32>,
}

/// A token as it was chosen.
#[derive(Clone, Debug)]
pub(crate) struct Token {
    pub(crate) id: u32,
    pub(crate) logprobs: Option<Logprobs>,
}

/// One thing that happened. Choices are counted over all requests of a generation.
#[derive(Debug)]
pub(crate) enum Part {
    /// A prompt is being read.
    Progress { cached: usize, read: usize },
    /// Text for the reader.
    Text { choice: usize, text: String, tokens: Vec<Token> },
    /// What the model thinks.
    Reasoning { choice: usize, text: String, tokens: Vec<Token> },
    /// A tool call begins.
    CallStart { choice: usize, index: usize, id: String, name: String },
    /// A piece of its arguments.
    CallArguments { choice: usize, index: usize, text: String },
    /// It is over.
    CallEnd { index: usize },
    /// A text is finished. Tokens that gave no text are here.
    End { choice: usize, stop: Stop, usage: Usage, tokens: Vec<Token>, reasoning_tokens: usize },
    /// Everything failed; nothing comes after it.
    Failed(ApiError),
}

/// A tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) arguments: String,
}

/// A whole text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    pub(crate) text: String,
    pub(crate) reasoning: String,
    pub(crate) calls: Vec<Call>,
    pub(crate) tokens: Vec<Token>,
    pub(crate) stop: Option<Stop>,
    pub(crate) usage: Usage,
    pub(crate) reasoning_tokens: usize,
}

/// Reads one text.
struct Reader {
    answer: AnswerReader,
    /// Tokens whose text is held back.
    held: Vec<Token>,
    reasoning_tokens: usize,
    /// The prompt alone was to be read: the engine makes a token of every prompt, which is not told.
    silent: bool,
}

/// What the log tells of a generation.
#[derive(Clone, Copy, Default)]
struct Told {
    prompt: usize,
    cached: usize,
    written: usize,
    reason: &'static str,
}

impl Told {
    /// Counts the tokens of an answer as they come: one that is broken off has no end that tells them.
    fn count(&mut self, event: &Event) {
        self.written += usize::from(matches!(event, Event::Token { .. }));
    }
}

/// Requests on their way. Dropping it cancels them.
pub(crate) struct Generation {
    from: UnboundedReceiver<(usize, Event)>,
    cancels: Vec<Cancel>,
    readers: Vec<Reader>,
    choices: usize,
    open: usize,
    cached: Vec<usize>,
    /// The slot of each request's first text.
    slots: Vec<SlotClaim>,
    ready: VecDeque<Part>,
    prefix: &'static str,
    /// A prompt has been begun.
    began: bool,
    came: Instant,
    /// How long it may wait to be begun, and how long it may take.
    limits: [Option<Duration>; 2],
    loaded: Arc<Loaded>,
    /// The span ends with the generation.
    trace: Option<Arc<Trace>>,
    /// The id of the request, and what is told of it at its end.
    request: String,
    told: Told,
    _permit: Permit,
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.cancels.iter().for_each(Cancel::cancel);
        // Generated tokens count even if the client did not read them.
        while let Ok((_, event)) = self.from.try_recv() {
            self.told.count(&event);
        }
        self.loaded.slots.end(&self.slots);
        let Told { prompt, cached, written, reason } = self.told;
        let seconds = (self.came.elapsed().as_secs_f64() * 1e6).round() / 1e6;
        let reason = if self.open > 0 { "abort" } else { reason };
        facts(
            "answer",
            &json!({
                "id": self.request, "model": self.loaded.name, "prompt_tokens": prompt, "cached_tokens": cached,
                "written_tokens": written, "reason": reason, "seconds": seconds,
            }),
        );
    }
}

impl Generation {
    /// The model that writes.
    pub(crate) fn loaded(&self) -> &Arc<Loaded> {
        &self.loaded
    }

    /// The slots of the requests' first texts.
    pub(crate) fn slots(&self) -> impl Iterator<Item = usize> {
        self.slots.iter().map(|claim| claim.at)
    }

    /// Hands requests in, all for one model and with the same number of choices. `prefix` begins the ids of tool calls.
    pub(crate) fn start(app: &Arc<App>, jobs: Vec<Job>, prefix: &'static str) -> Result<Generation, ApiError> {
        let first = jobs.first().ok_or_else(|| ApiError::new(Kind::Invalid, "there is no prompt"))?;
        let (loaded, choices) = (Arc::clone(&first.loaded), first.request.choices);
        let (trace, request) = (first.caller.trace.clone(), first.caller.request.clone());
        let told = Told { prompt: jobs.iter().map(|job| job.request.prompt.len()).sum(), ..Told::default() };
        if let Some(trace) = &trace {
            trace.model(&loaded.name);
        }
        let permit = app.permit(&loaded, &first.caller)?;
        let (to, from) = unbounded_channel();
        let (mut readers, mut slots) = (Vec::new(), Vec::new());
        let (mut cancels, count) = (Vec::new(), jobs.len());
        for (number, mut job) in jobs.into_iter().enumerate() {
            readers.extend((0..choices).map(|_| Reader::new(&job)));
            slots.push(loaded.slots.begin(job.slot, &job.request));
            job.request.stop.tokens.extend(&job.ends);
            job.request.limit = job.request.limit.map(|limit| limit.max(1));
            let adapter = loaded.adapter_of(job.request.scales.as_deref());
            let (to, mut watch) = (to.clone(), Watch::new(&loaded.metrics, &job.request, adapter));
            cancels.push(loaded.scheduler.submit(job.request, move |event| {
                watch.see(&event);
                to.send((number, event)).is_ok()
            }));
        }
        let cached = vec![0; count];
        let open = readers.len();
        Ok(Generation {
            from,
            cancels,
            readers,
            choices,
            open,
            cached,
            slots,
            ready: VecDeque::new(),
            prefix,
            began: false,
            came: Instant::now(),
            limits: [app.settings.queue_limit, app.settings.total_limit],
            loaded,
            trace,
            request,
            told,
            _permit: permit,
        })
    }

    /// What happens next; nothing after the last text's end or a failure.
    pub(crate) async fn next(&mut self) -> Option<Part> {
        loop {
            if let Some(part) = self.ready.pop_front() {
                return Some(part);
            }
            if self.open == 0 {
                return None;
            }
            let (limit, kind, what) = self.limit();
            let event = match limit {
                Some(limit) => tokio::time::timeout_at((self.came + limit).into(), self.from.recv()).await,
                None => Ok(self.from.recv().await),
            };
            match event {
                Ok(Some((job, event))) => self.take(job, event),
                Ok(None) => self.fail(kiln_engine::Error::Stopped.into()),
                Err(_) => {
                    let seconds = self.came.elapsed().as_secs_f64();
                    self.fail(ApiError::new(
                        kind,
                        format!("the request {what} for {seconds:.1} s, which is all it may"),
                    ));
                }
            }
        }
    }

    /// How long all may last from here, and what it means if it lasts longer.
    fn limit(&self) -> (Option<Duration>, Kind, &'static str) {
        let [queue, total] = self.limits;
        match queue.filter(|queue| !self.began && total.is_none_or(|total| *queue < total)) {
            Some(queue) => (Some(queue), Kind::QueueFull, "waited"),
            None => (total, Kind::TooSlow, "ran"),
        }
    }

    /// What has happened already.
    pub(crate) fn try_next(&mut self) -> Option<Part> {
        while self.ready.is_empty() && self.open > 0 {
            let Ok((job, event)) = self.from.try_recv() else { break };
            self.take(job, event);
        }
        self.ready.pop_front()
    }

    fn fail(&mut self, refusal: ApiError) {
        if let Some(trace) = &self.trace {
            trace.failed(refusal.name());
        }
        self.open = 0;
        self.told.reason = "error";
        self.cancels.iter().for_each(Cancel::cancel);
        self.ready.push_back(Part::Failed(refusal));
    }

    fn take(&mut self, job: usize, event: Event) {
        self.told.count(&event);
        match event {
            Event::Started { cached_tokens } => {
                self.began = true;
                self.told.cached += cached_tokens;
                self.cached[job] = cached_tokens;
                self.ready.push_back(Part::Progress { cached: cached_tokens, read: cached_tokens });
            }
            Event::Read { tokens } => {
                self.ready.push_back(Part::Progress { cached: self.cached[job], read: tokens });
            }
            Event::Token { choice, token, text, logprobs } => {
                if let Some(trace) = &self.trace {
                    trace.token();
                }
                if choice == 0 {
                    self.loaded.slots.push(self.slots[job], token);
                }
                let choice = job * self.choices + choice;
                self.readers[choice].token(choice, Token { id: token, logprobs }, &text, self.prefix, &mut self.ready);
            }
            Event::End { choice, text, reason, usage } => {
                let choice = job * self.choices + choice;
                self.open -= 1;
                self.told.reason = finish_reason(&reason);
                if let Some(trace) = &self.trace {
                    trace.end(&usage, finish_reason(&reason));
                }
                self.readers[choice].end(choice, &text, reason, usage, self.prefix, &mut self.ready);
            }
            Event::Failed(error) => self.fail(error.into()),
        }
    }

    /// Waits for everything.
    pub(crate) async fn collect(mut self) -> Result<Vec<Answer>, ApiError> {
        let mut answers: Vec<Answer> = self.readers.iter().map(|_| Answer::default()).collect();
        while let Some(part) = self.next().await {
            match part {
                Part::Progress { .. } | Part::CallEnd { .. } => {}
                Part::Text { choice, text, tokens } => {
                    answers[choice].text += &text;
                    answers[choice].tokens.extend(tokens);
                }
                Part::Reasoning { choice, text, tokens } => {
                    answers[choice].reasoning += &text;
                    answers[choice].tokens.extend(tokens);
                }
                Part::CallStart { choice, id, name, .. } => {
                    answers[choice].calls.push(Call { id, name, arguments: String::new() });
                }
                Part::CallArguments { choice, index, text } => {
                    if let Some(call) = answers[choice].calls.get_mut(index) {
                        call.arguments += &text;
                    }
                }
                Part::End { choice, stop, usage, tokens, reasoning_tokens } => {
                    let answer = &mut answers[choice];
                    answer.tokens.extend(tokens);
                    (answer.stop, answer.usage, answer.reasoning_tokens) = (Some(stop), usage, reasoning_tokens);
                }
                Part::Failed(refusal) => return Err(refusal),
            }
        }
        Ok(answers)
    }
}

impl Reader {
    fn new(job: &Job) -> Reader {
        let answer = match &job.form {
            Form::Plain => AnswerReader::new(None, 0, job.ends.clone()),
            Form::Chat(form) => form.reader(&job.ends),
        };
        let silent = job.request.limit == Some(0);
        Reader { answer, held: Vec::new(), reasoning_tokens: 0, silent }
    }

    fn token(&mut self, choice: usize, token: Token, text: &str, prefix: &str, out: &mut VecDeque<Part>) {
        if self.silent {
            return;
        }
        self.held.push(token);
        self.reasoning_tokens += usize::from(self.answer.is_reasoning());
        let events = self.answer.push(text);
        self.tell(choice, events, prefix, out);
    }

    fn tell(&mut self, choice: usize, events: Vec<text::Event>, prefix: &str, out: &mut VecDeque<Part>) {
        for event in events {
            out.push_back(match event {
                text::Event::Content(text) => Part::Text { choice, text, tokens: std::mem::take(&mut self.held) },
                text::Event::Reasoning(text) => {
                    Part::Reasoning { choice, text, tokens: std::mem::take(&mut self.held) }
                }
                text::Event::CallStart { index, id, name } => {
                    Part::CallStart { choice, index, id: id.unwrap_or_else(|| fresh_id(prefix)), name }
                }
                text::Event::CallArguments { index, text } => Part::CallArguments { choice, index, text },
                text::Event::CallEnd { index } => Part::CallEnd { index },
            });
        }
    }

    fn end(
        &mut self,
        choice: usize,
        text: &str,
        reason: EndReason,
        usage: Usage,
        prefix: &str,
        out: &mut VecDeque<Part>,
    ) {
        if self.silent {
            let usage = Usage { generated_tokens: 0, ..usage };
            out.push_back(Part::End { choice, stop: Stop::Limit, usage, tokens: Vec::new(), reasoning_tokens: 0 });
            return;
        }
        let events = self.answer.end(text, &reason);
        self.tell(choice, events, prefix, out);
        if self.answer.ended_by_token(&reason) {
            // The end is no part of what was said.
            self.held.pop();
        }
        let stop = self.answer.stop(reason);
        let (tokens, reasoning_tokens) = (std::mem::take(&mut self.held), self.reasoning_tokens);
        out.push_back(Part::End { choice, stop, usage, tokens, reasoning_tokens });
    }
}
