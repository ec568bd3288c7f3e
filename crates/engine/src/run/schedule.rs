//! Runs the steps of an engine. Each step takes every decoding sequence and chunks of prompts (`next_batch.rs`), sized so that inter-token
//! latency stays within its budget. Requests come and go between steps.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::acceptance::StepTimes;
use super::active::{Active, Outcome, Text};
use super::awaited::Awaited;
use super::cache::{PageCount, Rank};
use super::decode::{AHEAD, Going};
use super::drafting::Drafts;
use super::embed::{EmbedJob, Embeds};
use super::engine::{Engine, Entry, SequenceId, Wanted};
use super::job::Job;
use super::load::{Load, Tally};
use super::part::Part;
use super::policy::Policy;
use super::rate::PrefillRate;
use super::request::{EndReason, Event, Request};
use super::writer::{Draw, Writer};
use crate::Error;

/// All requests of an engine.
pub(crate) struct Schedule {
    pub(super) engine: Engine,
    pub(super) policy: Policy,
    pub(super) waiting: VecDeque<Job>,
    pub(super) active: Vec<Active>,
    pub(super) rate: PrefillRate,
    /// How long steps without prompts take.
    pub(super) times: StepTimes,
    taken_up: u64,
    /// While texts go on by themselves: which, in the engine's order.
    pub(super) ahead: Option<Vec<(usize, usize)>>,
    /// Texts whose vectors are wanted.
    embeds: Embeds,
    /// Why nothing can be run any more: the device was lost.
    pub(super) lost: Option<String>,
    pub(super) tally: Tally,
}

