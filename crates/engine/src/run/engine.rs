//! A loaded model with any number of sequences: tokens of several of them go through it at once, and each remembers its own.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::batch::{Inputs, Taken};
use super::decode::{Decoding, Tail, add_tail};
use super::draw::{End, Tokens, add_tokens};
use super::pages::{Chain, Page, Pages};
use super::shapes;
use crate::Error;
use crate::arch::{BatchShape, Graph, PAGE, Room, graph};
use crate::executor::{Executor, PlanId, Progress, Range};
use crate::lower::lower;
use crate::model::Model;
use crate::plan::{Plan, Ports, SlotKind};
use crate::state;

/// Plans that are kept ready. The least recently used one goes when there are more.
const MOST_PLANS: usize = 32;

/// A sequence of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(u64);

/// Which tokens of an entry give logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// None: the prompt goes on.
    Nothing,
    /// The last one: what generating needs.
    Last,
    /// All of them: what measuring needs.
    All,
}

/// What one sequence has in a batch.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'t> {
    /// The sequence; each only once in a batch.
    pub sequence: SequenceId,
    /// Its next tokens.
    pub tokens: &'t [u32],
    /// Which logits are wanted.
    pub wanted: Wanted,
}

/// What the engine knows of one sequence.
#[derive(Debug, Default)]
struct Sequence {
    /// Every token that was fed.
    tokens: Vec<u32>,
    /// The pages that hold their keys and values.
    pages: Vec<Page>,
    /// What the full ones hold.
    chains: Vec<Chain>,
    /// Its state, in models with recurrent layers.
    state: Option<u32>,
    /// Keeps the pages of one owner from others.
    owner: u64,
    /// A run with it failed: what it remembers cannot be trusted.
    broken: bool,
    /// What it remembers, while it lies in host memory.
    swapped: Option<Vec<u8>>,
}

/// A loaded model with its sequences.
pub struct Engine {
    model: Arc<Model>,
    graph: Graph,
    pub(super) executor: Box<dyn Executor>,
    room: Room,
    pub(super) has_caches: bool,
    pub(super) has_states: bool,
    /// Whether every token goes the way of one alone (`alike.rs`).
    pub(super) alike: bool,
    pages: Pages,
    free_states: Vec<u32>,
    sequences: HashMap<SequenceId, Sequence>,
    next: u64,
    plans: HashMap<Key, Ready>,
    clock: u64,
    /// Texts that go on by themselves.
    pub(super) decoding: Option<Decoding>,
    /// Time that went into making plans ready: mostly kernels that were compiled.
    pub(super) preparing: Duration,
}

/// What a plan is made for: a shape, and what it ends with.
type Key = (BatchShape, End);

/// A batch that is ready to run.
pub(super) struct Entered {
    pub(super) plan: PlanId,
    pub(super) ports: Ports,
    pub(super) tail: Option<Tail>,
    pub(super) tokens: Option<Tokens>,
    first_row: Vec<usize>,
}

/// A plan that is ready to run.
#[derive(Clone, Copy)]
pub(super) struct Ready {
    pub(super) plan: PlanId,
    pub(super) ports: Ports,
    tail: Option<Tail>,
    tokens: Option<Tokens>,
    last_used: u64,
}

