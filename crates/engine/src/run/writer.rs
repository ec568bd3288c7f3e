//! One text being written: from logits to a token, from tokens to text, and when it ends.

use std::sync::Arc;

use kiln_kernels::sample::{self, Row};

use super::decode::MOST_BIASES;
use super::request::{Constraint, EndReason, LogitsHook, Request, StopRule};
use crate::Error;
use crate::model::Model;
use crate::sampler::{Breakers, Kind, Logprobs, Sampler, Step, logprobs};
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

/// A draw that the operation `sample` can do, here or on a device: the same token either way.
#[derive(Clone, Debug)]
pub(crate) struct Draw {
    pub(crate) row: Row,
    pub(crate) bias: Vec<(u32, f32)>,
}

impl Draw {
    /// The draw of a text, where its settings allow it.
    fn of(sampler: &Sampler, stop: &StopRule, ends: &[u32]) -> Option<Draw> {
        let sampling = sampler.sampling();
        // Penalties tell the prompt's tokens from the model's, which the operation does not.
        let penalties =
            sampling.repeat_penalty != 1.0 || sampling.frequency_penalty != 0.0 || sampling.presence_penalty != 0.0;
        if !sampling.on_device() || (penalties && sampling.repeat_last_n != 0 && sampling.uses(Kind::Penalties)) {
            return None;
        }
        let used = |kind: Kind, value: f32, off: f32| if sampling.uses(kind) { value } else { off };
        let row = Row {
            temperature: used(Kind::Temperature, sampling.temperature, 1.0).max(0.0),
            top_k: if sampling.uses(Kind::TopK) { u32::try_from(sampling.top_k).unwrap_or(0) } else { 0 },
            top_p: used(Kind::TopP, sampling.top_p, 1.0),
            min_p: used(Kind::MinP, sampling.min_p, 0.0),
            typical_p: used(Kind::TypP, sampling.typical_p, 1.0),
            seed: sampler.seed(),
            ..Row::default()
        };
        let forbid = |value: f32| if value <= -100.0 { f32::NEG_INFINITY } else { value };
        let mut bias: Vec<(u32, f32)> = sampling.logit_bias.iter().map(|(id, value)| (*id, forbid(*value))).collect();
        if stop.ignore_end {
            bias.extend(ends.iter().chain(&stop.tokens).map(|id| (*id, f32::NEG_INFINITY)));
        }
        Some(Draw { row, bias })
    }

    /// Adds the biases.
    pub(crate) fn favour(&self, logits: &mut [f32]) {
        for (id, value) in &self.bias {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit += value;
            }
        }
    }

    /// The token, from logits that only allowed tokens have.
    pub(crate) fn token(&self, position: usize, logits: &mut [f32]) -> Option<u32> {
        self.favour(logits);
        // Positions wrap as they do on a device.
        sample::draw(&self.row, position as u32, logits)
    }
}

/// A hook, with the tokens that it is told of.
struct Hooked {
    hook: LogitsHook,
    tokens: Vec<u32>,
}

