//! Who runs next: every step takes all texts that are being written and a piece of the prompts that are being read, sized so that
//! nobody who writes stutters. Requests come and go between steps.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::active::{Active, Outcome, Text};
use super::awaited::Awaited;
use super::decode::{AHEAD, Going};
use super::embed::{EmbedJob, Embeds};
use super::engine::{Engine, Entry, SequenceId, Wanted};
use super::load::{Load, Tally};
use super::memory::Count;
use super::request::{EndReason, Event, Request};
use super::writer::{Draw, Writer};
use crate::Error;

/// How requests share an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// Requests that may wait; one more is refused.
    pub queue: usize,
    /// How long one step may keep those who write waiting for others' prompts.
    pub stutter: Duration,
    /// How long one step may take while a single prompt is read and nobody writes: whoever comes then waits for its end. None for as
    /// long as it takes, where nobody else will come.
    pub alone: Option<Duration>,
    /// Bytes of host memory for texts that must make room for others.
    pub swap_bytes: usize,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy { queue: 1024, stutter: Duration::from_millis(70), alone: None, swap_bytes: 4 << 30 }
    }
}

/// Where the events of a request go. `false`: nobody listens any more.
pub(crate) type Sink = Box<dyn FnMut(Event) -> bool + Send>;

/// A request on its way through the engine.
pub(crate) struct Job {
    pub(crate) request: Request,
    pub(crate) sink: Sink,
    pub(crate) cancelled: Arc<AtomicBool>,
    pub(crate) came: Instant,
    /// While it waits: what another request reads for both.
    pub(super) awaited: Option<Awaited>,
}

impl Job {
    /// A request that has just come.
    pub(crate) fn new(request: Request, sink: Sink, cancelled: Arc<AtomicBool>) -> Job {
        Job { request, sink, cancelled, came: Instant::now(), awaited: None }
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    pub(super) fn tell(&mut self, event: Event) {
        if !(self.sink)(event) {
            self.cancelled.store(true, Ordering::Relaxed);
        }
    }

    /// Tells that the request failed, and nothing more: it leaves when the next step begins.
    pub(super) fn fail(&mut self, error: Error) {
        self.tell(Event::Failed(error));
        self.cancelled.store(true, Ordering::Relaxed);
        self.sink = Box::new(|_| false);
    }
}

/// All requests of an engine.
pub(crate) struct Schedule {
    engine: Engine,
    policy: Policy,
    waiting: VecDeque<Job>,
    active: Vec<Active>,
    /// Tokens of prompts that the engine reads in a second, as far as it is known.
    pace: f64,
    /// Whether any prompt has told.
    has_learnt: bool,
    taken_up: u64,
    swapped_bytes: usize,
    /// While texts go on by themselves: which, in the engine's order.
    ahead: Option<Vec<(usize, usize)>>,
    /// Texts whose vectors are wanted.
    embeds: Embeds,
    /// Why nothing can be run any more: the device was lost.
    lost: Option<String>,
    tally: Tally,
}

impl Schedule {
    pub(crate) fn new(engine: Engine, policy: Policy) -> Schedule {
        let (waiting, active) = (VecDeque::new(), Vec::new());
        Schedule {
            engine,
            policy,
            waiting,
            active,
            pace: 1000.0,
            has_learnt: false,
            taken_up: 0,
            swapped_bytes: 0,
            ahead: None,
            embeds: Embeds::default(),
            lost: None,
            tally: Tally::default(),
        }
    }

    /// The engine, between two steps.
    pub(crate) fn engine(&mut self) -> &mut Engine {
        self.stop_going_ahead();
        &mut self.engine
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.active.is_empty() && self.embeds.is_empty()
    }

    pub(crate) fn load(&self) -> Load {
        let (free_pages, pages) = self.engine.pages();
        let texts = || self.active.iter().flat_map(|a| &a.texts);
        let swapped = texts().filter(|t| self.engine.is_swapped(t.sequence)).count();
        Load {
            waiting: self.waiting.len() + self.embeds.len(),
            deferred: self.waiting.iter().filter(|job| job.awaited.is_some()).count(),
            reading: self.active.iter().filter(|a| a.reading.is_some()).count(),
            writing: texts().count() - swapped,
            swapped,
            free_pages,
            pages,
            lost: self.lost.is_some(),
            rebuilding: false,
            tally: self.tally,
        }
    }

