//! One text being written: from logits to a token, from tokens to text, and when it ends.

use std::sync::Arc;

use super::request::{Constraint, EndReason, Request, StopRule};
use crate::Error;
use crate::model::Model;
use crate::sampler::{Breakers, Logprobs, Sampler, Step};
use crate::text::stop::StopStrings;
use crate::tokenizer::{LeadingSpace, ShowSpecial, TextStream};

/// What came of choosing a token.
pub(crate) struct Chosen {
    pub(crate) token: u32,
    /// Text that is certain now.
    pub(crate) text: String,
    pub(crate) logprobs: Option<Logprobs>,
    /// With the last token: text that was held back, and why it was the last.
    pub(crate) end: Option<(String, EndReason)>,
}

/// A text being written.
pub(crate) struct Writer {
    model: Arc<Model>,
    sampler: Sampler,
    logprobs: Option<usize>,
    constraint: Option<Box<dyn Constraint>>,
    stream: TextStream,
    stops: StopStrings,
    stop: StopRule,
    made: usize,
    limit: usize,
    /// Tokens that the context has room for behind the prompt.
    room: usize,
    writing: bool,
}

impl Writer {
    /// Text number `choice` of a request whose prompt was read, in a context of so many tokens.
    pub(crate) fn new(model: &Arc<Model>, request: &Request, choice: usize, context: usize) -> Result<Writer, Error> {
        let mut sampling = request.sampling.clone();
        sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(choice as u64));
        let breakers = if sampling.uses_dry() {
            Some(Arc::new(Breakers::new(&sampling.dry_sequence_breakers, &model.tokenizer)?))
        } else {
            None
        };
        let mut sampler = Sampler::new(sampling, model.config.vocab, breakers)?;
        sampler.prompt(&request.prompt);
        // The last token of a text need not be fed back, so it needs no room.
        let room = context.saturating_sub(request.prompt.len()).saturating_add(1);
        Ok(Writer {
            model: Arc::clone(model),
            sampler,
            logprobs: request.logprobs,
            constraint: request.constraint.as_ref().map(|c| c.fork()),
            stream: TextStream::new(Arc::clone(&model.tokenizer), ShowSpecial::No, LeadingSpace::Keep),
            stops: StopStrings::new(&request.stop.strings),
            stop: request.stop.clone(),
            made: 0,
            limit: request.limit.unwrap_or(usize::MAX),
            room,
            writing: true,
        })
    }

    pub(crate) fn is_writing(&self) -> bool {
        self.writing
    }

    pub(crate) fn stop(&mut self) {
        self.writing = false;
    }

    /// Tokens chosen so far.
    pub(crate) fn made(&self) -> usize {
        self.made
    }

    /// Chooses the next token.
    pub(crate) fn choose(&mut self, logits: &[f32]) -> Result<Chosen, Error> {
        let mask = self.mask(logits.len())?;
        let sampled = self.sampler.sample(logits, Step { mask: mask.as_deref(), logprobs: self.logprobs })?;
        self.take(sampled.token, sampled.logprobs)
    }

    /// The tokens that may be chosen, where not all may.
    fn mask(&mut self, vocab: usize) -> Result<Option<Vec<u32>>, Error> {
        let mut mask = match &mut self.constraint {
            Some(constraint) => Some(constraint.mask().map_err(|why| Error::Constraint { why })?),
            None => None,
        };
        if self.stop.ignore_end || self.made < self.stop.min_tokens {
            let mask = mask.get_or_insert_with(|| vec![u32::MAX; vocab.div_ceil(32)]);
            for id in self.model.tokenizer.end_ids().iter().chain(&self.stop.tokens) {
                if let Some(word) = mask.get_mut(*id as usize / 32) {
                    *word &= !(1 << (id % 32));
                }
            }
        }
        Ok(mask)
    }

    /// A token was chosen, here or on the device.
    pub(crate) fn take(&mut self, token: u32, logprobs: Option<Logprobs>) -> Result<Chosen, Error> {
        self.sampler.accept(token);
        self.made += 1;
        let end = |writer: &mut Writer, reason: EndReason, text: String| {
            writer.writing = false;
            Some((text, reason))
        };
        if self.stop.tokens.contains(&token) || self.model.tokenizer.is_end(token) {
            let own = self.stop.tokens.contains(&token);
            let reason = if own { EndReason::StopToken(token) } else { EndReason::EndToken(token) };
            let rest = self.stream.finish();
            let (certain, _) = self.stops.push(&rest);
            let text = certain + &self.stops.finish();
            return Ok(Chosen { token, text: String::new(), logprobs, end: end(self, reason, text) });
        }
        let piece = self.stream.push(token)?;
        let (text, stopped) = self.stops.push(&piece);
        if let Some(stop) = stopped {
            let shown = if self.stop.include { stop.clone() } else { String::new() };
            return Ok(Chosen { token, text, logprobs, end: end(self, EndReason::StopString(stop), shown) });
        }
        let complete = match &mut self.constraint {
            Some(constraint) => {
                constraint.accept(token).map_err(|why| Error::Constraint { why })?;
                constraint.is_complete()
            }
            None => false,
        };
        let reason = match () {
            () if complete => Some(EndReason::Complete),
            () if self.made >= self.limit => Some(EndReason::Limit),
            () if self.made >= self.room => Some(EndReason::Context),
            () => None,
        };
        let end = reason.and_then(|reason| {
            let rest = self.stream.finish();
            let (certain, stopped) = self.stops.push(&rest);
            let held = if stopped.is_none() { self.stops.finish() } else { String::new() };
            end(self, reason, certain + &held)
        });
        Ok(Chosen { token, text, logprobs, end })
    }
}