impl Engine {
    /// Loads a model onto an executor with this much room.
    pub fn new(
        model: Arc<Model>,
        mut executor: Box<dyn Executor>,
        room: Room,
        progress: Progress<'_>,
    ) -> Result<Engine, Error> {
        let graph = graph(&model.config, &model.gguf, &room)?;
        executor.load(graph.fixed(), &model.gguf, progress)?;
        executor.reserve(super::fit::arena(&graph, &*executor, &room)?)?;
        let has = |kind: SlotKind| graph.fixed().slots.iter().any(|slot| slot.kind == kind);
        let (has_caches, has_states) = (has(SlotKind::Cache), has(SlotKind::State));
        let alike = executor.target().alike;
        let states = u32::try_from(room.states).expect("states are numbered with 32 bits");
        Ok(Engine {
            model,
            graph,
            executor,
            room,
            has_caches,
            has_states,
            alike,
            pages: Pages::new(if has_caches { room.pages } else { 0 }),
            free_states: (0..states).rev().collect(),
            sequences: HashMap::new(),
            next: 0,
            plans: HashMap::new(),
            clock: 0,
            decoding: None,
            preparing: Duration::ZERO,
        })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Where it runs.
    pub fn describe(&self) -> String {
        self.executor.describe()
    }

    /// What it has to remember with.
    pub fn room(&self) -> &Room {
        &self.room
    }

    /// Most tokens of one sequence; without end where nothing is kept of each token.
    pub fn context(&self) -> usize {
        if self.has_caches { self.room.context } else { usize::MAX }
    }

    /// Tokens that should go through the model at once at most.
    pub fn batch(&self) -> usize {
        self.executor.batch()
    }

    /// The executor's memory as it is now, where anybody can tell.
    pub fn memory(&self) -> Option<crate::executor::Memory> {
        self.executor.memory()
    }

    /// Pages of the caches that can be had now, and in all.
    pub fn pages(&self) -> (usize, usize) {
        (self.pages.available(), self.pages.count())
    }

    /// A new sequence. Beginnings are shared among sequences of the same owner.
    pub fn open(&mut self, owner: u64) -> Result<SequenceId, Error> {
        let state = self.take_state()?;
        if let Some(state) = state {
            let ranges = self.state_ranges(state);
            self.executor.zero(&ranges)?;
        }
        Ok(self.add(Sequence { state, owner, ..Sequence::default() }))
    }

    fn add(&mut self, sequence: Sequence) -> SequenceId {
        self.next += 1;
        self.sequences.insert(SequenceId(self.next), sequence);
        SequenceId(self.next)
    }

    fn take_state(&mut self) -> Result<Option<u32>, Error> {
        if !self.has_states {
            return Ok(None);
        }
        let state = self.free_states.pop();
        state.map(Some).ok_or(Error::NoRoom { what: "states", needed: 1, free: 0, all: self.room.states })
    }

    /// Ends a sequence. What it shares stays with the others.
    pub fn close(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.remove(&id) else { return };
        sequence.pages.iter().for_each(|page| self.pages.give_back(*page));
        self.free_states.extend(sequence.state);
    }

    fn sequence(&self, id: SequenceId) -> Result<&Sequence, Error> {
        self.sequences.get(&id).ok_or(Error::NoSequence { why: "it was closed" })
    }

    fn sequence_mut(&mut self, id: SequenceId) -> Result<&mut Sequence, Error> {
        self.sequences.get_mut(&id).ok_or(Error::NoSequence { why: "it was closed" })
    }

    /// The tokens of a sequence.
    pub fn tokens(&self, id: SequenceId) -> &[u32] {
        self.sequences.get(&id).map_or(&[], |s| &s.tokens)
    }

    /// Number of tokens of a sequence.
    pub fn length(&self, id: SequenceId) -> usize {
        self.tokens(id).len()
    }

    /// Gives an empty sequence the pages that hold the beginning of `tokens` already, and says how many tokens that are. At
    /// least one token is left to be fed, because somebody wants its logits.
    pub fn reuse(&mut self, id: SequenceId, tokens: &[u32]) -> Result<usize, Error> {
        let sequence = self.sequence(id)?;
        // A state remembers everything at once: there is no beginning of it to share.
        // Where tokens see the whole text, keys of a beginning depend on its end.
        let shared = self.has_caches && !self.has_states && !self.graph.facts().sees_all;
        if !sequence.tokens.is_empty() || !shared || tokens.is_empty() {
            return Ok(0);
        }
        let (mut before, mut chains, mut pages) = (Err(sequence.owner), Vec::new(), Vec::new());
        for page in tokens[..tokens.len() - 1].chunks_exact(PAGE) {
            let chain = self.pages.chain(before, page);
            let Some(found) = self.pages.find(chain) else { break };
            self.pages.share(found);
            pages.push(found);
            chains.push(chain);
            before = Ok(chain);
        }
        let reused = pages.len() * PAGE;
        let sequence = self.sequence_mut(id)?;
        sequence.tokens.extend(&tokens[..reused]);
        (sequence.pages, sequence.chains) = (pages, chains);
        Ok(reused)
    }

    /// A sequence that goes on from where another one is now.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId, Error> {
        self.usable(id)?;
        let state = self.take_state()?;
        let from = self.sequence(id)?;
        let (tokens, pages, chains) = (from.tokens.clone(), from.pages.clone(), from.chains.clone());
        let (owner, from_state) = (from.owner, from.state);
        pages.iter().for_each(|page| self.pages.share(*page));
        if let (Some(from), Some(to)) = (from_state, state) {
            let copies: Vec<_> = self.state_ranges(from).into_iter().zip(self.state_ranges(to)).collect();
            self.executor.copy(&copies)?;
        }
        Ok(self.add(Sequence { tokens, pages, chains, state, owner, ..Sequence::default() }))
    }