    /// Why nothing can be run any more, once everybody was told.
    pub(crate) fn lost(&self) -> Option<&str> {
        self.lost.as_deref().filter(|_| self.is_idle())
    }

    /// Takes a request in, or refuses it with a reason.
    pub(crate) fn add(&mut self, mut job: Job) {
        match self.admit(&job.request) {
            Ok(()) => {
                // Behind all of at least the same priority.
                let place = self.waiting.iter().position(|other| other.request.priority < job.request.priority);
                self.waiting.insert(place.unwrap_or(self.waiting.len()), job);
            }
            Err(error) => job.tell(Event::Failed(error)),
        }
    }

    /// Takes in texts whose vectors are wanted, or refuses them.
    pub(crate) fn embed(&mut self, job: EmbedJob) {
        match &self.lost {
            Some(why) => (job.sink)(Err(Error::Lost { why: why.clone() })),
            None if self.embeds.len() >= self.policy.queue => {
                (job.sink)(Err(Error::Busy { waiting: self.embeds.len() }));
            }
            None => self.embeds.add(&self.engine, job),
        }
    }

    /// A batch of texts whose vectors are wanted, if there are some.
    fn embed_some(&mut self) {
        if self.embeds.is_empty() {
            return;
        }
        self.stop_going_ahead();
        if let Some(lost) = self.embeds.step(&mut self.engine, self.active.is_empty()) {
            self.lost.get_or_insert_with(|| lost.to_string());
        }
    }

    fn admit(&self, request: &Request) -> Result<(), Error> {
        let (config, context) = (&self.engine.model().config, self.engine.context());
        let (tokens, vocab) = (request.prompt.len(), config.vocab);
        if let Some(why) = &self.lost {
            return Err(Error::Lost { why: why.clone() });
        }
        if self.engine.model().facts.encodes {
            return Err(Error::NoText);
        }
        if self.engine.model().facts.fills {
            return Err(Error::Fills);
        }
        if tokens == 0 {
            return Err(Error::EmptyPrompt);
        }
        if tokens > context {
            return Err(Error::PromptTooLong { tokens, context, trained: config.context });
        }
        if let Some(&token) = request.prompt.iter().find(|t| **t as usize >= vocab) {
            return Err(Error::TokenOutOfRange { token, vocab });
        }
        let most = self.engine.room().sequences;
        if request.choices == 0 || request.choices > most {
            return Err(Error::NoRoom { what: "texts at once", needed: request.choices, free: most, all: most });
        }
        if self.waiting.len() >= self.policy.queue {
            return Err(Error::Busy { waiting: self.waiting.len() });
        }
        Ok(())
    }

    /// Ends everything with an error.
    pub(crate) fn fail_all(&mut self, error: impl Fn() -> Error) {
        self.ahead = None;
        self.engine.end_decoding(true);
        self.embeds.fail_all(&error);
        for mut job in self.waiting.drain(..) {
            job.tell(Event::Failed(error()));
        }
        for mut active in std::mem::take(&mut self.active) {
            self.end_sequences(&active);
            active.job.tell(Event::Failed(error()));
        }
    }

    fn end_sequences(&mut self, active: &Active) {
        active.reading.into_iter().chain(active.texts.iter().map(|t| t.sequence)).for_each(|id| self.engine.close(id));
    }

