//! What somebody wants generated, and what is told of it while it is made.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::engine::SequenceId;
use super::media::Span;
use crate::Error;
use crate::sampler::{Logprobs, Sampling};

/// What to generate.
pub struct Request {
    /// The tokens to continue.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most; none for as many as the context holds.
    pub limit: Option<usize>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// What ends a text.
    pub stop: StopRule,
    /// Report each token's logarithm of probability, and those of so many likeliest ones.
    pub logprobs: Option<usize>,
    /// They are those of the tokens that the samplers have left to choose from, in the place of the model's own.
    pub after_sampling: bool,
    /// What the text must look like.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Sees and changes the logits of each token before the samplers do, or chooses the token itself.
    pub hook: Option<LogitsHook>,
    /// Texts to make of the same prompt. Text number i has the seed plus i.
    pub choices: usize,
    /// Who asks: owners take turns, and share the beginnings of their prompts with nobody else.
    pub owner: u64,
    /// Requests of higher priority are begun first.
    pub priority: i32,
    /// Whether the beginning of the prompt may be taken from an earlier request.
    pub reuse: bool,
    /// A sequence of the engine that holds the beginning of the prompt, but not all of it: the request goes on from a copy.
    pub from: Option<SequenceId>,
    /// Control tokens are part of the text, as whoever looks for tool calls needs them.
    pub show_special: bool,
    /// How strongly each adapter of the model counts; none for as it was loaded.
    pub scales: Option<Vec<f32>>,
    /// Vectors of the prompt, in the order of their places; what stands for them is part of the prompt ([`Vectors::tokens`]).
    ///
    /// [`Vectors::tokens`]: super::Vectors::tokens
    pub spans: Vec<Span>,
    /// What the text will probably be, as far as somebody knows: drafts are taken from it.
    pub prediction: Option<Vec<u32>>,
    /// Tokens of a draft at most; 0 for no drafts at all.
    pub most_drafted: usize,
}

impl Request {
    /// Continues a prompt with the default settings.
    pub fn new(prompt: Vec<u32>) -> Request {
        Request {
            prompt,
            limit: None,
            sampling: Sampling::default(),
            stop: StopRule::default(),
            logprobs: None,
            after_sampling: false,
            constraint: None,
            hook: None,
            choices: 1,
            owner: 0,
            priority: 0,
            reuse: true,
            from: None,
            show_special: false,
            scales: None,
            spans: Vec::new(),
            prediction: None,
            most_drafted: usize::MAX,
        }
    }
}

/// What a text must look like, token by token: a grammar, a schema.
pub trait Constraint: Send {
    /// The tokens that may come next, one bit each, the lowest first.
    fn mask(&mut self) -> Result<Vec<u32>, String>;

    /// A token was chosen.
    fn accept(&mut self, token: u32) -> Result<(), String>;

    /// Tokens that must come next, as far as that is known without asking the model. They are drafts: should others be allowed as well,
    /// nothing is wrong but the time they take.
    fn forced(&mut self) -> Vec<u32> {
        Vec::new()
    }

    /// Whether nothing more may come but an end token.
    fn is_complete(&mut self) -> bool;

    /// Whether it may still forbid a token. A request drops a constraint that no longer binds, so that the device can draw again.
    fn binds(&self) -> bool {
        true
    }

    /// The same rule at the same place, for another text.
    fn fork(&self) -> Box<dyn Constraint>;
}

/// A function of the caller's that takes part in sampling. It runs on the engine's thread: all requests wait for it. The choices of a
/// request share it.
#[derive(Clone)]
pub struct LogitsHook(Arc<Mutex<Hook>>);

/// Gets all tokens of a sequence and the logits of the next one; those of tokens that a constraint forbids are minus infinity.
type Hook = dyn FnMut(&[u32], &mut [f32]) -> Option<u32> + Send;

impl LogitsHook {
    /// Calls a function for each token. It gets the tokens so far and the logits of the next one, which it may change. A token that it
    /// returns is taken; else the samplers choose.
    pub fn new(hook: impl FnMut(&[u32], &mut [f32]) -> Option<u32> + Send + 'static) -> LogitsHook {
        LogitsHook(Arc::new(Mutex::new(hook)))
    }

    pub(crate) fn call(&self, tokens: &[u32], logits: &mut [f32]) -> Option<u32> {
        let mut hook = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (*hook)(tokens, logits)
    }
}

/// What ends a text, beside its limit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StopRule {
    /// Texts: what is generated ends before the first of them.
    pub strings: Vec<String>,
    /// Tokens that end a text as the model's own end tokens do.
    pub tokens: Vec<u32>,
    /// The model's end tokens are never chosen.
    pub ignore_end: bool,
    /// No end token is chosen before so many tokens.
    pub min_tokens: usize,
    /// A stop text is part of the result.
    pub include: bool,
}

/// Why a text ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The model chose an end token.
    EndToken(u32),
    /// One of the request's stop tokens was chosen.
    StopToken(u32),
    /// One of the request's stop texts came.
    StopString(String),
    /// As many tokens as were asked for.
    Limit,
    /// The context is full.
    Context,
    /// The constraint allows nothing more.
    Complete,
    /// Nobody wants it any more.
    Cancelled,
}

/// Counts and times of a finished text.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them that an earlier request had computed already.
    pub cached_tokens: usize,
    /// Tokens that were generated, the end token included.
    pub generated_tokens: usize,
    /// Tokens that were drafted.
    pub drafted_tokens: usize,
    /// Drafted tokens that were accepted.
    pub accepted_tokens: usize,
    /// Those of the drafted tokens that the request predicted.
    pub predicted_tokens: usize,
    /// Those of them that were accepted.
    pub accepted_predicted_tokens: usize,
    /// From the request to its begin.
    pub waiting: Duration,
    /// From the begin to the first token.
    pub reading: Duration,
    /// Of both together this was not counted: the time in which kernels were compiled that nobody had needed before.
    pub preparing: Duration,
    /// From the first token to the last.
    pub writing: Duration,
}

/// One thing that happened to a request.
#[derive(Debug)]
pub enum Event {
    /// It was taken up; so many tokens of its prompt need not be computed.
    Started {
        /// Tokens of the prompt that were there already.
        cached_tokens: usize,
    },
    /// A piece of the prompt was read.
    Read {
        /// Tokens of the prompt read so far.
        tokens: usize,
    },
    /// A token was chosen.
    Token {
        /// Which of the request's texts.
        choice: usize,
        /// The token.
        token: u32,
        /// Text that is certain now: empty while a character is unfinished or a stop text may be coming.
        text: String,
        /// Where they were asked for.
        logprobs: Option<Logprobs>,
    },
    /// A text is finished. The request is over with its last text.
    End {
        /// Which of the request's texts.
        choice: usize,
        /// Text that was held back.
        text: String,
        /// Why.
        reason: EndReason,
        /// What it took.
        usage: Usage,
    },
    /// The whole request failed; nothing comes after it.
    Failed(Error),
}
