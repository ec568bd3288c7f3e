//! A loaded model with any number of sequences: tokens of several of them go through it at once, and each remembers its own.

use std::collections::HashMap;
use std::hash::{Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Instant;

use super::background::BackgroundKernels;
use super::batch::{Carry, Inputs, Taken};
use super::cache::{CacheScope, CacheWatch, KvCache, PageCount, Runs, SequenceCache, Swapped};
use super::decode::{Decoding, Tail};
use super::disk::DiskTier;
use super::draft_model::DraftModel;
use super::draw::{End, Tokens};
use super::head::HeadTimes;
use super::load::CacheHits;
use super::making::{First, Key, Made, PlanKey, Warming, expected_keys, make};
use super::media::{Placed, Span, unknown};
use super::memory::CLOSED;
use super::pulse::Pulse;
use super::shapes;
use super::work::Work;
use crate::Error;
use crate::arch::{BatchShape, Graph, Room};
use crate::executor::{Executor, PartKey, PlanId, Progress, Seat};
use crate::lower::lower;
use crate::model::Model;
use crate::plan::{Fixed, Plan, Ports};

/// Prepared plans that stay, and the bytes that they may take beside the arena they share. The least recently used one goes when there are
/// more. Where preparing one takes long, a server must find the plan of every size that its load meets.
const MOST_PLANS: usize = 400;
const MOST_PLAN_BYTES: usize = 512 << 20;
/// The same where any shape runs and preparing a plan takes as long as a token or two.
const MOST_CHEAP_PLANS: usize = 32;

/// So many runs in a row without a prompt, and the plans of prompts go, where another one is made as fast as a token or two: the next prompt
/// has another length as a rule. That is before the CPU's executor gives back what a prompt computed in, and them with it.
const QUIET: usize = 6;

/// Bytes of host memory for saved states where nobody says how many: an eighth of what the machine has left, within these bounds.
const CHECKPOINT_BYTES: std::ops::RangeInclusive<u64> = 256 << 20..=4 << 30;

fn usual_checkpoint_bytes() -> usize {
    let left = kiln_system::memory::available().map_or(0, |available| available.bytes);
    usize::try_from((left / 8).clamp(*CHECKPOINT_BYTES.start(), *CHECKPOINT_BYTES.end())).unwrap_or(usize::MAX)
}

/// A sequence of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(u64);

/// Which tokens of an entry give logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// None: the prompt goes on.
    Nothing,
    /// The first one: what some embedders make a vector of.
    First,
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
pub(super) struct Sequence {
    /// Its tokens, and what is cached of them.
    pub(super) cache: SequenceCache,
    /// A run with it failed: what it remembers cannot be trusted.
    pub(super) broken: bool,
    /// What it remembers, while it lies in host memory.
    pub(super) swapped: Option<Swapped>,
    /// How strongly each adapter counts, where that is not as the model has it.
    pub(super) scales: Option<Vec<f32>>,
    /// Rows that are vectors, in the order of their places.
    pub(super) spans: Vec<Span>,
    /// It holds rows of pictures that are not among `spans`: where tokens behind them stand is not known.
    pub(super) lost_pictures: bool,
}

/// A loaded model with its sequences.
pub struct Engine {
    model: Arc<Model>,
    graph: Arc<Graph>,
    /// Kernels that are being compiled for batches to come.
    background: Option<BackgroundKernels>,
    pub(super) executor: Box<dyn Executor>,
    room: Room,
    /// Whether every token goes the way of one alone (`batch_invariant.rs`).
    pub(super) batch_invariant: bool,
    pub(super) cache: KvCache,
    pub(super) sequences: HashMap<SequenceId, Sequence>,
    next: u64,
    plans: HashMap<Key, Ready>,
    clock: u64,
    /// Runs in a row without a prompt.
    quiet: usize,
    /// Texts that go on by themselves.
    pub(super) decoding: Option<Decoding>,
    /// What runs have cost so far.
    pub(super) work: Work,
    /// Tokens of prompts that were found in the cache.
    pub(super) hits: CacheHits,
    /// Who wants to know what becomes of cached pages.
    pub(super) watch: Option<CacheWatch>,
    /// Where finished sequences are kept beyond this process.
    pub(super) disk: Option<DiskTier>,
    /// A smaller model that drafts what this one verifies.
    pub(super) draft: Option<Box<DraftModel>>,
    /// What is known of the head that drafts, in models with one.
    pub(super) head: HeadTimes,
}

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
    pub(super) tokens: Option<Tokens>,
    /// Bytes of inputs and results that belong to this plan alone.
    bytes: usize,
    last_used: u64,
}