    /// One step of all that can run.
    pub(crate) fn step(&mut self) {
        if let Some(why) = self.lost.clone() {
            // Nobody else can be served either: all are told at once.
            self.fail_all(|| Error::Lost { why: why.clone() });
            return;
        }
        self.embed_some();
        if self.ahead.is_some() {
            if !self.is_disturbed() && self.go_ahead() {
                return;
            }
            self.stop_going_ahead();
        }
        self.drop_cancelled();
        self.take_up();
        self.bring_back();
        let batch = self.batch();
        for (at, active) in self.active.iter_mut().enumerate() {
            active.is_stalled = !batch.iter().any(|part| part.active == at);
        }
        if batch.is_empty() {
            return;
        }
        if self.begin_going_ahead(&batch) {
            return;
        }
        let start = Instant::now();
        let entries: Vec<Entry<'_>> = batch
            .iter()
            .map(|part| Entry { sequence: part.sequence, tokens: &part.tokens, wanted: part.wanted })
            .collect();
        let draws = self.draws(&batch);
        let fed = match &draws {
            Some(draws) => {
                let tokens = self.engine.feed_drawing(&entries, draws);
                tokens.map(|tokens| tokens.into_iter().map(Outcome::Token).collect::<Vec<_>>())
            }
            None => self.engine.feed(&entries).map(|logits| logits.into_iter().map(Outcome::Logits).collect()),
        };
        match fed {
            Ok(outcomes) => {
                self.tally.step(batch.iter().map(|part| part.tokens.len()).sum());
                self.learn(&batch, start.elapsed());
                self.after(&batch, &outcomes);
            }
            Err(error) => self.fail(&batch, &error),
        }
    }

    /// How the device draws the tokens of a step, if it can draw all of them: no logits come back then.
    fn draws(&mut self, batch: &[Part]) -> Option<Vec<Option<Draw>>> {
        if !self.engine.draws_beside_prompts() {
            return None;
        }
        let (model, context) = (Arc::clone(self.engine.model()), self.engine.context());
        let mut draws = Vec::with_capacity(batch.len());
        for part in batch {
            let active = &mut self.active[part.active];
            let writer = match part.choice {
                _ if part.wanted == Wanted::Nothing => {
                    draws.push(None);
                    continue;
                }
                Some(choice) => &active.texts[choice].writer,
                // Several texts begin with different draws from the same logits.
                None if active.job.request.choices > 1 => return None,
                None => {
                    // What is wrong with a request is told where its text begins.
                    let writer = Writer::new(&model, &active.job.request, 0, context).ok()?;
                    active.begun.insert(writer)
                }
            };
            draws.push(Some(writer.on_device()?.clone()));
        }
        Some(draws)
    }

    /// Lets texts go on by themselves if a batch holds nothing else, and all of them can be drawn on the device.
    fn begin_going_ahead(&mut self, batch: &[Part]) -> bool {
        if self.is_disturbed() {
            return false;
        }
        let mut going = Vec::with_capacity(batch.len());
        let mut texts = Vec::with_capacity(batch.len());
        for part in batch {
            let Some(choice) = part.choice else { return false };
            let text = &self.active[part.active].texts[choice];
            let Some(draw) = text.writer.on_device() else { return false };
            let (row, bias) = (draw.row, draw.bias.clone());
            going.push(Going { sequence: part.sequence, token: text.next, row, bias });
            texts.push((part.active, choice));
        }
        // Where pages are short, steps that the host makes let texts make room for each other.
        let needed = batch.iter().map(|part| self.engine.pages_ahead(part.sequence, AHEAD + 1)).sum();
        if self.engine.room_for(needed).is_err() {
            return false;
        }
        match self.engine.begin_decoding(going) {
            Ok(()) => self.ahead = Some(texts),
            Err(error) => self.fail(batch, &error),
        }
        true
    }

    /// Whether somebody who is not among the texts that go on by themselves should be looked after.
    fn is_disturbed(&self) -> bool {
        let cancelled = self.active.iter().any(|a| a.job.is_cancelled()) || self.waiting.iter().any(Job::is_cancelled);
        let texts: usize = self.active.iter().map(|a| a.job.request.choices).sum();
        let could_begin = !self.waiting.is_empty() && texts < self.engine.room().sequences;
        let swapped = self.load().swapped > 0;
        cancelled || could_begin || swapped
    }

    /// One step of texts that go on by themselves. `false`: they cannot any more, as one of them ended, or pages ran out.
    fn go_ahead(&mut self) -> bool {
        let mut has_pages = true;
        while has_pages && self.engine.decoding_ahead() < AHEAD {
            match self.engine.submit_decoding() {
                Ok(submitted) => has_pages = submitted,
                Err(error) => return self.fail_ahead(&error),
            }
        }
        self.collect_ahead() && has_pages
    }

    fn note_preparing(&mut self) {
        let now = self.engine.preparing;
        self.active.iter_mut().for_each(|active| active.preparing[2] = now);
    }

