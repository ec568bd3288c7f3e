//! From logits to a token, on the host: llama.cpp's samplers under their names, in their order, with their defaults.
//!
//! The way of a draw: bias and mask, the chain of [`Sampling::samplers`], then Gumbel-max: of `logit + noise` the largest
//! wins, which draws each token with its probability. The noise belongs to seed, position and token, so that a draw can
//! be repeated anywhere, on a GPU as well.

mod candidates;
mod confidence;
mod dry;
mod history;
mod logprobs;
mod mirostat;
mod penalties;
mod sampling;
mod temperature;
mod truncation;

pub use confidence::Drawn;
pub use dry::Breakers;
pub use history::Count;
pub use logprobs::{Logprobs, logprobs};
pub use sampling::{Kind, Sampling};

use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use candidates::{Candidate, Candidates};
use history::History;
use kiln_kernels::sample::{gumbel_of, score, stream};
use mirostat::Mirostat;

/// A number as people read it: one that is far out of range without its thirty digits.
fn plain(value: f64) -> String {
    if value.abs() < 1e9 { value.to_string() } else { format!("{value:.1e}") }
}

/// What can go wrong in setting up a sampler or in a draw.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum SampleError {
    #[error("`{name}` is {}, it must be {want}", plain(*value))]
    Setting { name: &'static str, value: f64, want: &'static str },
    #[error("there is no sampler `{name}`; there are {known}")]
    UnknownSampler { name: String, known: String },
    #[error("there is no sampler with the letter `{letter}`; there are {known}")]
    UnknownLetter { letter: char, known: String },
    #[error("a bias is set for token {id}, the vocabulary has {n_vocab}")]
    BiasOutOfRange { id: u32, n_vocab: usize },
    #[error("the mask has {got} words, {want} are wanted for {n_vocab} tokens")]
    MaskLength { got: usize, want: usize, n_vocab: usize },
    #[error("there are {got} logits for a vocabulary of {n_vocab} tokens")]
    LogitCount { got: usize, n_vocab: usize },
    #[error(
        "the logit of token {id} is {value}\nhint: the file may be damaged; `kiln selftest` checks the kernels, `kiln plan --diff` finds the step"
    )]
    NotFinite { id: usize, value: f32 },
    #[error("no token is left to choose from: mask and bias forbid all of them")]
    NothingLeft,
    #[error(transparent)]
    Tokenizer(#[from] crate::tokenizer::TokenizerError),
}

/// What one draw may choose from, and what it should report.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step<'a> {
    /// One bit a token, the lowest first: those that are set may be chosen. `None`: all.
    pub mask: Option<&'a [u32]>,
    /// How many of the best tokens to report with their logarithmic probabilities; `None` reports nothing.
    pub logprobs: Option<usize>,
    /// Of what the samplers have left to choose from, in the place of all tokens as the model has them.
    pub after_sampling: bool,
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Where they were asked for.
    pub logprobs: Option<Logprobs>,
}

/// Draws tokens for one sequence and remembers what its samplers look back at.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    seed: u64,
    n_vocab: usize,
    breakers: Arc<Breakers>,
    history: History,
    mirostat: Option<Mirostat>,
}

/// The id whose noise decides whether XTC happens: no vocabulary has it.
const XTC_STREAM: u32 = u32::MAX;

impl Sampler {
    /// A sampler at the beginning of a sequence. `breakers` are wanted where [`Sampling::uses_dry`]; without them
    /// nothing ends a repetition.
    pub fn new(sampling: Sampling, n_vocab: usize, breakers: Option<Arc<Breakers>>) -> Result<Self, SampleError> {
        sampling.check(n_vocab)?;
        let random = || std::hash::RandomState::new().build_hasher().finish();
        Ok(Self {
            seed: sampling.seed.unwrap_or_else(random),
            n_vocab,
            breakers: breakers.unwrap_or_default(),
            history: History::default(),
            mirostat: (sampling.mirostat == 2).then(|| Mirostat::new(sampling.mirostat_tau, sampling.mirostat_eta)),
            sampling,
        })
    }

    /// The seed in use; the one that was drawn where none was given.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The settings.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// Tokens that the model did not write: the prompt. They count for the position, for `repeat_penalty` and for DRY.
    pub fn prompt(&mut self, tokens: &[u32]) {
        self.history.prompt(tokens);
    }

    /// A token that became part of the answer, drawn here or elsewhere.
    pub fn accept(&mut self, token: u32) {
        self.history.push(token);
    }

    /// Forgets tokens from the end until `len` are left.
    pub fn truncate(&mut self, len: usize) {
        self.history.truncate(len);
    }

    /// How many tokens there are; the position of the next draw.
    pub fn position(&self) -> usize {
        self.history.len()
    }

    /// How often each token of the penalties' window occurred, by id: what a GPU needs for them.
    pub fn counts(&self) -> Vec<Count> {
        match self.sampling.uses(Kind::Penalties) && self.sampling.has_penalties() {
            true => self.history.counts(self.sampling.repeat_last_n),
            false => Vec::new(),
        }
    }