/// A text being written.
pub(crate) struct Writer {
    model: Arc<Model>,
    sampler: Sampler,
    /// How a device would draw, where it can.
    draw: Option<Draw>,
    logprobs: Option<usize>,
    after_sampling: bool,
    constraint: Option<Box<dyn Constraint>>,
    hooked: Option<Hooked>,
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
        let draw = Draw::of(&sampler, &request.stop, model.tokenizer.end_ids());
        let show = if request.show_special { ShowSpecial::Yes } else { ShowSpecial::No };
        // A text that answers another begins anew.
        let space = if model.facts.start.is_some() { LeadingSpace::Strip } else { LeadingSpace::Keep };
        // The last token of a text need not be fed back, so it needs no room.
        let room = context.saturating_sub(request.prompt.len()).saturating_add(1);
        Ok(Writer {
            model: Arc::clone(model),
            sampler,
            draw,
            logprobs: request.logprobs,
            after_sampling: request.after_sampling,
            constraint: request.constraint.as_ref().map(|c| c.fork()),
            hooked: request.hook.clone().map(|hook| Hooked { hook, tokens: request.prompt.clone() }),
            stream: TextStream::new(Arc::clone(&model.tokenizer), show, space),
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

    /// Tokens that may still be chosen.
    pub(crate) fn left(&self) -> usize {
        self.limit.min(self.room).saturating_sub(self.made)
    }

    /// Chooses the next token.
    pub(crate) fn choose(&mut self, logits: &[f32]) -> Result<Chosen, Error> {
        let mask = self.mask(logits.len())?;
        let mut changed = Vec::new();
        let logits = match &self.hooked {
            None => logits,
            Some(Hooked { hook, tokens }) => {
                changed.extend_from_slice(logits);
                if let Some(mask) = &mask {
                    forbid(&mut changed, mask);
                }
                if let Some(token) = hook.call(tokens, &mut changed) {
                    let vocab = changed.len();
                    if token as usize >= vocab {
                        return Err(Error::TokenOutOfRange { token, vocab });
                    }
                    let logprobs = self.logprobs.map(|top| logprobs(logits, token, top));
                    return self.take(token, logprobs);
                }
                &changed
            }
        };
        // What samplers leave to choose from is seen here alone.
        let seen = self.logprobs.is_some() && self.after_sampling;
        if let Some(draw) = self.draw.as_ref().filter(|_| !seen) {
            let mut allowed = logits.to_vec();
            if let Some(mask) = &mask {
                forbid(&mut allowed, mask);
            }
            let position = self.sampler.position().saturating_sub(1);
            let token = draw.token(position, &mut allowed).ok_or(Error::NotANumber { token: position + 1 })?;
            let logprobs = self.logprobs.map(|top| logprobs(logits, token, top));
            return self.take(token, logprobs);
        }
        let (logprobs, after_sampling) = (self.logprobs, self.after_sampling);
        let sampled = self.sampler.sample(logits, Step { mask: mask.as_deref(), logprobs, after_sampling })?;
        self.take(sampled.token, sampled.logprobs)
    }

    /// How a device would draw the next tokens if it could know all that has a say in it: a draft is drawn so.
    pub(crate) fn draw(&self) -> Option<&Draw> {
        self.draw.as_ref()
    }

    /// Tokens that the constraint leaves no choice about.
    pub(crate) fn forced(&mut self) -> Vec<u32> {
        self.constraint.as_mut().map_or_else(Vec::new, |constraint| constraint.forced())
    }

    /// How the next tokens are drawn on a device, where nothing that only the host knows has a say in it.
    pub(crate) fn on_device(&self) -> Option<&Draw> {
        let free = self.constraint.is_none()
            && self.hooked.is_none()
            && self.logprobs.is_none()
            && self.made >= self.stop.min_tokens;
        self.draw.as_ref().filter(|draw| free && draw.bias.len() <= MOST_BIASES)
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
        if let Some(Hooked { tokens, .. }) = &mut self.hooked {
            tokens.push(token);
        }
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
        if self.constraint.as_ref().is_some_and(|constraint| !constraint.binds()) {
            self.constraint = None;
        }
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

/// Takes the logits of tokens that the mask leaves out.
fn forbid(logits: &mut [f32], mask: &[u32]) {
    for (id, logit) in logits.iter_mut().enumerate() {
        if mask[id / 32] >> (id % 32) & 1 == 0 {
            *logit = f32::NEG_INFINITY;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
mod tests {
    use super::*;
    use crate::quantise_recipe::Recipe;
    use crate::sampler::Sampling;
    use crate::synth::{Preset, Synth};

    /// Forbids nothing, for so many tokens.
    struct Brief(usize);

    impl Constraint for Brief {
        fn mask(&mut self) -> Result<Vec<u32>, String> {
            Ok(vec![u32::MAX; 8])
        }

        fn accept(&mut self, _: u32) -> Result<(), String> {
            self.0 -= 1;
            Ok(())
        }

        fn is_complete(&mut self) -> bool {
            false
        }

        fn binds(&self) -> bool {
            self.0 > 0
        }

        fn fork(&self) -> Box<dyn Constraint> {
            Box::new(Brief(self.0))
        }
    }

    #[test]
    fn a_constraint_that_no_longer_binds_gives_the_draw_back_to_the_device() {
        let synth = Synth::new(Preset::from_name("tiny-llama").unwrap(), Recipe::from_name("F32").unwrap(), 1);
        let gguf = kiln_gguf::Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap();
        let model = Arc::new(Model::new(gguf).unwrap());
        let constraint: Option<Box<dyn Constraint>> = Some(Box::new(Brief(2)));
        let request = Request { constraint, sampling: Sampling::greedy(), ..Request::new(vec![5, 6]) };
        let mut writer = Writer::new(&model, &request, 0, 64).unwrap();
        let mut on_device = vec![writer.on_device().is_some()];
        for _ in 0..3 {
            writer.take(9, None).unwrap();
            on_device.push(writer.on_device().is_some());
        }
        assert_eq!(on_device, [false, false, true, true]);
    }
}
