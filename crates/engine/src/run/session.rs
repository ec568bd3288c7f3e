//! One sequence being read and continued: tokens go in, logits come out. For tools; an [`Engine`] serves many.

use std::sync::Arc;

use kiln_gguf::TensorType;

use kiln_kernels::sample::Row;

use super::engine::{Engine, Entry, SequenceId, Wanted};
use super::fit::{Wish, fit};
use crate::Error;
use crate::executor::{Executor, Progress};
use crate::model::Model;
use crate::plan::Plan;
use crate::sampler;

/// A loaded model with one sequence.
pub struct Session {
    engine: Engine,
    sequence: SequenceId,
}

impl Session {
    /// Loads a model onto an executor, with room for `context` tokens. Recurrent models have room for any number.
    pub fn new(
        model: Arc<Model>,
        executor: Box<dyn Executor>,
        context: usize,
        progress: Progress<'_>,
    ) -> Result<Session, Error> {
        Session::with_caches(model, executor, context, [TensorType::F16; 2], progress)
    }

    /// The same with caches of these types, of keys and of values.
    pub fn with_caches(
        model: Arc<Model>,
        executor: Box<dyn Executor>,
        context: usize,
        caches: [TensorType; 2],
        progress: Progress<'_>,
    ) -> Result<Session, Error> {
        let wish =
            Wish { context: Some(context).filter(|_| model.facts.has_cache()), expected: None, sequences: 1, caches };
        let room = fit(&model, &*executor, &wish)?.room;
        let mut engine = Engine::new(model, executor, room, progress)?;
        let sequence = engine.open(0)?;
        Ok(Session { engine, sequence })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        self.engine.model()
    }

    /// Where it runs.
    pub fn describe(&self) -> String {
        self.engine.describe()
    }

    /// Tokens that were fed.
    pub fn length(&self) -> usize {
        self.engine.length(self.sequence)
    }

    /// Room for tokens.
    pub fn context(&self) -> usize {
        self.engine.context()
    }

    /// Forgets the sequence from this token on. A recurrent state has no way back but to the beginning.
    pub fn truncate(&mut self, length: usize) -> Result<(), Error> {
        self.engine.truncate(self.sequence, length)
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.truncate(0)
    }

    /// Everything the model remembers, as bytes that [`Session::load_state`] takes: a prefix to go on from, here or in
    /// another session of the same model.
    pub fn save_state(&mut self) -> Result<Vec<u8>, Error> {
        self.engine.save_state(self.sequence)
    }

    /// Goes on from a saved state. One of another model, or too long for the context, is refused, and nothing has changed then.
    pub fn load_state(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.engine.load_state(self.sequence, bytes)
    }

    /// Feeds tokens and gives the logits of the wanted ones, one row of `vocab` each.
    pub fn feed(&mut self, tokens: &[u32], wanted: Wanted) -> Result<Vec<f32>, Error> {
        self.admit(tokens)?;
        let mut logits = Vec::new();
        // A text that is seen as a whole cannot be cut.
        let piece = if self.engine.sees_all() { tokens.len() } else { self.engine.batch() };
        let batches = tokens.chunks(piece);
        let last = batches.len() - 1;
        for (i, tokens) in batches.enumerate() {
            let wanted = match wanted {
                Wanted::Last if i < last => Wanted::Nothing,
                Wanted::First if i > 0 => Wanted::Nothing,
                wanted => wanted,
            };
            let rows = self.engine.feed(&[Entry { sequence: self.sequence, tokens, wanted }])?;
            logits.extend(rows.into_iter().flatten());
        }
        Ok(logits)
    }

    /// Forgets the sequence, feeds tokens, and gives the logits of these rows, in this order: for models that see a text as a whole.
    pub fn rows(&mut self, tokens: &[u32], rows: &[usize]) -> Result<Vec<f32>, Error> {
        self.reset()?;
        self.admit(tokens)?;
        self.engine.feed_rows(self.sequence, tokens, rows)
    }

    /// Reads the text that the sequence answers, in models that read one and write another. What was written before is forgotten.
    pub fn read_source(&mut self, tokens: &[u32]) -> Result<(), Error> {
        self.reset()?;
        self.engine.read_source(self.sequence, tokens)
    }

    /// Whether there is room for all tokens: a prompt is read whole or not at all.
    pub fn admit(&self, tokens: &[u32]) -> Result<(), Error> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let (needed, context) = (self.length().saturating_add(tokens.len()), self.context());
        if needed > context {
            return Err(Error::PromptTooLong { tokens: needed, context, trained: self.model().config.context });
        }
        Ok(())
    }

    /// Feeds tokens and gives the likeliest next one that is not `banned`.
    pub fn next_greedy(&mut self, tokens: &[u32], banned: &[u32]) -> Result<u32, Error> {
        let logits = self.feed(tokens, Wanted::Last)?;
        sampler::greedy(&logits, banned).ok_or(Error::NotANumber { token: self.length() })
    }

    /// Goes on by itself for so many tokens, beginning with `token`, and gives the likeliest ones: the device chooses them.
    pub fn go_on(&mut self, token: u32, tokens: usize) -> Result<Vec<u32>, Error> {
        let written = self.engine.go_on(&[(self.sequence, token)], tokens, Row::default())?;
        Ok(written.into_iter().flatten().collect())
    }

    /// Feeds tokens and gives the time of every step of the last batch, by its label.
    pub fn profile(&mut self, tokens: &[u32]) -> Result<Vec<kiln_gpu::StepTime>, Error> {
        self.admit(tokens)?;
        let size = self.engine.batch();
        let (before, tokens) = tokens.split_at((tokens.len() - 1) / size * size);
        if !before.is_empty() {
            self.feed(before, Wanted::Nothing)?;
        }
        self.engine.profile(&[Entry { sequence: self.sequence, tokens, wanted: Wanted::Last }])
    }

    /// Time that went into making plans ready so far: mostly kernels that were compiled.
    pub fn preparing(&self) -> std::time::Duration {
        self.engine.work.preparing
    }

    /// Operations a second that where it runs can do at best, by the name of what does them.
    pub fn arithmetic_ceilings(&mut self) -> Vec<(String, f64)> {
        self.engine.arithmetic_ceilings()
    }

    /// Bytes a second that the memory of where it runs can be read at, where that can be told.
    pub fn read_ceiling(&mut self) -> Option<f64> {
        self.engine.read_ceiling()
    }

    /// The plan that this many tokens and wanted logits get here, for printing and comparing.
    pub fn plan(&self, tokens: usize, outputs: usize) -> Result<Plan, Error> {
        self.engine.plan(tokens, outputs)
    }
}