    /// Tells everybody the tokens of the oldest step. `false`: somebody's text has ended.
    fn collect_ahead(&mut self) -> bool {
        let texts = self.ahead.clone().unwrap_or_default();
        self.note_preparing();
        let tokens = match self.engine.collect_decoding() {
            Ok(tokens) => tokens,
            Err(error) => return self.fail_ahead(&error),
        };
        self.tally.step(texts.len());
        for ((active, choice), token) in texts.iter().zip(tokens) {
            let active = &mut self.active[*active];
            // A text that ended is known to have ended a step late.
            if active.texts[*choice].writer.is_writing() {
                active.drawn(*choice, token);
            }
        }
        texts.iter().all(|(active, choice)| self.active[*active].texts[*choice].writer.is_writing())
    }

    /// Waits for the steps on their way, and goes back to steps that the host makes.
    fn stop_going_ahead(&mut self) {
        while self.ahead.is_some() && self.engine.decoding_ahead() > 0 {
            self.collect_ahead();
        }
        if self.ahead.take().is_some() {
            self.engine.end_decoding(true);
            self.end_texts();
        }
    }

    fn fail_ahead(&mut self, error: &Error) -> bool {
        self.engine.end_decoding(false);
        let texts = self.ahead.take().unwrap_or_default();
        self.fail_requests(texts.iter().map(|(active, _)| *active).collect(), error);
        false
    }

    /// Only the requests of a batch that failed are told; all others go on.
    fn fail(&mut self, batch: &[Part], error: &Error) {
        self.fail_requests(batch.iter().map(|part| part.active).collect(), error);
    }

    /// Remembers that the device was lost, if that is what happened.
    fn note(&mut self, error: &Error) {
        if error.is_lost() {
            self.lost.get_or_insert_with(|| error.to_string());
        }
    }

    fn fail_requests(&mut self, mut failed: Vec<usize>, error: &Error) {
        self.note(error);
        failed.sort_unstable();
        failed.dedup();
        for at in failed.into_iter().rev() {
            let mut active = self.active.remove(at);
            self.end_sequences(&active);
            active.job.tell(Event::Failed(error.again()));
        }
    }

    /// How fast prompts are read, learnt from batches that hold enough of them.
    fn learn(&mut self, batch: &[Part], took: Duration) {
        let tokens: usize = batch.iter().map(|part| part.tokens.len()).sum();
        if tokens >= 32 && took > Duration::ZERO {
            let pace = tokens as f64 / took.as_secs_f64();
            self.pace = 0.5 * self.pace + 0.5 * pace;
            self.has_learnt = true;
        }
    }

    fn drop_cancelled(&mut self) {
        for at in (0..self.waiting.len()).rev() {
            if self.waiting[at].is_cancelled()
                && let Some(mut job) = self.waiting.remove(at)
            {
                let choices = 0..job.request.choices;
                for choice in choices {
                    let (reason, usage) = (EndReason::Cancelled, Default::default());
                    job.tell(Event::End { choice, text: String::new(), reason, usage });
                }
            }
        }
        for at in (0..self.active.len()).rev() {
            if self.active[at].job.is_cancelled() {
                let mut active = self.active.remove(at);
                self.end_sequences(&active);
                active.end_all(&EndReason::Cancelled);
            }
        }
    }