    /// Forgets a sequence from this token on. A recurrent state has no way back but to the beginning.
    pub fn truncate(&mut self, id: SequenceId, length: usize) -> Result<(), Error> {
        let sequence = self.sequence(id)?;
        let now = sequence.tokens.len();
        if length >= now && !sequence.broken {
            return Ok(());
        }
        if let Some(state) = sequence.state {
            if length > 0 {
                return Err(Error::NoWayBack { length: now, asked: length });
            }
            let ranges = self.state_ranges(state);
            self.executor.zero(&ranges)?;
        }
        let sequence = self.sequence_mut(id)?;
        sequence.tokens.truncate(length);
        sequence.chains.truncate(length / PAGE);
        // Rows past the length are written anew before anybody reads them, so a failed run leaves nothing behind.
        sequence.broken = false;
        let unused = sequence.pages.split_off(length.div_ceil(PAGE).min(sequence.pages.len()));
        unused.iter().for_each(|page| self.pages.give_back(*page));
        Ok(())
    }

    /// Whether a sequence can go on.
    fn usable(&self, id: SequenceId) -> Result<(), Error> {
        let sequence = self.sequence(id)?;
        if sequence.broken {
            return Err(Error::NoSequence { why: "a run with it failed; go back with truncate or start over" });
        }
        if sequence.swapped.is_some() {
            return Err(Error::NoSequence { why: "it is swapped out" });
        }
        Ok(())
    }

    /// How many more pages a sequence needs for so many more tokens.
    pub fn pages_needed(&self, id: SequenceId, more: usize) -> usize {
        let Some(sequence) = self.sequences.get(&id).filter(|_| self.has_caches) else { return 0 };
        (sequence.tokens.len() + more).div_ceil(PAGE).saturating_sub(sequence.pages.len())
    }

    /// Pages that feeding so many more tokens takes: new ones, and one for an end that others share.
    pub(crate) fn pages_wanted(&self, id: SequenceId, more: usize) -> usize {
        self.pages_needed(id, more) + usize::from(self.shares_its_end(id))
    }

    /// Bytes of the caches and states that a sequence holds.
    pub(crate) fn bytes_of(&self, id: SequenceId) -> usize {
        self.remembered_bytes(self.length(id))
    }

    /// Bytes that a sequence takes in host memory while it is swapped out.
    pub(crate) fn swapped_bytes(&self, id: SequenceId) -> usize {
        self.sequences.get(&id).and_then(|s| s.swapped.as_ref()).map_or(0, Vec::len)
    }

