//! One sequence being read and continued: tokens go in, logits come out, the cache remembers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::Error;
use crate::arch::{BatchShape, Graph, graph};
use crate::executor::{Executor, PlanId, Progress};
use crate::model::Model;
use crate::plan::Ports;
use crate::sampler;
use crate::state;

/// A loaded model with one sequence.
pub struct Session {
    model: Arc<Model>,
    graph: Box<dyn Graph>,
    executor: Box<dyn Executor>,
    /// Room for tokens; without end where the model is recurrent.
    context: usize,
    /// Tokens in the cache, or in the state of a recurrent model.
    length: usize,
    ready: HashMap<BatchShape, (PlanId, Ports)>,
}

/// Which tokens of a batch give logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The last one: what generating needs.
    Last,
    /// All of them: what measuring needs.
    All,
}

impl Session {
    /// Loads a model onto an executor, with room for `context` tokens. Recurrent models have room for any number.
    pub fn new(
        model: Arc<Model>,
        mut executor: Box<dyn Executor>,
        context: usize,
        progress: Progress<'_>,
    ) -> Result<Session, Error> {
        let recurrent = model.config.architecture.is_recurrent();
        let most = if recurrent { usize::MAX } else { model.config.context.max(1) };
        if context == 0 || context > most {
            return Err(Error::Context { asked: context, most });
        }
        let context = if recurrent { usize::MAX } else { context };
        let graph = graph(&model.config, &model.gguf, context)?;
        executor.load(graph.fixed(), &model.gguf, progress)?;
        Ok(Session { model, graph, executor, context, length: 0, ready: HashMap::new() })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Where it runs.
    pub fn describe(&self) -> String {
        self.executor.describe()
    }

    /// Tokens in the cache.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Room for tokens.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Forgets the sequence from this token on. A recurrent state has no way back but to the beginning.
    pub fn truncate(&mut self, length: usize) -> Result<(), Error> {
        if length >= self.length {
            return Ok(());
        }
        if length == 0 {
            return self.reset();
        }
        if self.model.config.architecture.is_recurrent() {
            return Err(Error::NoWayBack { length: self.length, asked: length });
        }
        self.length = length;
        Ok(())
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) -> Result<(), Error> {
        if self.model.config.architecture.is_recurrent() {
            for slot in state::slots(self.graph.fixed()) {
                let zeros = vec![0; self.graph.fixed().slots[slot.0 as usize].bytes];
                self.executor.write_fixed(slot, &zeros)?;
            }
        }
        self.length = 0;
        Ok(())
    }

    /// Everything the model remembers, as bytes that [`Session::load_state`] takes: a prefix to go on from, here or in
    /// another session of the same model. A recurrent state is small; a cache is saved with all its room.
    pub fn save_state(&mut self) -> Result<Vec<u8>, Error> {
        let fixed = self.graph.fixed();
        let mut bytes = state::header(&self.model, fixed, self.length);
        for slot in state::slots(fixed) {
            let start = bytes.len();
            bytes.resize(start + fixed.slots[slot.0 as usize].bytes, 0);
            self.executor.read_fixed(slot, &mut bytes[start..])?;
        }
        Ok(bytes)
    }

    /// Goes on from a saved state. One of another model or another context is refused, and nothing has changed then.
    pub fn load_state(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let fixed = self.graph.fixed();
        let (length, mut rest) = state::open(&self.model, fixed, bytes)?;
        if length > self.context {
            return Err(Error::SavedState { why: format!("it holds {length} tokens, the context {}", self.context) });
        }
        for slot in state::slots(fixed) {
            let (own, others) = rest.split_at(fixed.slots[slot.0 as usize].bytes);
            self.executor.write_fixed(slot, own)?;
            rest = others;
        }
        self.length = length;
        Ok(())
    }

    /// Feeds tokens and gives the logits of the wanted ones, one row of `vocab` each.
    pub fn feed(&mut self, tokens: &[u32], wanted: Wanted) -> Result<Vec<f32>, Error> {
        self.admit(tokens)?;
        let mut logits = Vec::new();
        let batches = tokens.chunks(self.executor.batch());
        let last = batches.len() - 1;
        for (i, batch) in batches.enumerate() {
            // Every batch computes at least one row of logits: a plan without output would be another shape.
            let outputs = if wanted == Wanted::All { batch.len() } else { 1 };
            let rows = self.run(batch, outputs)?;
            if wanted == Wanted::All || i == last {
                logits.extend(rows);
            }
        }
        Ok(logits)
    }

    /// Feeds tokens and gives the likeliest next one that is not `banned`.
    pub fn next_greedy(&mut self, tokens: &[u32], banned: &[u32]) -> Result<u32, Error> {
        let logits = self.feed(tokens, Wanted::Last)?;
        sampler::greedy(&logits, banned).ok_or(Error::NotANumber { token: self.length })
    }

    fn run(&mut self, batch: &[u32], outputs: usize) -> Result<Vec<f32>, Error> {
        let (plan, ports) = self.enter(batch, outputs)?;
        self.executor.run(plan)?;
        // Devices and files are little endian, and so is every machine Kiln runs on.
        let mut logits = vec![0.0f32; ports.logits.len()];
        self.executor.read(plan, &ports.logits, bytemuck::cast_slice_mut(&mut logits))?;
        self.length += batch.len();
        Ok(logits)
    }

    /// Feeds tokens and gives the time of every step of the last batch, by its label.
    pub fn profile(&mut self, tokens: &[u32]) -> Result<Vec<(String, Duration)>, Error> {
        self.admit(tokens)?;
        let size = self.executor.batch();
        let (before, batch) = tokens.split_at((tokens.len() - 1) / size * size);
        if !before.is_empty() {
            self.feed(before, Wanted::Last)?;
        }
        let (plan, _) = self.enter(batch, 1)?;
        let times = self.executor.profile(plan)?;
        self.length += batch.len();
        Ok(times)
    }

    /// Whether tokens are of the vocabulary, and there is room for them.
    fn admit(&self, tokens: &[u32]) -> Result<(), Error> {
        let (config, vocab) = (&self.model.config, self.model.config.vocab);
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let needed = self.length.saturating_add(tokens.len());
        if needed > self.context {
            return Err(Error::PromptTooLong { tokens: needed, context: self.context, trained: config.context });
        }
        if let Some(&token) = tokens.iter().find(|t| **t as usize >= vocab) {
            return Err(Error::TokenOutOfRange { token, vocab });
        }
        Ok(())
    }

    /// Makes the plan for a batch ready and writes what it needs from the host.
    fn enter(&mut self, batch: &[u32], outputs: usize) -> Result<(PlanId, Ports), Error> {
        let shape = BatchShape { tokens: batch.len(), outputs, few: self.executor.few_columns() };
        let (plan, ports) = self.prepared(shape)?;
        let start = self.length;
        let ints = |values: &mut dyn Iterator<Item = usize>| -> Vec<u8> {
            values.flat_map(|v| i32::try_from(v).expect("ids and positions fit 31 bits").to_le_bytes()).collect()
        };
        let end = start + batch.len();
        let executor = &mut self.executor;
        executor.write(plan, &ports.tokens, &ints(&mut batch.iter().map(|t| *t as usize)))?;
        // A recurrence knows no positions, and its sequence may be longer than they could count.
        if !self.model.config.architecture.is_recurrent() {
            executor.write(plan, &ports.positions, &ints(&mut (start..end)))?;
            executor.write(plan, &ports.length, &ints(&mut std::iter::once(end)))?;
        }
        executor.write(plan, &ports.wanted, &ints(&mut (batch.len() - outputs..batch.len())))?;
        Ok((plan, ports))
    }

    fn prepared(&mut self, shape: BatchShape) -> Result<(PlanId, Ports), Error> {
        if let Some(ready) = self.ready.get(&shape) {
            return Ok(*ready);
        }
        let plan = self.graph.plan(shape)?;
        let ports = plan.ports;
        let made = (self.executor.prepare(plan)?, ports);
        self.ready.insert(shape, made);
        Ok(made)
    }

    /// The plan that this many tokens and wanted logits get here, for printing and comparing.
    pub fn plan(&self, tokens: usize, outputs: usize) -> Result<crate::plan::Plan, Error> {
        self.graph.plan(BatchShape { tokens, outputs, few: self.executor.few_columns() })
    }
}