impl Engine {
    /// Loads a model onto an executor with this much room.
    pub fn new(
        model: Arc<Model>,
        executor: Box<dyn Executor>,
        room: Room,
        progress: Progress<'_>,
    ) -> Result<Engine, Error> {
        Engine::expecting(model, executor, room, None, progress)
    }

    /// The same, with the kernels that a first text will ask for made meanwhile.
    pub fn expecting(
        model: Arc<Model>,
        mut executor: Box<dyn Executor>,
        room: Room,
        first: Option<First>,
        progress: Progress<'_>,
    ) -> Result<Engine, Error> {
        let graph = Arc::new(model.graph(&room)?);
        if graph.facts().start.is_some() && executor.shares().len() > 1 {
            return Err(Error::SeveralDevices { architecture: model.config.architecture.name });
        }
        executor.seat(&Seat::of_one(room, executor.target().batch_invariant));
        let arenas = super::fit::arenas(&graph, &*executor, &room)?;
        let warming = first.and_then(|first| Warming::new(&graph, &*executor, &room, first));
        std::thread::scope(|scope| {
            if let Some(warming) = &warming {
                warming.run(&graph, scope);
            }
            executor.load(graph.fixed(), &model.gguf, progress)
        })?;
        for (device, bytes) in arenas.into_iter().enumerate() {
            executor.reserve_on(device, bytes)?;
        }
        let facts = graph.facts();
        // Where tokens see the whole text, keys of a prefix depend on its end; decoder keys depend on what the encoder read.
        let is_causal = !facts.sees_all && facts.start.is_none();
        let mut cache = KvCache::new(graph.fixed(), &room, facts.window, is_causal);
        cache.limit_checkpoints(usual_checkpoint_bytes());
        let batch_invariant = executor.target().batch_invariant;
        Ok(Engine {
            model,
            graph,
            background: None,
            executor,
            room,
            batch_invariant,
            cache,
            sequences: HashMap::new(),
            next: 0,
            plans: HashMap::new(),
            clock: 0,
            quiet: 0,
            decoding: None,
            work: Work::default(),
            hits: CacheHits::default(),
            watch: None,
            disk: None,
            draft: None,
            head: HeadTimes::default(),
        })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Whether there is such a sequence.
    pub(super) fn is_open(&self, id: SequenceId) -> bool {
        self.sequences.contains_key(&id)
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
        self.cache.context()
    }

    /// Tokens that should go through the model at once at most.
    pub fn batch(&self) -> usize {
        self.executor.batch()
    }

    /// Has somebody who wants to see that it gets on.
    pub(super) fn watch(&mut self, pulse: &Arc<Pulse>) {
        self.executor.watch(pulse);
    }

    /// The executor's memory as it is now, where anybody can tell.
    pub fn memory(&self) -> Option<crate::executor::Memory> {
        self.executor.memory()
    }

    /// Compiles the kernels of all batch shapes that concurrent requests may need, on a thread of its own. Until they are there, batches are
    /// padded to shapes that have theirs. Does nothing where kernels take no time.
    pub fn compile_ahead(&mut self) {
        let facts = self.graph.facts();
        if self.batch_invariant || facts.encodes || facts.fills || facts.start.is_some() || !self.pads() {
            return;
        }
        let Some(warmer) = self.executor.warmer() else { return };
        let keys = expected_keys(self.room.sequences, self.batch());
        let (graph, target) = (Arc::clone(&self.graph), self.executor.target());
        self.background = Some(BackgroundKernels::start(graph, target, warmer, keys));
    }

    /// Whether a CPU does the work, be it as a software GPU.
    pub(super) fn runs_on_cpu(&self) -> bool {
        self.executor.target().caps.is_none_or(|caps| caps.is_cpu)
    }

    /// Whether [`Engine::compile_ahead`] has something left to do.
    pub fn is_compiling_ahead(&self) -> bool {
        self.background.as_ref().is_some_and(|background| !background.has_finished())
    }

    /// The shape that a batch is given: its own, or while kernels are being compiled that it needs, the smallest one that holds it and has
    /// its kernels.
    fn ready_shape(&self, (shape, end, by_row): Key) -> BatchShape {
        let lacking = self.background.as_ref().filter(|background| background.lacks(&(shape, end, by_row)));
        let Some(background) = lacking else { return shape };
        // The prompt of one sequence alone knows no padding where layers are recurrent.
        let is_exact = self.cache.has_states() && shape.decode == 0 && shape.pieces == 1;
        if is_exact || self.plans.contains_key(&(shape, end, by_row)) {
            return shape;
        }
        let prepared = self.plans.keys().filter(|key| (key.1, key.2) == (end, by_row)).map(|key| key.0);
        let ready = prepared.chain(background.ready(end, by_row)).filter(|larger| larger.holds(&shape));
        ready.min_by_key(BatchShape::rows).unwrap_or(shape)
    }

    /// A new sequence. Prefixes are shared among sequences of the same cache scope.
    pub fn open(&mut self, scope: u64) -> Result<SequenceId, Error> {
        let (cache, zero) = self.cache.open(CacheScope(scope))?;
        let id = self.add(Sequence { cache, ..Sequence::default() });
        if !zero.is_empty() {
            self.executor.zero(&zero).inspect_err(|_| self.close(id))?;
        }
        Ok(id)
    }

    /// A new sequence for which adapters count as strongly as these numbers say, one for each; none for as the model has it.
    pub fn open_adapted(&mut self, scope: u64, scales: Option<&[f32]>) -> Result<SequenceId, Error> {
        let usual = self.model.scales();
        let scales = scales.unwrap_or(&usual);
        if scales.len() != usual.len() {
            return Err(Error::Scales { got: scales.len(), have: usual.len() });
        }
        if scales == usual {
            return self.open(scope);
        }
        // What it remembers is of use only to those whose adapters count the same.
        let mut hash = std::hash::DefaultHasher::new();
        (scope, scales.iter().map(|scale| scale.to_bits()).collect::<Vec<_>>()).hash(&mut hash);
        let id = self.open(hash.finish())?;
        self.sequence_mut(id)?.scales = Some(scales.to_vec());
        Ok(id)
    }

    /// How strongly each adapter counts for a sequence.
    pub(super) fn scales_of(&self, id: SequenceId) -> Vec<f32> {
        self.sequences.get(&id).and_then(|s| s.scales.clone()).unwrap_or_else(|| self.model.scales())
    }

    /// Whether adapters count differently for some of these than the model has it.
    pub(super) fn by_row(&self, entries: &[Entry<'_>]) -> bool {
        entries.iter().any(|entry| self.sequences.get(&entry.sequence).is_some_and(|s| s.scales.is_some()))
    }

    /// Says how strongly adapters count for each row, in plans that ask: sequences with their first row and number of rows.
    pub(super) fn write_scales(
        &mut self,
        Ready { plan, ports, .. }: Ready,
        parts: &[(SequenceId, usize, usize)],
    ) -> Result<(), Error> {
        let Some(input) = ports.scales else { return Ok(()) };
        let rows = input.shape[0];
        let mut values = vec![0.0f32; input.len()];
        for (id, first, count) in parts {
            for (adapter, scale) in self.scales_of(*id).into_iter().enumerate() {
                values[adapter * rows + first..][..*count].fill(scale);
            }
        }
        self.executor.write(plan, &input, bytemuck::cast_slice(&values))
    }

    pub(super) fn add(&mut self, sequence: Sequence) -> SequenceId {
        self.next += 1;
        self.sequences.insert(SequenceId(self.next), sequence);
        SequenceId(self.next)
    }

    /// Ends a sequence. What it shares stays with the others.
    pub fn close(&mut self, id: SequenceId) {
        if let Some(sequence) = self.sequences.remove(&id) {
            self.cache.close(sequence.cache);
        }
    }

    /// Weights, constants, caches and states.
    pub(super) fn fixed(&self) -> &Fixed {
        self.graph.fixed()
    }

    /// The token that texts begin with, in models that read one text and write another.
    pub fn start(&self) -> Option<u32> {
        self.graph.facts().start
    }

    /// Whether every token sees the whole text.
    pub(super) fn sees_all(&self) -> bool {
        self.graph.facts().sees_all
    }

    /// Whether texts whose vectors are wanted are read at once: because every token sees all others.
    pub(super) fn reads_whole(&self) -> bool {
        self.sees_all() || self.start().is_some()
    }

    pub(super) fn sequence(&self, id: SequenceId) -> Result<&Sequence, Error> {
        self.sequences.get(&id).ok_or(CLOSED)
    }

    pub(super) fn sequence_mut(&mut self, id: SequenceId) -> Result<&mut Sequence, Error> {
        self.sequences.get_mut(&id).ok_or(CLOSED)
    }

    /// The tokens of a sequence.
    pub fn tokens(&self, id: SequenceId) -> &[u32] {
        self.sequences.get(&id).map_or(&[], |s| &s.cache.tokens)
    }

    /// Number of tokens of a sequence.
    pub fn length(&self, id: SequenceId) -> usize {
        self.tokens(id).len()
    }

    /// Whether a sequence can go on.
    pub(super) fn usable(&self, id: SequenceId) -> Result<(), Error> {
        let sequence = self.sequence(id)?;
        if sequence.broken {
            return Err(Error::NoSequence { why: "a run with it failed; go back with truncate or start over" });
        }
        if sequence.swapped.is_some() {
            return Err(Error::NoSequence { why: "it is swapped out" });
        }
        Ok(())
    }

    /// Feeds tokens of several sequences at once; gives the logits of the wanted ones, entry by entry, one row of `vocab` each. If
    /// it fails, the sequences of the batch cannot be used until they are truncated or closed; all others go on.
    pub fn feed(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Vec<f32>>, Error> {
        // A token that sees the whole text cannot go the way of one alone.
        if self.batch_invariant && !self.sees_all() {
            return self.feed_batch_invariant(entries);
        }
        self.feed_until(entries, End::Logits)
    }

    /// Feeds tokens as [`Engine::feed`] does, and gives the vectors that logits would be made of.
    pub fn vectors(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Vec<f32>>, Error> {
        self.feed_until(entries, End::Vectors)
    }

    fn feed_until(&mut self, entries: &[Entry<'_>], end: End) -> Result<Vec<Vec<f32>>, Error> {
        let result = self.again_if_wrong(entries, |engine| {
            let entered = engine.enter(entries, end)?;
            let ran = engine.executor.run(entered.plan);
            Ok(ran.and_then(|()| engine.logits(entries, &entered)))
        })?;
        self.leave(entries, result.is_ok());
        result
    }

    /// Feeds the tokens of one sequence and gives the logits of these rows of them, in this order.
    pub fn feed_rows(&mut self, sequence: SequenceId, tokens: &[u32], rows: &[usize]) -> Result<Vec<f32>, Error> {
        let entries = [Entry { sequence, tokens, wanted: Wanted::Nothing }];
        self.answers_something(&entries)?;
        self.admit(&entries)?;
        self.make_room(sequence, tokens.len())?;
        let result = self.again_if_wrong(&entries, |engine| Ok(engine.run_some(&entries[0], rows)))?;
        self.leave(&entries, result.is_ok());
        result
    }

    fn run_some(&mut self, entry: &Entry<'_>, wanted: &[usize]) -> Result<Vec<f32>, Error> {
        let exact = self.executor.takes_any_shape();
        let counts = if entry.tokens.len() == 1 { [1, 0, 0] } else { [0, entry.tokens.len(), 1] };
        let mut shape = shapes::shape(counts, false, exact);
        shape.outputs = shapes::some(wanted.len(), exact).clamp(1, shape.rows());
        let all = shape.outputs == shape.rows();
        let entries = std::slice::from_ref(entry);
        let ready = self.prepared((shape, End::Logits, self.by_row(entries)))?;
        let Ready { plan, ports, .. } = ready;
        let taken = [self.part(entry, 0..entry.tokens.len())];
        let (decode, prompts) = taken.split_at(counts[0]);
        let mut inputs = Inputs::new(&shape, &ports, decode, prompts);
        if !all {
            inputs.want(&ports, wanted);
        }
        for (tensor, bytes) in inputs.bytes() {
            self.executor.write(plan, tensor, bytes)?;
        }
        self.write_scales(ready, &[(entry.sequence, 0, entry.tokens.len())])?;
        self.executor.run(plan)?;
        let vocab = ports.logits.shape[0];
        let mut logits = vec![0.0f32; vocab * wanted.len()];
        for (nth, (row, to)) in wanted.iter().zip(logits.chunks_exact_mut(vocab)).enumerate() {
            let from = if all { *row } else { nth };
            self.executor.read(plan, &ports.logits.narrow(1, from, 1), bytemuck::cast_slice_mut(to))?;
        }
        Ok(logits)
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
    pub(super) fn enter<'a>(&mut self, entries: &[Entry<'a>], end: End) -> Result<Entered, Error> {
        if end != End::Vectors {
            self.answers_something(entries)?;
        }
        self.admit(entries)?;
        for entry in entries {
            self.make_room(entry.sequence, entry.tokens.len())?;
        }
        let (decode, prompts) = split(entries);
        let tokens: usize = prompts.iter().map(|e| e.tokens.len()).sum();
        let all = entries.iter().any(|e| e.wanted == Wanted::All && e.tokens.len() > 1);
        // The prompt of one sequence alone takes the form of recurrences that is fastest, and knows no padding.
        let alone = decode.is_empty() && prompts.len() == 1;
        let exact = self.executor.takes_any_shape() || (self.cache.has_states() && alone);
        let mut shape = shapes::shape([decode.len(), tokens, prompts.len()], all, exact);
        if self.graph.facts().latents && prompts.iter().all(|entry| self.length(entry.sequence) == 0) {
            shape = self.graph.expanding(shape, &self.executor.target());
        }
        let ids: Vec<SequenceId> = decode.iter().map(|entry| entry.sequence).collect();
        let alone = !prompts.is_empty() || exact || ids.len() < 2;
        shape.pictures = self.pictures(entries)?;
        shape.shares = !alone && ids.len() >= self.executor.target().shares_from && self.share_pages(&ids);
        let key = (shape, end, self.by_row(entries));
        shape = self.ready_shape(key);
        let ready = self.prepared((shape, key.1, key.2))?;
        let Ready { plan, ports, tail, tokens, .. } = ready;
        let runs = if matches!(end, End::NextStep { .. }) { Runs::Ahead } else { Runs::Model };
        if runs == Runs::Ahead {
            self.carry_on(&ids)?;
        }
        let inputs = Inputs::new(&shape, &ports, &self.taken(&decode, runs), &self.taken(&prompts, runs));
        for (tensor, bytes) in inputs.bytes() {
            self.executor.write(plan, tensor, bytes)?;
        }
        let order = || decode.iter().chain(&prompts).zip(&inputs.first_row);
        let parts: Vec<_> = order().map(|(entry, first)| (entry.sequence, *first, entry.tokens.len())).collect();
        self.write_scales(ready, &parts)?;
        let placed = |(entry, row): (&&Entry<'a>, &usize)| {
            let (sequence, tokens) = (entry.sequence, entry.tokens);
            Placed { sequence, row: *row, tokens, position: self.length(sequence), fed: tokens }
        };
        let placed: Vec<_> = order().map(placed).collect();
        self.write_pictures(ready, &placed)?;
        Ok(Entered { plan, ports, tail, tokens, first_row: inputs.first_row })
    }

    fn taken<'a>(&'a self, entries: &[&Entry<'a>], runs: Runs) -> Vec<Taken<'a>> {
        let of = |taken: Taken<'a>| Taken { carry: taken.carry.map(|carry| Carry { runs, ..carry }), ..taken };
        entries.iter().map(|entry| of(self.part(entry, 0..entry.tokens.len()))).collect()
    }

    /// Some of the tokens of an entry.
    pub(super) fn part<'a>(&'a self, entry: &Entry<'a>, tokens: std::ops::Range<usize>) -> Taken<'a> {
        let SequenceCache { tables, state, encoder, carried, .. } = &self.sequences[&entry.sequence].cache;
        let length = self.length(entry.sequence);
        let (start, end) = (length + tokens.start, length + entry.tokens.len());
        let first = entry.wanted == Wanted::First;
        let carry = carried.map(|carried| Carry { carried, runs: Runs::Model, start: length, end });
        Taken { tokens: &entry.tokens[tokens], start, tables, encoder: encoder.as_ref(), state: *state, first, carry }
    }

    /// Whether every entry makes sense: nothing has changed if one does not.
    pub(super) fn admit(&self, entries: &[Entry<'_>]) -> Result<(), Error> {
        let vocab = self.model.config.vocab;
        let (mut seen, mut pages) = (std::collections::HashSet::new(), PageCount::default());
        for entry in entries {
            self.usable(entry.sequence)?;
            if !seen.insert(entry.sequence) {
                return Err(Error::NoSequence { why: "it is in the batch twice" });
            }
            if entry.tokens.is_empty() {
                return Err(Error::EmptyPrompt);
            }
            let length = self.length(entry.sequence);
            if length > 0 && self.sees_all() {
                return Err(Error::WholeText { read: length, more: entry.tokens.len() });
            }
            let needed = length.saturating_add(entry.tokens.len());
            if needed > self.context() {
                let trained = self.model.config.context;
                return Err(Error::PromptTooLong { tokens: needed, context: self.context(), trained });
            }
            if let Some(token) = unknown(entry.tokens, length, &self.sequence(entry.sequence)?.spans, vocab) {
                return Err(Error::TokenOutOfRange { token, vocab });
            }
            self.admit_pictures(entry)?;
            pages = pages + self.pages_to_feed(entry.sequence, entry.tokens.len());
        }
        self.room_for(pages)
    }

    /// What a batch leaves behind in its sequences.
    pub(super) fn leave(&mut self, entries: &[Entry<'_>], worked: bool) {
        if worked {
            entries.iter().for_each(|entry| self.append(entry.sequence, entry.tokens));
        } else {
            self.break_all(&entries.iter().map(|entry| entry.sequence).collect::<Vec<_>>());
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
        self.forget_plans();
    }

    pub(super) fn forget_plans(&mut self) {
        for (_, ready) in self.plans.drain() {
            self.executor.forget(ready.plan);
        }
    }

    /// Another run comes, with a prompt or without.
    pub(super) fn count_run(&mut self, prompt: bool) {
        self.quiet = if prompt { 0 } else { self.quiet + 1 };
        if self.quiet == QUIET && self.executor.takes_any_shape() {
            for (_, ready) in self.plans.extract_if(|(shape, ..), _| shape.prompt > 0) {
                self.executor.forget(ready.plan);
            }
        }
    }

    /// Gives back the memory that only running takes, until the next run: for an engine that nobody asks. Plans stay where they
    /// would have to be compiled again.
    pub fn rest(&mut self) {
        if self.executor.takes_any_shape() {
            self.forget_plans();
        }
        self.executor.rest();
        self.draft.iter_mut().for_each(|draft| draft.rest());
        kiln_system::allocator::give_back();
        kiln_system::code::give_back();
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
                Wanted::First if all_rows => first,
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
                Wanted::First | Wanted::Last => 1,
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
        self.count_run(key.0.prompt > 0);
        if !matches!(key.1, End::NextStep { .. }) {
            self.work.rows += key.0.rows() as u64;
        }
        self.clock += 1;
        let now = self.clock;
        if let Some(ready) = self.plans.get_mut(&key) {
            ready.last_used = now;
            return Ok(*ready);
        }
        let start = Instant::now();
        let Made { plan, tail, tokens } = make(&self.graph, &self.executor.target(), key)?;
        let (ports, bytes, lowered) = (plan.ports, plan.own_bytes(), start.elapsed());
        self.evict_plans(bytes);
        let plan = self.executor.prepare_keyed(plan, &PartKey::whole(PlanKey(key)))?;
        self.work.preparing += start.elapsed();
        self.work.plans += 1;
        log::debug!(
            "plan for {:?} prepared in {:.3} s, lowered in {:.3} s of these",
            key.0,
            start.elapsed().as_secs_f64(),
            lowered.as_secs_f64()
        );
        let ready = Ready { plan, ports, tail, tokens, bytes, last_used: now };
        self.plans.insert(key, ready);
        Ok(ready)
    }

    /// Drops the least recently used plans until one more of so many bytes may stay.
    fn evict_plans(&mut self, bytes: usize) {
        let most = if self.pads() { MOST_PLANS } else { MOST_CHEAP_PLANS };
        let mut held: usize = self.plans.values().map(|ready| ready.bytes).sum();
        while (self.plans.len() >= most || held + bytes > MOST_PLAN_BYTES)
            && let Some((&oldest, _)) = self.plans.iter().min_by_key(|(_, ready)| ready.last_used)
            && let Some(ready) = self.plans.remove(&oldest)
        {
            held -= ready.bytes;
            self.executor.forget(ready.plan);
        }
    }

    /// Whether batches are padded to few sizes, because a plan of a new size takes long to prepare.
    pub(super) fn pads(&self) -> bool {
        !self.executor.takes_any_shape()
    }

    /// The plan that so many tokens of one sequence get here, for printing and comparing.
    pub fn plan(&self, tokens: usize, outputs: usize) -> Result<Plan, Error> {
        let target = self.executor.target();
        lower(self.graph.plan(self.graph.expanding(BatchShape::new(tokens, outputs), &target))?, &target)
    }
}

/// Entries that go on by one token, and those of prompts.
fn split<'e, 't>(entries: &'e [Entry<'t>]) -> (Vec<&'e Entry<'t>>, Vec<&'e Entry<'t>>) {
    entries.iter().partition(|entry| entry.tokens.len() == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::{Arithmetic, CpuExecutor};
    use crate::quantise_recipe::Recipe;
    use crate::synth::{Preset, Synth};

    /// Prompt tokens of the plans that are ready.
    fn ready(engine: &Engine) -> Vec<usize> {
        let mut ready: Vec<usize> = engine.plans.keys().map(|(shape, ..)| shape.prompt).collect();
        ready.sort_unstable();
        ready
    }

    #[test]
    fn plans_of_prompts_go_when_a_text_has_gone_on_for_a_while() {
        let synth = Synth::new(Preset::from_name("tiny-llama").unwrap(), Recipe::from_name("F32").unwrap(), 1);
        let gguf = kiln_gguf::Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap();
        let executor = Box::new(CpuExecutor::new(Arithmetic::Fast));
        let room = Room::for_sequences(1, 128);
        let mut engine = Engine::new(Arc::new(Model::new(gguf).unwrap()), executor, room, &mut |_, _| {}).unwrap();
        let sequence = engine.open(0).unwrap();
        let feed = |engine: &mut Engine, tokens: &[u32]| {
            engine.feed(&[Entry { sequence, tokens, wanted: Wanted::Last }]).unwrap().remove(0)
        };
        feed(&mut engine, &[5, 6, 7]);
        for _ in 1..QUIET {
            feed(&mut engine, &[9]);
            assert_eq!(ready(&engine), [0, 3]);
        }
        feed(&mut engine, &[9]);
        assert_eq!(ready(&engine), [0]);
        // Texts that go on by themselves ask for their plan only once.
        feed(&mut engine, &[5, 6, 7, 8]);
        engine.go_on(&[(sequence, 9)], 2 * QUIET, Default::default()).unwrap();
        assert_eq!(ready(&engine), [0, 0]);
        // The next prompt has a plan made anew, and is read as before.
        engine.truncate(sequence, 0).unwrap();
        let again = feed(&mut engine, &[5, 6, 7]);
        engine.truncate(sequence, 0).unwrap();
        assert_eq!(feed(&mut engine, &[5, 6, 7]), again);
    }
}