    /// Feeds tokens of several sequences at once; gives the logits of the wanted ones, entry by entry, one row of `vocab` each. If
    /// it fails, the sequences of the batch cannot be used until they are truncated or closed; all others go on.
    pub fn feed(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Vec<f32>>, Error> {
        if self.alike {
            return self.feed_alike(entries);
        }
        let entered = self.enter(entries, End::Logits)?;
        let result = self.executor.run(entered.plan).and_then(|()| self.logits(entries, &entered));
        self.leave(entries, result.is_ok());
        result
    }

    /// Bytes a second that the memory of where it runs can be read at, where that can be told.
    pub fn read_ceiling(&mut self) -> Option<f64> {
        self.executor.read_ceiling()
    }

    /// Feeds tokens and gives the time of every step, by its label.
    pub fn profile(&mut self, entries: &[Entry<'_>]) -> Result<Vec<kiln_gpu::StepTime>, Error> {
        let entered = self.enter(entries, End::Logits)?;
        let result = self.executor.profile(entered.plan);
        self.leave(entries, result.is_ok());
        result
    }

    /// Checks entries, makes room for their tokens, and writes what the plan needs from the host. A plan that makes the next step's
    /// inputs takes entries of one token.
    pub(super) fn enter(&mut self, entries: &[Entry<'_>], end: End) -> Result<Entered, Error> {
        self.admit(entries)?;
        for entry in entries {
            self.make_room(entry.sequence, entry.tokens.len())?;
        }
        let (decode, prompts) = split(entries);
        let tokens: usize = prompts.iter().map(|e| e.tokens.len()).sum();
        let all = entries.iter().any(|e| e.wanted == Wanted::All && e.tokens.len() > 1);
        // The prompt of one sequence alone takes the form of recurrences that is fastest, and knows no padding.
        let alone = decode.is_empty() && prompts.len() == 1;
        let exact = self.executor.takes_any_shape() || (self.has_states && alone);
        let shape = shapes::shape([decode.len(), tokens, prompts.len()], all, exact);
        let Ready { plan, ports, tail, tokens, .. } = self.prepared((shape, end))?;
        let inputs = Inputs::new(&shape, &ports, &self.taken(&decode), &self.taken(&prompts));
        for (tensor, bytes) in inputs.bytes() {
            self.executor.write(plan, tensor, bytes)?;
        }
        Ok(Entered { plan, ports, tail, tokens, first_row: inputs.first_row })
    }

    fn taken<'a>(&'a self, entries: &[&Entry<'a>]) -> Vec<Taken<'a>> {
        entries.iter().map(|entry| self.part(entry, 0..entry.tokens.len())).collect()
    }

    /// Some of the tokens of an entry.
    pub(super) fn part<'a>(&'a self, entry: &Entry<'a>, tokens: std::ops::Range<usize>) -> Taken<'a> {
        let sequence = &self.sequences[&entry.sequence];
        let start = sequence.tokens.len() + tokens.start;
        Taken { tokens: &entry.tokens[tokens], start, pages: &sequence.pages, state: sequence.state }
    }

    /// Whether every entry makes sense: nothing has changed if one does not.
    pub(super) fn admit(&self, entries: &[Entry<'_>]) -> Result<(), Error> {
        let vocab = self.model.config.vocab;
        let (mut seen, mut pages) = (std::collections::HashSet::new(), 0);
        for entry in entries {
            self.usable(entry.sequence)?;
            if !seen.insert(entry.sequence) {
                return Err(Error::NoSequence { why: "it is in the batch twice" });
            }
            if entry.tokens.is_empty() {
                return Err(Error::EmptyPrompt);
            }
            let length = self.length(entry.sequence);
            if length > 0 && self.graph.facts().sees_all {
                return Err(Error::WholeText { read: length, more: entry.tokens.len() });
            }
            let needed = length.saturating_add(entry.tokens.len());
            if needed > self.context() {
                let trained = self.model.config.context;
                return Err(Error::PromptTooLong { tokens: needed, context: self.context(), trained });
            }
            if let Some(&token) = entry.tokens.iter().find(|t| **t as usize >= vocab) {
                return Err(Error::TokenOutOfRange { token, vocab });
            }
            pages += self.pages_wanted(entry.sequence, entry.tokens.len());
        }
        let (free, all) = self.pages();
        if pages > free {
            return Err(Error::NoRoom { what: "pages of the cache", needed: pages, free, all });
        }
        Ok(())
    }

    /// Whether the page that the next token is written to belongs to another sequence, too.
    fn shares_its_end(&self, id: SequenceId) -> bool {
        let Some(sequence) = self.sequences.get(&id) else { return false };
        let page = sequence.pages.get(sequence.tokens.len() / PAGE);
        page.is_some_and(|page| self.pages.is_shared(*page))
    }

    /// Takes the pages for so many more tokens; the page that is written to next becomes the sequence's own.
    pub(super) fn make_room(&mut self, id: SequenceId, more: usize) -> Result<(), Error> {
        if !self.has_caches {
            return Ok(());
        }
        let at = self.length(id) / PAGE;
        if let Some(&page) = self.sequence(id)?.pages.get(at)
            && !self.pages.may_write(page)
        {
            let own = self.take_page()?;
            let copies: Vec<_> = self.page_ranges(page).into_iter().zip(self.page_ranges(own)).collect();
            self.executor.copy(&copies)?;
            self.sequence_mut(id)?.pages[at] = own;
            self.pages.give_back(page);
        }
        for _ in 0..self.pages_needed(id, more) {
            let page = self.take_page()?;
            self.sequence_mut(id)?.pages.push(page);
        }
        Ok(())
    }

    fn take_page(&mut self) -> Result<Page, Error> {
        let all = self.pages.count();
        self.pages.take().ok_or(Error::NoRoom { what: "pages of the cache", needed: 1, free: 0, all })
    }

    /// What a batch leaves behind in its sequences.
    pub(super) fn leave(&mut self, entries: &[Entry<'_>], worked: bool) {
        if worked {
            entries.iter().for_each(|entry| self.append(entry.sequence, entry.tokens));
        } else {
            self.break_all(&entries.iter().map(|entry| entry.sequence).collect::<Vec<_>>());
        }
    }

    /// Tokens of a sequence went through the model.
    pub(super) fn append(&mut self, id: SequenceId, tokens: &[u32]) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        sequence.tokens.extend(tokens);
        // Pages that are full now can be found by others. A state belongs to all tokens at once, so there none can.
        while !self.has_states && self.has_caches && (sequence.chains.len() + 1) * PAGE <= sequence.tokens.len() {
            let at = sequence.chains.len();
            let before = sequence.chains.last().copied().ok_or(sequence.owner);
            let chain = self.pages.chain(before, &sequence.tokens[at * PAGE..(at + 1) * PAGE]);
            sequence.chains.push(chain);
            self.pages.publish(sequence.pages[at], chain);
        }
    }

    /// A run with these sequences failed.
    pub(super) fn break_all(&mut self, ids: &[SequenceId]) {
        for id in ids {
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.broken = true;
            }
        }
        // What should be zero between runs may not be after one that failed.
        for (_, ready) in self.plans.drain() {
            self.executor.forget(ready.plan);
        }
    }

    /// Pages that a sequence lacks for so many more tokens, at most those of its context.
    pub(super) fn pages_ahead(&self, id: SequenceId, more: usize) -> usize {
        self.pages_needed(id, more.min(self.context().saturating_sub(self.length(id))))
    }

    /// Takes those pages; gives each with its place in the sequence.
    pub(super) fn take_pages_ahead(&mut self, id: SequenceId, more: usize) -> Result<Vec<(usize, Page)>, Error> {
        let mut taken = Vec::new();
        for _ in 0..self.pages_ahead(id, more) {
            let page = self.take_page()?;
            let pages = &mut self.sequence_mut(id)?.pages;
            taken.push((pages.len(), page));
            pages.push(page);
        }
        Ok(taken)
    }

    /// The row of the results that belongs to each entry, or to its last token; its first one where all are wanted.
    pub(super) fn outputs(&self, entries: &[Entry<'_>], entered: &Entered) -> Vec<usize> {
        let Entered { ports, first_row, .. } = entered;
        let all_rows = ports.logits.shape[1] == ports.tokens.shape[0];
        let pieces_from = ports.logits.shape[1].saturating_sub(ports.starts.shape[0] - 1);
        let (mut decode, mut prompts) = (0.., 0..);
        let decoding = entries.iter().filter(|e| e.tokens.len() == 1).count();
        let output = |entry: &Entry<'_>| {
            let goes_on = entry.tokens.len() == 1;
            let nth: usize = if goes_on { decode.next() } else { prompts.next() }.unwrap_or(0);
            let first = first_row[if goes_on { nth } else { decoding + nth }];
            match entry.wanted {
                Wanted::All => first,
                _ if all_rows => first + entry.tokens.len() - 1,
                _ if goes_on => nth,
                _ => pieces_from + nth,
            }
        };
        entries.iter().map(output).collect()
    }

    /// The logits of every entry.
    fn logits(&mut self, entries: &[Entry<'_>], entered: &Entered) -> Result<Vec<Vec<f32>>, Error> {
        let logits = entered.ports.logits;
        let vocab = logits.shape[0];
        let mut all = Vec::with_capacity(entries.len());
        for (entry, first) in entries.iter().zip(self.outputs(entries, entered)) {
            let count = match entry.wanted {
                Wanted::Nothing => 0,
                Wanted::Last => 1,
                Wanted::All => entry.tokens.len(),
            };
            let mut values = vec![0.0f32; vocab * count];
            if count > 0 {
                let part = logits.narrow(1, first, count);
                // Devices and files are little endian, and so is every machine Kiln runs on.
                self.executor.read(entered.plan, &part, bytemuck::cast_slice_mut(&mut values))?;
            }
            all.push(values);
        }
        Ok(all)
    }

    pub(super) fn prepared(&mut self, key: Key) -> Result<Ready, Error> {
        self.clock += 1;
        let now = self.clock;
        if let Some(ready) = self.plans.get_mut(&key) {
            ready.last_used = now;
            return Ok(*ready);
        }
        if self.plans.len() >= MOST_PLANS
            && let Some((&oldest, _)) = self.plans.iter().min_by_key(|(_, ready)| ready.last_used)
            && let Some(ready) = self.plans.remove(&oldest)
        {
            self.executor.forget(ready.plan);
        }
        let start = Instant::now();
        let mut plan = lower(self.graph.plan(key.0)?, &self.executor.target())?;
        // Without caches positions only tell draws apart: pages that nobody writes to hold as many tokens as can be counted.
        let page = if self.has_caches { PAGE } else { i32::MAX as usize / plan.ports.table.shape[0] };
        let (mut tail, mut tokens) = (None, None);
        match key.1 {
            End::Logits => {}
            End::Tokens { cuts } => tokens = Some(add_tokens(&mut plan, cuts)?),
            End::NextStep { cuts } => tail = Some(add_tail(&mut plan, cuts, page)?),
        }
        let ports = plan.ports;
        let plan = self.executor.prepare(plan)?;
        self.preparing += start.elapsed();
        let ready = Ready { plan, ports, tail, tokens, last_used: now };
        self.plans.insert(key, ready);
        Ok(ready)
    }

    /// The plan that so many tokens of one sequence get here, for printing and comparing.
    pub fn plan(&self, tokens: usize, outputs: usize) -> Result<Plan, Error> {
        lower(self.graph.plan(BatchShape::new(tokens, outputs))?, &self.executor.target())
    }

    fn whole(&self, wanted: impl Fn(&SlotKind) -> bool) -> Vec<Range> {
        let slots = (0..).zip(&self.graph.fixed().slots).filter(|(_, slot)| wanted(&slot.kind));
        slots.map(|(i, slot)| Range::new(i, 0, slot.bytes)).collect()
    }

    /// Where a page lies in every cache.
    fn page_ranges(&self, page: Page) -> Vec<Range> {
        self.parts(SlotKind::Cache, self.room.pages, page)
    }

    /// Where a state lies in every recurrent layer.
    fn state_ranges(&self, state: u32) -> Vec<Range> {
        self.parts(SlotKind::State, self.room.states, state)
    }

    /// Part number `at` of all slots of a kind, each of which holds `count` of them side by side.
    fn parts(&self, kind: SlotKind, count: usize, at: u32) -> Vec<Range> {
        let part =
            |whole: Range| Range { offset: whole.bytes / count * at as usize, bytes: whole.bytes / count, ..whole };
        self.whole(|k| *k == kind).into_iter().map(part).collect()
    }

    /// Everything a sequence remembers: the rows of its tokens in every cache, and its states.
    fn memory_of(&self, sequence: &Sequence) -> Vec<Range> {
        let mut ranges = Vec::new();
        for (i, &page) in sequence.pages.iter().enumerate() {
            let rows = sequence.tokens.len().saturating_sub(i * PAGE).min(PAGE);
            ranges.extend(self.page_ranges(page).into_iter().map(|r| Range { bytes: r.bytes / PAGE * rows, ..r }));
        }
        ranges.extend(sequence.state.into_iter().flat_map(|state| self.state_ranges(state)));
        ranges.retain(|r| r.bytes > 0);
        ranges
    }

    /// The bytes that a sequence remembers with, page by page.
    pub(crate) fn remembered(&mut self, id: SequenceId) -> Result<Vec<u8>, Error> {
        self.usable(id)?;
        let ranges = self.memory_of(self.sequence(id)?);
        let mut bytes = vec![0; ranges.iter().map(|r| r.bytes).sum()];
        self.executor.gather(&ranges, &mut bytes)?;
        Ok(bytes)
    }

    /// Bytes that a sequence of so many tokens remembers with.
    pub(crate) fn remembered_bytes(&self, tokens: usize) -> usize {
        let of = |kind, count: usize, times: usize| {
            self.whole(|k| *k == kind).iter().map(|r| r.bytes / count * times).sum::<usize>()
        };
        let caches = if self.has_caches { of(SlotKind::Cache, self.room.pages * PAGE, tokens) } else { 0 };
        caches + if self.has_states { of(SlotKind::State, self.room.states, 1) } else { 0 }
    }

    /// Makes a sequence remember what another one did ([`Engine::remembered`]).
    pub(crate) fn remember(&mut self, id: SequenceId, tokens: &[u32], bytes: &[u8]) -> Result<(), Error> {
        self.truncate(id, 0)?;
        self.make_room(id, tokens.len())?;
        let sequence = self.sequence_mut(id)?;
        sequence.tokens = tokens.to_vec();
        let ranges = self.memory_of(self.sequence(id)?);
        let worked = self.executor.scatter(&ranges, bytes);
        self.sequence_mut(id)?.broken = worked.is_err();
        worked
    }

    /// Everything a sequence remembers, as bytes that [`Engine::load_state`] takes: a beginning to go on from, here or in
    /// another engine with the same model.
    pub fn save_state(&mut self, id: SequenceId) -> Result<Vec<u8>, Error> {
        let bytes = self.remembered(id)?;
        Ok(state::write(&self.model, self.tokens(id), &bytes))
    }

    /// Lets a sequence go on from a saved state. One of another model, or too long for the context, is refused, and nothing has
    /// changed then.
    pub fn load_state(&mut self, id: SequenceId, bytes: &[u8]) -> Result<(), Error> {
        let (tokens, rest) = state::open(&self.model, bytes)?;
        if tokens.len() > self.context() {
            let why = format!("it holds {} tokens, the context has room for {}", tokens.len(), self.context());
            return Err(Error::SavedState { why, hint: "--ctx-size makes room for more" });
        }
        let needed = self.remembered_bytes(tokens.len());
        if rest.len() != needed {
            let why = format!("it remembers {} bytes, {needed} belong to its tokens", rest.len());
            let hint = "it was saved with other --cache-type flags or by another version of Kiln; save the state again";
            return Err(Error::SavedState { why, hint });
        }
        self.remember(id, &tokens, rest)?;
        // Others find its full pages, as if they had been computed here.
        self.append(id, &[]);
        Ok(())
    }

    /// Moves what a sequence remembers to host memory; its pages and its state are free for others.
    pub fn swap_out(&mut self, id: SequenceId) -> Result<(), Error> {
        let bytes = self.remembered(id)?;
        let sequence = self.sequence_mut(id)?;
        let (pages, state) = (std::mem::take(&mut sequence.pages), sequence.state.take());
        sequence.chains.clear();
        sequence.swapped = Some(bytes);
        pages.iter().for_each(|page| self.pages.give_back(*page));
        self.free_states.extend(state);
        Ok(())
    }

    /// Brings a sequence back.
    pub fn swap_in(&mut self, id: SequenceId) -> Result<(), Error> {
        let tokens = self.length(id);
        if self.sequence(id)?.swapped.is_none() {
            return Ok(());
        }
        let (needed, (free, all)) = (self.pages_needed(id, 0), self.pages());
        if needed > free {
            return Err(Error::NoRoom { what: "pages of the cache", needed, free, all });
        }
        let state = self.take_state()?;
        let sequence = self.sequence_mut(id)?;
        sequence.state = state;
        let bytes = sequence.swapped.take().unwrap_or_default();
        debug_assert_eq!(tokens, sequence.tokens.len());
        self.make_room(id, 0)?;
        let ranges = self.memory_of(self.sequence(id)?);
        let worked = self.executor.scatter(&ranges, &bytes);
        self.sequence_mut(id)?.broken = worked.is_err();
        worked
    }

    /// Whether a sequence lies in host memory.
    pub fn is_swapped(&self, id: SequenceId) -> bool {
        self.sequences.get(&id).is_some_and(|s| s.swapped.is_some())
    }
}

/// Entries that go on by one token, and those of prompts.
fn split<'e, 't>(entries: &'e [Entry<'t>]) -> (Vec<&'e Entry<'t>>, Vec<&'e Entry<'t>>) {
    entries.iter().partition(|entry| entry.tokens.len() == 1)
}