    /// Begins with requests that wait, while there is room: owners with fewer running texts first, then in order. Those whose prompt
    /// begins as one that is being read let others go ahead until that beginning is there.
    fn take_up(&mut self) {
        let (engine, active) = (&self.engine, &self.active);
        for job in &mut self.waiting {
            job.awaited = job.awaited.filter(|awaited| awaited.is_coming(engine, active));
        }
        loop {
            let texts = |owner: Option<u64>| -> usize {
                let of = |a: &&Active| owner.is_none_or(|owner| a.job.request.owner == owner);
                self.active.iter().filter(of).map(|a| a.job.request.choices).sum()
            };
            let free_to_begin = || self.waiting.iter().enumerate().filter(|(_, job)| job.awaited.is_none());
            let Some(highest) = free_to_begin().next().map(|(_, job)| job.request.priority) else { return };
            let rivals = free_to_begin().take_while(|(_, job)| job.request.priority == highest);
            let next = rivals.min_by_key(|(at, job)| (texts(Some(job.request.owner)), *at)).map(|(at, _)| at);
            let Some(at) = next else { return };
            let request = &self.waiting[at].request;
            let free = self.engine.room().sequences.saturating_sub(texts(None));
            // A prompt that begins now must not push out texts that are being written.
            let pages = self.engine.pages_of_text(request.prompt.len(), request.choices);
            let fits = request.choices <= free && (self.active.is_empty() || self.engine.room_for(pages).is_ok());
            if !fits {
                return;
            }
            let awaited = Awaited::find(&self.engine, &self.active, request);
            if awaited.is_some() {
                self.waiting[at].awaited = awaited;
                continue;
            }
            let Some(job) = self.waiting.remove(at) else { return };
            self.begin(job);
        }
    }

    fn begin(&mut self, mut job: Job) {
        let (began, preparing) = (Instant::now(), self.engine.preparing);
        match self.begin_sequence(&job.request) {
            Ok((id, cached)) => {
                let prompt_tokens = job.request.prompt.len();
                if let Some(start) = self.engine.start() {
                    // The prompt was read as a whole; what is written begins with a token of its own.
                    job.request.prompt = vec![start];
                }
                job.tell(Event::Started { cached_tokens: cached });
                self.taken_up += 1;
                self.active.push(Active {
                    job,
                    prompt_tokens,
                    began,
                    cached,
                    read: cached,
                    reading: Some(id),
                    is_stalled: false,
                    texts: Vec::new(),
                    begun: None,
                    first_token: None,
                    preparing: [preparing; 3],
                    number: self.taken_up,
                });
            }
            Err(error) => {
                self.note(&error);
                job.tell(Event::Failed(error));
            }
        }
    }

    /// The sequence of a request, and how many tokens of the prompt it holds already.
    fn begin_sequence(&mut self, request: &Request) -> Result<(SequenceId, usize), Error> {
        let prompt = &request.prompt;
        if self.engine.start().is_some() {
            if request.from.is_some() {
                return Err(Error::NoSequence {
                    why: "the prompt is one text, and what it would go on from is another",
                });
            }
            let id = self.engine.open_adapted(request.owner, request.scales.as_deref())?;
            let read = self.engine.read_source(id, prompt);
            return read.map(|()| (id, 0)).inspect_err(|_| self.engine.close(id));
        }
        if let Some(from) = request.from {
            let held = self.engine.tokens(from);
            if held.len() >= prompt.len() || !prompt.starts_with(held) {
                return Err(Error::NoSequence { why: "it does not hold the beginning of the prompt" });
            }
            let held = held.len();
            return Ok((self.engine.fork(from)?, held));
        }
        let id = self.engine.open_adapted(request.owner, request.scales.as_deref())?;
        let cached = if request.reuse { self.engine.reuse(id, prompt) } else { Ok(0) };
        cached.map(|cached| (id, cached)).inspect_err(|_| self.engine.close(id))
    }

    /// Texts that had to make room come back as soon as there is some, the oldest first.
    fn bring_back(&mut self) {
        let mut swapped: Vec<(u64, SequenceId, usize)> = Vec::new();
        for (at, active) in self.active.iter().enumerate() {
            let out = active.texts.iter().map(|t| t.sequence).chain(active.reading);
            swapped.extend(out.filter(|id| self.engine.is_swapped(*id)).map(|id| (active.number, id, at)));
        }
        swapped.sort_unstable();
        for (_, id, at) in swapped {
            let running = self.running();
            // One page more for each text that runs, so that it need not leave again at once.
            let needed = self.engine.pages_needed(id, 1) + Count::each(running);
            if running > 0 && self.engine.room_for(needed).is_err() {
                return;
            }
            let bytes = self.engine.swapped_bytes(id);
            let came = self.engine.swap_in(id);
            if !self.engine.is_swapped(id) {
                self.swapped_bytes -= bytes.min(self.swapped_bytes);
            }
            match came {
                Ok(()) => {}
                Err(Error::NoRoom { .. }) => return,
                Err(error) => return self.fail_requests(vec![at], &error),
            }
        }
    }