impl Schedule {
    pub(crate) fn new(mut engine: Engine, policy: Policy) -> Schedule {
        // Where the CPU plays the GPU, it would compile in the place of computing.
        if policy.compiles_ahead && !engine.runs_on_cpu() {
            engine.compile_ahead();
        }
        let (waiting, active) = (VecDeque::new(), Vec::new());
        Schedule {
            engine,
            policy,
            waiting,
            active,
            rate: PrefillRate::default(),
            times: StepTimes::default(),
            taken_up: 0,
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
        let texts = || self.active.iter().flat_map(|a| &a.texts).filter(|t| t.writer.is_writing());
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
            tally: Tally {
                embed_steps: self.embeds.steps(),
                rows: self.engine.work.rows,
                plans: self.engine.work.plans,
                hits: self.engine.hits,
                ..self.tally
            },
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
        // Run-ahead decode gives no pages back: what has no room beside it has none before it ends.
        if self.embeds.is_empty() || (self.ahead.is_some() && self.embeds.is_short_of_room()) {
            return;
        }
        self.stop_going_ahead();
        // As a prompt would be: a step must not keep others waiting for longer.
        let budget = self.budget(self.running(), 0);
        if let Some(lost) = self.embeds.step(&mut self.engine, budget, self.active.is_empty()) {
            self.lost.get_or_insert_with(|| lost.to_string());
        }
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

    /// Ends everything with an error after a panic. The engine is not asked for anything: nobody knows what state it is in.
    pub(crate) fn give_up(mut self, why: &str) {
        let lost = || Error::Lost { why: why.to_owned() };
        self.embeds.fail_all(lost);
        let active = std::mem::take(&mut self.active).into_iter().map(|active| active.job);
        for mut job in self.waiting.drain(..).chain(active) {
            job.tell(Event::Failed(lost()));
        }
    }

    fn end_sequences(&mut self, active: &Active) {
        active.sequences().into_iter().for_each(|id| self.engine.close(id));
    }

    /// Keeps what was computed of a sequence that ends for later requests: a client that was cut off may come again, and the next turn
    /// of a chat continues from here.
    fn keep(&mut self, id: SequenceId) {
        self.checkpoint(id, Rank::Kept);
        if let Err(error) = self.engine.keep_on_disk(id) {
            self.note(&error);
        }
    }

    /// Saves the state of a sequence for later requests. One that cannot be saved is computed again then.
    fn checkpoint(&mut self, id: SequenceId, rank: Rank) {
        if let Err(error) = self.engine.checkpoint_as(id, rank) {
            log::debug!("a state was not saved: {error}");
            self.note(&error);
        }
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
            if !self.is_disturbed() && !self.has_drafts_ahead() && self.go_ahead() {
                return;
            }
            self.stop_going_ahead();
        }
        self.drop_cancelled();
        self.take_up();
        self.bring_back();
        let mut batch = self.batch();
        // A step for which drafts are wanted is made by the host, even if none come of it: otherwise no step would ever be made.
        let wants_drafts = self.add_drafts(&mut batch);
        for (at, active) in self.active.iter_mut().enumerate() {
            active.is_stalled = !batch.iter().any(|part| part.active == at);
        }
        if batch.is_empty() {
            return;
        }
        if !wants_drafts && self.begin_going_ahead(&batch) {
            return;
        }
        let (start, before) = (Instant::now(), self.engine.work);
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
                let tokens = batch.iter().map(|part| part.tokens.len()).sum();
                self.tally.step(tokens);
                self.tally.row_tokens += tokens as u64;
                let (work, took) = (self.engine.work - before, start.elapsed());
                self.rate.learn(work, took);
                log::debug!(
                    "a step of {tokens} tokens of {} sequences, {} of them decoding, in {} rows: {:.1} ms, {:.1} of these for its plan",
                    batch.len(),
                    batch.iter().filter(|part| part.choice.is_some()).count(),
                    work.rows,
                    1e3 * took.as_secs_f64(),
                    1e3 * work.preparing.as_secs_f64(),
                );
                if batch.iter().all(|part| part.choice.is_some()) {
                    self.times.learn(tokens, took.saturating_sub(work.preparing).as_secs_f64());
                }
                self.after(&batch, &outcomes);
            }
            Err(error) => self.fail(&batch, &error),
        }
    }

    /// Tells whoever watches what has become of cached pages. Steps that are on their way stay there.
    pub(super) fn tell_cache_events(&mut self) {
        self.engine.tell_cache_events();
    }

    /// How the device draws the tokens of a step, if it can draw all of them: no logits come back then.
    fn draws(&mut self, batch: &[Part]) -> Option<Vec<Option<Draw>>> {
        if !self.engine.draws_beside_prompts() || batch.iter().any(Part::has_draft) {
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
        if self.is_disturbed() || !batch.iter().all(Part::is_one_token) {
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

    /// Whether a request that is not among those of the run-ahead decode needs a step of its own: because it was cancelled, can begin, or
    /// has made room for others. One that waits for room does not.
    fn is_disturbed(&self) -> bool {
        let cancelled = self.active.iter().any(|a| a.job.is_cancelled()) || self.waiting.iter().any(Job::is_cancelled);
        let awaits = |job: &Job| job.awaited.is_some_and(|awaited| awaited.is_coming(&self.engine, &self.active));
        let could_begin = || self.next_to_begin(awaits).is_some_and(|at| self.has_room_for(&self.waiting[at].request));
        let could_return = || self.next_to_return().is_some();
        let could_embed = || !self.embeds.is_empty() && !self.embeds.is_short_of_room();
        cancelled || could_begin() || could_return() || could_embed()
    }

    /// Sequences of the requests that run, of all owners or of one.
    fn running_choices(&self, owner: Option<u64>) -> usize {
        let of = |a: &&Active| owner.is_none_or(|owner| a.job.request.owner == owner);
        self.active.iter().filter(of).map(|a| a.job.request.choices).sum()
    }

    /// Which waiting request begins next: of the highest priority, owners with fewer running sequences first, then in order. Those that
    /// wait for another request's prefix are passed over.
    fn next_to_begin(&self, awaits: impl Fn(&Job) -> bool) -> Option<usize> {
        let free_to_begin = || self.waiting.iter().enumerate().filter(|(_, job)| !awaits(job));
        let (_, first) = free_to_begin().next()?;
        let rivals = free_to_begin().take_while(|(_, job)| job.request.priority == first.request.priority);
        rivals.min_by_key(|(at, job)| (self.running_choices(Some(job.request.owner)), *at)).map(|(at, _)| at)
    }

    /// Whether a waiting request can begin: there are sequences for its choices, and its prompt does not push out those that run.
    fn has_room_for(&self, request: &Request) -> bool {
        let free = self.engine.room().sequences.saturating_sub(self.running_choices(None));
        let pages = self.engine.pages_of_prompt(request.prompt.len(), request.choices);
        request.choices <= free && (self.active.is_empty() || self.engine.room_for(pages).is_ok())
    }

    /// One step of texts that go on by themselves. `false`: they cannot any more, as one of them ended, or pages ran out.
    fn go_ahead(&mut self) -> bool {
        let (mut has_pages, start, before) = (true, Instant::now(), self.engine.work.preparing);
        // Only a call that submits one step and collects one takes as long as a step.
        let is_steady = self.engine.decoding_ahead() + 1 == AHEAD;
        while has_pages && self.engine.decoding_ahead() < AHEAD {
            match self.engine.submit_decoding() {
                Ok(submitted) => has_pages = submitted,
                Err(error) => return self.fail_ahead(&error),
            }
        }
        let goes_on = self.collect_ahead();
        if is_steady && has_pages {
            let ran = start.elapsed().saturating_sub(self.engine.work.preparing.saturating_sub(before));
            self.times.learn(self.ahead.as_ref().map_or(0, Vec::len).max(1), ran.as_secs_f64());
        }
        goes_on && has_pages
    }

    fn note_preparing(&mut self) {
        let now = self.engine.work.preparing;
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
    pub(super) fn note(&mut self, error: &Error) {
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
                if active.job.request.reuse {
                    active.sequences().into_iter().for_each(|id| self.keep(id));
                }
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
        if self.embeds.is_short_of_room() {
            // Pages that come free are for the texts that wait for them.
            return;
        }
        while let Some(at) = self.next_to_begin(|job| job.awaited.is_some()) {
            if !self.has_room_for(&self.waiting[at].request) {
                return;
            }
            let awaited = Awaited::find(&self.engine, &self.active, &self.waiting[at].request);
            if let Some(awaited) = awaited {
                self.waiting[at].awaited = Some(awaited);
                if self.engine.cache.has_states()
                    && let Some(reader) = self.active.iter_mut().find(|active| active.number == awaited.reader)
                {
                    reader.stop_at(awaited.tokens);
                }
                continue;
            }
            let Some(job) = self.waiting.remove(at) else { return };
            self.begin(job);
        }
    }

    fn begin(&mut self, mut job: Job) {
        let (began, preparing) = (Instant::now(), self.engine.work.preparing);
        match self.begin_sequence(&job.request) {
            Ok((id, cached)) => {
                let prompt_tokens = job.request.prompt.len();
                if let Some(start) = self.engine.start() {
                    // The prompt was read as a whole; what is written begins with a token of its own.
                    job.request.prompt = vec![start];
                }
                job.tell(Event::Started { cached_tokens: cached });
                self.taken_up += 1;
                let stops =
                    if job.request.reuse { self.engine.checkpoint_stops(id, prompt_tokens) } else { Vec::new() };
                self.active.push(Active {
                    job,
                    prompt_tokens,
                    began,
                    cached,
                    read: cached,
                    reading: Some(id),
                    stops,
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
            let id = self.engine.fork(from)?;
            return self.engine.attach_or_close(id, &request.spans).map(|()| (id, held));
        }
        let id = self.engine.open_adapted(request.owner, request.scales.as_deref())?;
        self.engine.attach_or_close(id, &request.spans)?;
        let cached = if request.reuse { self.engine.reuse(id, prompt) } else { Ok(0) };
        cached.map(|cached| (id, cached)).inspect_err(|_| self.engine.close(id))
    }

    /// Sequences that had to make room come back as soon as there is some, the oldest first.
    fn bring_back(&mut self) {
        while let Some((id, at)) = self.next_to_return() {
            match self.engine.swap_in(id) {
                Ok(()) => {}
                Err(Error::NoRoom { .. }) => return,
                Err(error) => return self.fail_requests(vec![at], &error),
            }
        }
    }

    /// The oldest sequence that is swapped out, with its request, if there is room for it: also for a page more of each sequence that runs,
    /// so that it need not leave again at once.
    fn next_to_return(&self) -> Option<(SequenceId, usize)> {
        let swapped = self.active.iter().enumerate().flat_map(|(at, active)| {
            let sequences = active.texts.iter().map(|t| t.sequence).chain(active.reading);
            sequences.filter(|id| self.engine.is_swapped(*id)).map(move |id| (active.number, id, at))
        });
        let (_, id, at) = swapped.min()?;
        let running = self.running();
        let needed = self.engine.pages_needed(id, 1) + PageCount::each(running);
        (running == 0 || self.engine.room_for(needed).is_ok()).then_some((id, at))
    }

    fn running(&self) -> usize {
        let ids = self.active.iter().flat_map(|a| a.texts.iter().map(|t| t.sequence).chain(a.reading));
        ids.filter(|id| !self.engine.is_swapped(*id)).count()
    }

    /// Tells everybody what came of a step.
    fn after(&mut self, batch: &[Part], outcomes: &[Outcome]) {
        self.note_preparing();
        for (part, outcome) in batch.iter().zip(outcomes) {
            match part.choice {
                Some(choice) if part.has_draft() => self.verify(part, choice, outcome),
                Some(choice) => self.active[part.active].go_on(choice, outcome),
                None => {
                    self.read(part, outcome);
                    // After the first token was told: reading a state back takes a while.
                    let active = &self.active[part.active];
                    if let Some(rank) = active.stop_here().filter(|_| active.job.request.reuse) {
                        self.checkpoint(part.sequence, rank);
                    }
                }
            }
        }
        self.end_texts();
    }

    /// Closes the sequences of texts that ended, and lets requests go whose texts have all ended.
    fn end_texts(&mut self) {
        for at in (0..self.active.len()).rev() {
            let active = &self.active[at];
            let over = active.texts.iter().filter(|text| !text.writer.is_writing()).map(|text| text.sequence);
            let (over, reuse): (Vec<SequenceId>, bool) = (over.collect(), active.job.request.reuse);
            for id in over {
                if reuse {
                    self.keep(id);
                }
                self.engine.close(id);
            }
            let active = &self.active[at];
            if active.reading.is_none() && active.texts.iter().all(|text| !text.writer.is_writing()) {
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
        active.preparing[1] = self.engine.work.preparing;
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
                    active.texts.push(Text {
                        sequence,
                        writer,
                        next: 0,
                        pending: Vec::new(),
                        drafts: Drafts::default(),
                    });
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