    /// Draws a token. It is not part of the sequence before [`Sampler::accept`].
    pub fn sample(&mut self, logits: &[f32], step: Step) -> Result<Sampled, SampleError> {
        if logits.len() != self.n_vocab {
            return Err(SampleError::LogitCount { got: logits.len(), n_vocab: self.n_vocab });
        }
        let mut candidates = self.candidates(logits, step.mask)?;
        match self.mirostat {
            None => {
                for kind in 0..self.sampling.samplers.len() {
                    self.apply(self.sampling.samplers[kind], &mut candidates);
                }
            }
            Some(mirostat) => {
                temperature::apply(&mut candidates, &self.sampling);
                candidates.settle();
                mirostat.truncate(&mut candidates);
            }
        }
        let token = self.draw(&candidates).ok_or(SampleError::NothingLeft)?;
        if let Some(mirostat) = &mut self.mirostat {
            let (largest, sum) = candidates.partition();
            mirostat.observe(f64::from(token.logit - largest).exp() / sum);
        }
        let logprobs = step.logprobs.map(|top| match step.after_sampling {
            true => candidates.logprobs(token.id, top),
            false => logprobs(logits, token.id, top),
        });
        Ok(Sampled { token: token.id, logprobs })
    }

    /// The tokens that bias and mask leave.
    fn candidates(&self, logits: &[f32], mask: Option<&[u32]>) -> Result<Candidates, SampleError> {
        let words = self.n_vocab.div_ceil(32);
        if let Some(mask) = mask.filter(|mask| mask.len() < words) {
            return Err(SampleError::MaskLength { got: mask.len(), want: words, n_vocab: self.n_vocab });
        }
        let allowed = |id: usize| mask.is_none_or(|mask| mask[id / 32] >> (id % 32) & 1 == 1);
        let mut items = Vec::with_capacity(match mask {
            Some(mask) => mask.iter().map(|word| word.count_ones() as usize).sum(),
            None => logits.len(),
        });
        for (id, &logit) in logits.iter().enumerate() {
            if logit.is_nan() || logit == f32::INFINITY {
                return Err(SampleError::NotFinite { id, value: logit });
            }
            if allowed(id) {
                items.push(Candidate { id: id as u32, logit });
            }
        }
        for &(id, bias) in &self.sampling.logit_bias {
            if let Ok(at) = items.binary_search_by_key(&id, |item| item.id) {
                items[at].logit += if bias <= sampling::FORBIDDING_BIAS { f32::NEG_INFINITY } else { bias };
            }
        }
        items.retain(|item| item.logit > f32::NEG_INFINITY);
        if items.is_empty() {
            return Err(SampleError::NothingLeft);
        }
        Ok(Candidates::new(items))
    }

    fn apply(&self, kind: Kind, candidates: &mut Candidates) {
        let sampling = &self.sampling;
        let min_keep = (sampling.min_keep as usize).max(1);
        if kind != Kind::Temperature || sampling.dynatemp_range > 0.0 {
            candidates.settle();
        }
        match kind {
            Kind::Penalties => penalties::apply(candidates, &self.history, sampling),
            Kind::Dry => dry::apply(candidates, &self.history, &self.breakers, sampling),
            Kind::TopNSigma => truncation::top_n_sigma(candidates, sampling.top_n_sigma),
            Kind::TopK => truncation::top_k(candidates, sampling.top_k, min_keep),
            Kind::TypP => truncation::typical(candidates, sampling.typical_p, min_keep),
            Kind::TopP => truncation::top_p(candidates, sampling.top_p, min_keep),
            Kind::MinP => truncation::min_p(candidates, sampling.min_p, min_keep),
            Kind::Xtc if self.uniform(XTC_STREAM) < f64::from(sampling.xtc_probability) => {
                truncation::xtc(candidates, sampling.xtc_threshold, min_keep);
            }
            Kind::Xtc => {}
            Kind::Temperature => temperature::apply(candidates, sampling),
        }
    }

    /// What the numbers of this draw come from. A device counts from the position of the last token, and so does this.
    fn stream(&self) -> [u32; 2] {
        stream(self.seed, (self.history.len() as u32).wrapping_sub(1))
    }

    /// A number between 0 and 1, from the generator of the draw.
    fn uniform(&self, id: u32) -> f64 {
        let noise = gumbel_of(self.stream(), id);
        (-(-f64::from(noise)).exp()).exp()
    }

    /// Gumbel-max: the largest score, the lower id among equals.
    fn draw(&self, candidates: &Candidates) -> Option<Candidate> {
        if candidates.len() == 1 {
            return candidates.best();
        }
        let stream = self.stream();
        let temperature = candidates.temperature();
        let scored = |item: &Candidate| score(item.logit, temperature, gumbel_of(stream, item.id));
        let scores = candidates.items().iter().map(|item| (scored(item), item));
        let best = scores.min_by(|(a, left), (b, right)| b.total_cmp(a).then(left.id.cmp(&right.id)));
        best.map(|(_, item)| *item)
    }
}

/// The token with the largest logit that is not `banned`; the lowest id among equals. `None` where a logit is not a
/// number, or nothing is left to choose from.
pub fn greedy(logits: &[f32], banned: &[u32]) -> Option<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (id, &value) in (0u32..).zip(logits) {
        if value.is_nan() {
            return None;
        }
        if best.is_none_or(|(_, largest)| value > largest) && !banned.contains(&id) {
            best = Some((id, value));
        }
    }
    best.map(|(id, _)| id)
}

#[cfg(test)]
mod tests;