    fn running(&self) -> usize {
        let ids = self.active.iter().flat_map(|a| a.texts.iter().map(|t| t.sequence).chain(a.reading));
        ids.filter(|id| !self.engine.is_swapped(*id)).count()
    }

    /// What goes into the engine next.
    fn batch(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        for (at, active) in self.active.iter().enumerate() {
            for (choice, text) in active.texts.iter().enumerate() {
                if text.writer.is_writing() && !self.engine.is_swapped(text.sequence) {
                    let (sequence, tokens) = (text.sequence, vec![text.next]);
                    parts.push(Part { active: at, choice: Some(choice), sequence, tokens, wanted: Wanted::Last });
                }
            }
        }
        let writing = parts.len();
        let mut reading: Vec<(usize, usize)> = self
            .active
            .iter()
            .enumerate()
            .filter(|(_, a)| a.reading.is_some_and(|id| !self.engine.is_swapped(id)))
            .map(|(at, a)| (a.job.request.prompt.len() - a.read, at))
            .collect();
        let mut budget = self.budget(writing, reading.len());
        // The request that has waited longest has half of the piece, short prompts have the rest.
        if let Some(oldest) = reading.iter().position(|(_, at)| Some(*at) == reading.iter().map(|(_, at)| *at).min()) {
            let oldest = reading.remove(oldest);
            reading.sort_unstable();
            let half = if reading.is_empty() { budget } else { budget.div_ceil(2) };
            self.piece(&mut parts, oldest, half.max(1), &mut budget);
        }
        for prompt in reading {
            self.piece(&mut parts, prompt, usize::MAX, &mut budget);
        }
        self.make_room(parts)
    }

    /// Adds a piece of a prompt, at most `share` tokens.
    fn piece(&self, parts: &mut Vec<Part>, (left, at): (usize, usize), share: usize, budget: &mut usize) {
        let active = &self.active[at];
        let Some(sequence) = active.reading else { return };
        let tokens = left.min(share).min(*budget);
        if tokens == 0 {
            return;
        }
        *budget -= tokens;
        let wanted = if tokens == left { Wanted::Last } else { Wanted::Nothing };
        let tokens = active.job.request.prompt[active.read..active.read + tokens].to_vec();
        parts.push(Part { active: at, choice: None, sequence, tokens, wanted });
    }

    /// Tokens of prompts for the next step. If nobody else would wait, as many as the engine likes at once.
    fn budget(&self, writing: usize, reading: usize) -> usize {
        let most = self.engine.batch().saturating_sub(writing).max(1);
        let time = match self.policy.alone {
            // Before anything was read, nobody knows how much is too much.
            alone if writing == 0 && reading <= 1 && self.waiting.is_empty() => alone.filter(|_| self.has_learnt),
            _ => Some(self.policy.stutter),
        };
        let Some(time) = time else { return most };
        let tokens = self.pace * time.as_secs_f64();
        (tokens as usize).next_multiple_of(16).clamp(32, most.max(32))
    }

    /// Takes parts out until the pages suffice for the rest: prompts first, then what was read of them, then the youngest texts make
    /// room.
    fn make_room(&mut self, mut parts: Vec<Part>) -> Vec<Part> {
        loop {
            let needed = parts.iter().map(|p| self.engine.pages_wanted(p.sequence, p.tokens.len())).sum();
            if self.engine.room_for(needed).is_ok() {
                return parts;
            }
            if let Some(at) = parts.iter().rposition(|p| p.choice.is_none())
                && parts.len() > 1
            {
                parts.remove(at);
                continue;
            }
            // Prompts that were taken out keep the pages of what is read of them.
            if let Some(reader) = self.youngest_reader_beside(&parts)
                && self.swap_out(reader)
            {
                continue;
            }
            let youngest = (0..parts.len()).max_by_key(|i| (self.active[parts[*i].active].number, parts[*i].choice));
            let Some(youngest) = youngest else { return parts };
            let part = parts.remove(youngest);
            if parts.is_empty() || !self.swap_out(part.sequence) {
                // Nobody is left who could make room: the text ends as one whose context is full.
                self.end_for_want_of_room(&part);
                parts.retain_mut(|p| p.active != part.active);
            }
        }
    }

