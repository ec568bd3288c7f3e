//! Texts that others are written for, in models that read one and write another: a text is read at once, as every token of it sees
//! all others, and the sequence that answers it keeps what the layers that write need of it, in pages of its own.

use super::batch::{Inputs, Taken};
use super::cache::{EncoderContext, PageTable};
use super::draw::End;
use super::engine::{Engine, Entry, SequenceId};
use super::shapes;
use crate::Error;

impl Engine {
    /// Reads the text that an empty sequence answers. One that it was given before is forgotten.
    pub fn read_source(&mut self, id: SequenceId, tokens: &[u32]) -> Result<(), Error> {
        self.admit_source(id, tokens)?;
        let before = self.sequence_mut(id)?.cache.encoder.take();
        self.cache.release_encoder(before);
        let table = self.take_encoder_pages(tokens.len())?;
        let mut read = self.run_source(id, tokens, &table);
        if matches!(read, Err(Error::OutOfRange)) {
            self.forget_plans();
            read = self.run_source(id, tokens, &table);
        }
        let encoder = Some(EncoderContext { table, tokens: tokens.len() });
        if read.is_ok() {
            self.sequence_mut(id)?.cache.encoder = encoder;
        } else {
            self.cache.release_encoder(encoder);
            // What should be zero between runs may not be after one that failed.
            self.break_all(&[]);
        }
        read
    }

    fn admit_source(&self, id: SequenceId, tokens: &[u32]) -> Result<(), Error> {
        self.usable(id)?;
        if self.start().is_none() {
            return Err(Error::NoSequence { why: "the model goes on with a text, and answers none" });
        }
        if self.length(id) > 0 {
            return Err(Error::NoSequence { why: "its text has begun, so that it is too late to say what it answers" });
        }
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let (context, config) = (self.context(), &self.model().config);
        if tokens.len() > context {
            return Err(Error::PromptTooLong { tokens: tokens.len(), context, trained: config.context });
        }
        match tokens.iter().find(|t| **t as usize >= config.vocab) {
            Some(&token) => Err(Error::TokenOutOfRange { token, vocab: config.vocab }),
            None => Ok(()),
        }
    }

    fn run_source(&mut self, id: SequenceId, tokens: &[u32], table: &PageTable) -> Result<(), Error> {
        let counts = if tokens.len() == 1 { [1, 0, 0] } else { [0, tokens.len(), 1] };
        let shape = shapes::shape(counts, false, self.executor.takes_any_shape());
        let by_row = self.by_row(&[Entry { sequence: id, tokens, wanted: super::Wanted::Nothing }]);
        let ready = self.prepared((shape, End::Source, by_row))?;
        let tables = [table.clone(), PageTable::default()];
        let taken =
            [Taken { tokens, start: 0, tables: &tables, encoder: None, state: None, first: false, carry: None }];
        let (decode, prompts) = taken.split_at(counts[0]);
        let inputs = Inputs::new(&shape, &ready.ports, decode, prompts);
        for (tensor, bytes) in inputs.bytes() {
            self.executor.write(ready.plan, tensor, bytes)?;
        }
        self.write_scales(ready, &[(id, 0, tokens.len())])?;
        self.executor.run(ready.plan)
    }

    /// Whether every one of these sequences knows what it answers, where the model has to know.
    pub(super) fn answers_something(&self, entries: &[Entry<'_>]) -> Result<(), Error> {
        let knows = |entry: &Entry<'_>| self.sequences.get(&entry.sequence).is_some_and(|s| s.cache.encoder.is_some());
        if self.start().is_some() && !entries.iter().all(knows) {
            return Err(Error::NoSource);
        }
        Ok(())
    }
}
