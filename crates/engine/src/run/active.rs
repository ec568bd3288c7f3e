//! A request that was taken up: its texts, and what its client is told of them.

use std::time::{Duration, Instant};

use super::cache::{Rank, Stop};
use super::drafting::{Drafts, Source};
use super::engine::SequenceId;
use super::job::Job;
use super::request::{EndReason, Event};
use super::writer::{Chosen, Writer};
use crate::Error;

/// A request that was taken up.
pub(super) struct Active {
    pub(super) job: Job,
    /// Tokens of the prompt as it came: where a model writes another text for it, the request goes on with that one's beginning.
    pub(super) prompt_tokens: usize,
    pub(super) began: Instant,
    pub(super) cached: usize,
    /// Tokens of the prompt that were read.
    pub(super) read: usize,
    /// While the prompt is being read: its sequence.
    pub(super) reading: Option<SequenceId>,
    /// Where the prefill stops so that the state can be saved, in models with states.
    pub(super) stops: Vec<Stop>,
    /// Whether the prompt had no part in the last step, though it is not read to its end.
    pub(super) is_stalled: bool,
    pub(super) texts: Vec<Text>,
    /// The writer of the only text, made before the prompt's last piece is read so that a device draws its first token.
    pub(super) begun: Option<Writer>,
    pub(super) first_token: Option<Instant>,
    /// Time that the engine had spent on making plans ready: when this began, at its first token, now.
    pub(super) preparing: [Duration; 3],
    /// Requests taken up before this one: the youngest makes room first.
    pub(super) number: u64,
}

/// One text of a request.
pub(super) struct Text {
    pub(super) sequence: SequenceId,
    pub(super) writer: Writer,
    /// The token that was chosen last and goes into the engine next.
    pub(super) next: u32,
    /// Tokens before that one which were accepted, and which its state has not taken in, because it went back.
    pub(super) pending: Vec<u32>,
    /// How its drafts have fared.
    pub(super) drafts: Drafts,
}

/// What a step gives of one sequence.
pub(super) enum Outcome {
    /// The logits of its last token, where they are wanted.
    Logits(Vec<f32>),
    /// The token that the device drew; `None` where the logits were no numbers.
    Token(Option<u32>),
}

impl Active {
    /// Its sequences: that of the prompt while it is read, those of its texts from then on.
    pub(super) fn sequences(&self) -> Vec<SequenceId> {
        self.reading.into_iter().chain(self.texts.iter().map(|text| text.sequence)).collect()
    }

    /// Tokens of the prompt that the next chunk has at most: it ends where the state is saved.
    pub(super) fn until_stop(&self) -> usize {
        let next = self.stops.iter().find(|stop| stop.at > self.read);
        next.map_or(usize::MAX, |stop| stop.at - self.read)
    }

    /// How the state is saved at the token that was read last, if it is.
    pub(super) fn stop_here(&self) -> Option<Rank> {
        let at_end = (self.read == self.job.request.prompt.len()).then_some(Rank::Kept);
        self.stops.iter().find(|stop| stop.at == self.read).map(|stop| stop.rank).or(at_end)
    }

    /// Has the prefill stop at one more place, because another request waits for the prefix up to there.
    pub(super) fn stop_at(&mut self, at: usize) {
        self.stops.retain(|stop| stop.at != at);
        self.stops.push(Stop { at, rank: Rank::Kept });
        self.stops.sort_unstable();
    }

    /// The next token of a text, from what a step gave.
    pub(super) fn go_on(&mut self, choice: usize, outcome: &Outcome) {
        self.texts[choice].pending.clear();
        match outcome {
            Outcome::Logits(logits) => self.choose(choice, logits),
            Outcome::Token(token) => self.drawn(choice, *token),
        }
    }

    /// The next token of a text, from its logits.
    fn choose(&mut self, choice: usize, logits: &[f32]) {
        let chosen = self.texts[choice].writer.choose(logits);
        self.tell(choice, chosen);
    }

    /// The next tokens of a text, from the logits of its last token and of drafted ones: each draft that is what the text draws anyway
    /// gives one more. Tells how many drafted tokens were.
    pub(super) fn verify(&mut self, choice: usize, source: Source, draft: &[u32], logits: &[f32]) -> usize {
        let vocab = logits.len() / (draft.len() + 1);
        let mut accepted = 0;
        self.texts[choice].drafts.add(source, draft.len());
        for logits in logits.chunks_exact(vocab) {
            self.choose(choice, logits);
            let text = &mut self.texts[choice];
            if !text.writer.is_writing() || draft.get(accepted) != Some(&text.next) {
                break;
            }
            accepted += 1;
            text.drafts.accept(source);
        }
        self.texts[choice].drafts.learn(source, draft.len(), accepted);
        accepted
    }

    /// The next token of a text, drawn on the device; `None` where the logits were no numbers.
    pub(super) fn drawn(&mut self, choice: usize, token: Option<u32>) {
        let writer = &mut self.texts[choice].writer;
        let chosen = match token {
            Some(token) => writer.take(token, None),
            None => Err(Error::NotANumber { token: self.job.request.prompt.len() + writer.made() }),
        };
        self.tell(choice, chosen);
    }

    pub(super) fn tell(&mut self, choice: usize, chosen: Result<Chosen, Error>) {
        let text = &mut self.texts[choice];
        match chosen {
            Ok(Chosen { token, text: certain, logprobs, end }) => {
                text.next = token;
                self.job.tell(Event::Token { choice, token, text: certain, logprobs });
                if let Some((rest, reason)) = end {
                    let usage = self.usage(choice);
                    self.job.tell(Event::End { choice, text: rest, reason, usage });
                }
            }
            Err(error) => {
                text.writer.stop();
                self.job.fail(error);
            }
        }
    }

    pub(super) fn end_all(&mut self, reason: &EndReason) {
        for choice in 0..self.job.request.choices {
            let over = self.texts.get(choice).is_some_and(|t| !t.writer.is_writing());
            if !over {
                let usage = self.usage(choice);
                self.job.tell(Event::End { choice, text: String::new(), reason: reason.clone(), usage });
            }
        }
    }

    pub(super) fn usage(&self, choice: usize) -> super::request::Usage {
        let first = self.first_token.unwrap_or_else(Instant::now);
        // Kernels that are compiled when they are first needed say nothing about how fast they are.
        let [began, read, now] = self.preparing;
        let drafts = self.texts.get(choice).map(|text| text.drafts).unwrap_or_default();
        super::request::Usage {
            drafted_tokens: drafts.drafted,
            accepted_tokens: drafts.accepted,
            predicted_tokens: drafts.predicted,
            accepted_predicted_tokens: drafts.accepted_predicted,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached,
            generated_tokens: self.texts.get(choice).map_or(0, |t| t.writer.made()),
            waiting: self.began.duration_since(self.job.came),
            reading: first.duration_since(self.began).saturating_sub(read.saturating_sub(began)),
            writing: first.elapsed().saturating_sub(now.saturating_sub(read)),
            preparing: now.saturating_sub(began),
        }
    }
}