    /// The youngest of the prompts that hold pages and are not among these parts.
    fn youngest_reader_beside(&self, parts: &[Part]) -> Option<SequenceId> {
        let readers = self.active.iter().filter_map(|a| a.reading.map(|id| (a.number, id)));
        let holds = |id: SequenceId| !self.engine.is_swapped(id) && self.engine.bytes_of(id) > 0;
        let beside = readers.filter(|(_, id)| holds(*id) && parts.iter().all(|part| part.sequence != *id));
        beside.max_by_key(|(number, _)| *number).map(|(_, id)| id)
    }

    fn swap_out(&mut self, id: SequenceId) -> bool {
        let bytes = self.engine.bytes_of(id);
        if self.swapped_bytes + bytes > self.policy.swap_bytes {
            return false;
        }
        if let Err(error) = self.engine.swap_out(id) {
            self.note(&error);
            return false;
        }
        self.swapped_bytes += bytes;
        self.tally.swaps += 1;
        true
    }

    fn end_for_want_of_room(&mut self, part: &Part) {
        let wanted = self.engine.pages_wanted(part.sequence, part.tokens.len());
        let error = match (&self.lost, self.engine.room_for(wanted)) {
            (Some(why), _) => Error::Lost { why: why.clone() },
            (None, Err(error)) => error,
            (None, Ok(())) => Error::NoSequence {
                why: "it had to make room for others, and the host memory for such texts is used up",
            },
        };
        // Indices of other parts stay valid: the request leaves when the next step begins.
        self.active[part.active].job.fail(error);
    }

    /// Tells everybody what came of a step.
    fn after(&mut self, batch: &[Part], outcomes: &[Outcome]) {
        self.note_preparing();
        for (part, outcome) in batch.iter().zip(outcomes) {
            match part.choice {
                Some(choice) => self.active[part.active].go_on(choice, outcome),
                None => self.read(part, outcome),
            }
        }
        self.end_texts();
    }

    /// Closes the sequences of texts that ended, and lets requests go whose texts have all ended.
    fn end_texts(&mut self) {
        for at in (0..self.active.len()).rev() {
            let active = &mut self.active[at];
            let over = active.texts.iter().filter(|t| !t.writer.is_writing()).map(|t| t.sequence);
            over.collect::<Vec<_>>().into_iter().for_each(|id| self.engine.close(id));
            if active.reading.is_none() && active.texts.iter().all(|t| !t.writer.is_writing()) {
                self.active.remove(at);
            }
        }
    }

    /// A piece of a prompt was read; with the last one the texts begin.
    fn read(&mut self, part: &Part, outcome: &Outcome) {
        let active = &mut self.active[part.active];
        active.read += part.tokens.len();
        let prompt = active.job.request.prompt.len();
        if active.read < prompt {
            active.job.tell(Event::Read { tokens: active.read });
            return;
        }
        active.job.tell(Event::Read { tokens: active.prompt_tokens });
        active.reading = None;
        active.first_token = Some(Instant::now());
        active.preparing[1] = self.engine.preparing;
        let mut sequences = vec![part.sequence];
        for _ in 1..active.job.request.choices {
            match self.engine.fork(part.sequence) {
                Ok(id) => sequences.push(id),
                Err(error) => {
                    sequences.into_iter().for_each(|id| self.engine.close(id));
                    active.job.fail(error);
                    return;
                }
            }
        }
        let context = self.engine.context();
        for (choice, sequence) in sequences.into_iter().enumerate() {
            let writer = match active.begun.take() {
                Some(writer) => Ok(writer),
                None => Writer::new(self.engine.model(), &active.job.request, choice, context),
            };
            match writer {
                Ok(writer) => {
                    active.texts.push(Text { sequence, writer, next: 0 });
                    active.go_on(choice, outcome);
                }
                Err(error) => {
                    self.engine.close(sequence);
                    active.job.fail(error);
                    return;
                }
            }
        }
    }
}

/// What one sequence has in a step.
struct Part {
    active: usize,
    /// Which text goes on; none while the prompt is read.
    choice: Option<usize>,
    sequence: SequenceId,
    tokens: Vec<u32>,
    wanted: Wanted,
}
