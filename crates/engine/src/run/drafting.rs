//! Steps with drafts: which sequences get one, of whom, and what stays of it.

use std::borrow::Cow;

use super::acceptance::{self, Acceptance, Candidate, StepTimes};
use super::active::Outcome;
use super::draft_model::Ask;
use super::engine::{SequenceId, Wanted};
use super::load::DRAFT_SOURCES;
use super::lookup::{self, Lookup, Place};
use super::part::Part;
use super::schedule::Schedule;

/// With more sequences in a step its rows already share the weights.
const MOST_SEQUENCES: usize = 16;

/// Tokens that a sequence takes in again, because its state went back, before it has another draft.
const MOST_PENDING: usize = 8;

/// Who drafted: [`DRAFT_SOURCES`] names them in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The rule that the output keeps to allows nothing else.
    Rule,
    /// Whoever asks predicts it.
    Prediction,
    /// It stands in the sequence already.
    Lookup,
    /// Another model.
    Model,
    /// The head in the model's own file.
    Head,
}

impl Source {
    /// Whether it makes drafts of any length, each token at a cost.
    fn computes(self) -> bool {
        matches!(self, Source::Model | Source::Head)
    }
}

/// Number of sources.
const SOURCES: usize = DRAFT_SOURCES.len();

/// Whether the head in the model's file drafts, where that was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Heads {
    /// Where measured times say that it pays, and no device runs ahead: on the CPU.
    #[default]
    Auto,
    /// Wherever measured times say that it pays.
    On,
    /// Never.
    Off,
}

/// How a model drafts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftLimits {
    /// Tokens of a draft at most.
    pub most: usize,
    /// A shorter draft is not used.
    pub least: usize,
    /// A draft ends before a token that its model finds less probable.
    pub least_probability: f32,
    /// Drafts whatever steps cost, as long as drafts are accepted.
    pub always: bool,
}

/// Lengths of drafts of models: each is a shape of its own, and a step more of the draft model.
const MODEL_LENGTHS: [usize; 10] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16];

impl Default for DraftLimits {
    fn default() -> DraftLimits {
        DraftLimits { most: MODEL_LENGTHS[MODEL_LENGTHS.len() - 1], least: 0, least_probability: 0.0, always: false }
    }
}

/// How the drafts of one sequence have fared.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Drafts {
    acceptance: [Acceptance; SOURCES],
    /// Where lookup found the last draft.
    place: Option<Place>,
    /// Tokens that were drafted and accepted in all.
    pub(super) drafted: usize,
    pub(super) accepted: usize,
    /// Those of them that were predicted.
    pub(super) predicted: usize,
    pub(super) accepted_predicted: usize,
}

impl Drafts {
    /// So many tokens were drafted.
    pub(super) fn add(&mut self, source: Source, drafted: usize) {
        self.drafted += drafted;
        self.predicted += if source == Source::Prediction { drafted } else { 0 };
    }

    /// One of them was right.
    pub(super) fn accept(&mut self, source: Source) {
        self.accepted += 1;
        self.accepted_predicted += usize::from(source == Source::Prediction);
    }

    /// So many tokens were drafted, and so many of them were right.
    pub(super) fn learn(&mut self, source: Source, drafted: usize, accepted: usize) {
        self.acceptance[source as usize].learn(drafted, accepted);
    }
}

/// A draft that a sequence could have.
struct Guess {
    source: Source,
    /// Its tokens, where they are known already.
    tokens: Vec<u32>,
    /// Its length at most.
    most: usize,
}

impl Schedule {
    /// Whether lookup drafts.
    fn looks_up(&self) -> bool {
        match self.policy.lookup {
            Lookup::Off => false,
            Lookup::On => true,
            // A device that pads runs ahead by itself: what a draft costs there has not been measured.
            Lookup::Auto => !self.engine.pads(),
        }
    }

    /// Who computes drafts for a sequence of so many tokens, and how many at most.
    fn computes(&self, id: SequenceId, length: usize) -> Option<(Source, usize)> {
        if let Some(model) = &self.engine.draft {
            return Some((Source::Model, model.room(length))).filter(|(_, room)| *room > 0);
        }
        let wanted = match self.policy.heads {
            Heads::Off => false,
            Heads::On => true,
            // As with lookup: what a draft costs a device that runs ahead has not been measured.
            Heads::Auto => !self.engine.pads(),
        };
        let room = self.engine.context().saturating_sub(length);
        (wanted && room > 0 && self.engine.has_head_for(id)).then_some((Source::Head, room))
    }

    /// What could be drafted for a sequence.
    fn guess(&mut self, at: usize, choice: usize) -> Option<Guess> {
        let looks_up = self.looks_up();
        let active = &mut self.active[at];
        let (prompt, most_drafted) = (active.job.request.prompt.len(), active.job.request.most_drafted);
        let text = &mut active.texts[choice];
        let room = self.engine.revocable(text.sequence, text.pending.len() + 1);
        let most = text.writer.left().saturating_sub(1).min(room).min(most_drafted);
        if most == 0 || text.pending.len() > MOST_PENDING {
            return None;
        }
        let guess = |source, tokens: &[u32]| {
            let tokens = tokens[..tokens.len().min(most)].to_vec();
            (!tokens.is_empty()).then_some(Guess { source, most: tokens.len(), tokens })
        };
        if let Some(guess) = guess(Source::Rule, &text.writer.forced()) {
            return Some(guess);
        }
        let held = self.engine.tokens(text.sequence);
        let held: Cow<'_, [u32]> =
            if text.pending.is_empty() { held.into() } else { [held, &text.pending].concat().into() };
        let longest = most.min(lookup::LENGTHS[lookup::LENGTHS.len() - 1]);
        if let Some(prediction) = &active.job.request.prediction
            && let Some(behind) = held.get(prompt..)
            && let Some(guess) = {
                let generated = [behind, &[text.next]].concat();
                guess(Source::Prediction, lookup::predicted(prediction, &generated, longest))
            }
        {
            return Some(guess);
        }
        let place = text.drafts.place;
        let found = if looks_up { lookup::draft(&held, text.next, longest, place) } else { None };
        text.drafts.place = found.map(|(place, _)| place).or(place);
        let found = found.and_then(|(_, found)| guess(Source::Lookup, found));
        let (sequence, length) = (text.sequence, held.len() + 1);
        let computed = self.computes(sequence, length);
        let text = &self.active[at].texts[choice];
        let rate = |source: Source| text.drafts.acceptance[source as usize].rate();
        let lookup = rate(Source::Lookup);
        match (found, computed) {
            (Some(found), None) => Some(found),
            (Some(found), Some((source, _))) if lookup >= 0.5 || lookup >= rate(source) => Some(found),
            (_, Some((source, room))) => {
                let most = most.min(self.policy.draft.most).min(room);
                (most > 0).then_some(Guess { source, tokens: Vec::new(), most })
            }
            (None, None) => None,
        }
    }

    /// What could be drafted for each sequence, cut to the lengths with which a step gives the most tokens a second.
    fn guesses(&mut self, texts: &[(usize, usize)]) -> Vec<Option<Guess>> {
        if texts.len() > MOST_SEQUENCES {
            return texts.iter().map(|_| None).collect();
        }
        let mut guesses: Vec<Option<Guess>> = texts.iter().map(|(at, choice)| self.guess(*at, *choice)).collect();
        if guesses.iter().all(Option::is_none) {
            return guesses;
        }
        // Whoever turns drafts on has them by their acceptance alone.
        let always = self.policy.lookup == Lookup::On || self.policy.draft.always;
        let times = if always { StepTimes::default() } else { self.times };
        let drafts = |at: usize| &self.active[texts[at].0].texts[texts[at].1].drafts;
        let candidate = |(at, guess): (usize, &Option<Guess>)| {
            let Some(guess) = guess else {
                return Candidate { acceptance: Acceptance::default(), lengths: &[], most: 0 };
            };
            let lengths: &[usize] = if guess.source.computes() { &MODEL_LENGTHS } else { &lookup::LENGTHS };
            Candidate { acceptance: drafts(at).acceptance[guess.source as usize], lengths, most: guess.most }
        };
        let candidates: Vec<Candidate<'_>> = guesses.iter().enumerate().map(candidate).collect();
        let computed = |guess: &Option<Guess>| guess.as_ref().is_some_and(|guess| guess.source.computes());
        let cost = |lengths: &[usize]| {
            if !times.are_known() {
                return 0.0;
            }
            let lengths = lengths.iter().zip(&guesses).filter(|(length, guess)| **length > 0 && computed(guess));
            let lengths: Vec<usize> = lengths.map(|(length, _)| *length).collect();
            match &self.engine.draft {
                Some(model) => model.cost(&lengths),
                None => self.engine.head.cost(&lengths),
            }
        };
        let rows = texts.iter().map(|(at, choice)| 1 + self.active[*at].texts[*choice].pending.len()).sum();
        let lengths = acceptance::lengths(&candidates, rows, &times, cost);
        for ((guess, length), (at, choice)) in guesses.iter_mut().zip(lengths).zip(texts) {
            let Some(some) = guess else { continue };
            if length == 0 {
                self.active[*at].texts[*choice].drafts.acceptance[some.source as usize].pass();
                *guess = None;
            } else {
                some.tokens.truncate(length);
                some.most = length;
            }
        }
        guesses
    }

    /// Whether a sequence of the run-ahead decode has a draft: then the host makes the next step.
    pub(super) fn has_drafts_ahead(&mut self) -> bool {
        let texts = self.ahead.clone().unwrap_or_default();
        self.guesses(&texts).iter().any(Option::is_some)
    }

    /// Adds drafts to a step without prompts, where there are pages for them. Tells whether any were wanted.
    pub(super) fn add_drafts(&mut self, batch: &mut [Part]) -> bool {
        let texts: Vec<_> = batch.iter().filter_map(|part| part.choice.map(|choice| (part.active, choice))).collect();
        if texts.is_empty() || texts.len() < batch.len() {
            return false;
        }
        let mut guesses = self.guesses(&texts);
        if guesses.iter().all(Option::is_none) {
            return false;
        }
        let length = |guess: &Option<Guess>| guess.as_ref().map_or(0, |guess| guess.most);
        let rows =
            batch.iter().map(|part| part.tokens.len()).sum::<usize>() + guesses.iter().map(length).sum::<usize>();
        let pages = |(part, guess): (&Part, &Option<Guess>)| {
            self.engine.pages_to_feed(part.sequence, part.tokens.len() + length(guess))
        };
        let needed = batch.iter().zip(&guesses).map(pages).sum();
        if rows > self.engine.batch() || self.engine.room_for(needed).is_err() {
            return true;
        }
        self.compute(batch, &mut guesses);
        for (part, guess) in batch.iter_mut().zip(guesses) {
            let Some(Guess { source, tokens, .. }) = guess.filter(|guess| !guess.tokens.is_empty()) else { continue };
            // A state cannot be shortened: a copy of it is the way back.
            if self.engine.has_states() && !self.engine.mark(part.sequence).unwrap_or(false) {
                continue;
            }
            part.draft = Some((source, tokens.len()));
            part.tokens.extend(tokens);
            part.wanted = Wanted::All;
        }
        true
    }

    /// Has the draft model or the head fill in the drafts that it is to make.
    fn compute(&mut self, batch: &[Part], guesses: &mut [Option<Guess>]) {
        let wanted = |guess: &Option<Guess>| guess.as_ref().is_some_and(|guess| guess.source.computes());
        let wanting: Vec<usize> = (0..guesses.len()).filter(|at| wanted(&guesses[*at])).collect();
        if wanting.is_empty() {
            return;
        }
        let ask = |at: &usize| {
            let part = &batch[*at];
            let active = &self.active[part.active];
            let tokens = [self.engine.tokens(part.sequence), &part.tokens].concat();
            let length = guesses[*at].as_ref().map_or(0, |guess| guess.most);
            let draw = part.choice.and_then(|choice| active.texts[choice].writer.draw()).cloned();
            Ask { sequence: part.sequence, owner: active.job.request.owner, tokens, draw, length }
        };
        let asks: Vec<Ask> = wanting.iter().map(ask).collect();
        let limits = self.policy.draft;
        let drafts = match self.engine.draft.take() {
            Some(mut model) => {
                let drafts = model.draft(&asks, |id| self.engine.is_open(id), limits.least_probability);
                // Without its drafts everything is as it was, only slower.
                let drafts = drafts.inspect_err(|error| log::warn!("the draft model is given up: {error}"));
                self.engine.draft = drafts.is_ok().then_some(model);
                drafts
            }
            None => {
                let drafts = self.engine.draft_by_head(&asks, limits.least_probability);
                drafts.inspect_err(|error| {
                    log::warn!("the model's head drafts no more: {error}");
                    self.policy.heads = Heads::Off;
                })
            }
        };
        for (at, draft) in wanting.into_iter().zip(drafts.unwrap_or_default()) {
            if let Some(guess) = &mut guesses[at]
                && draft.len() >= limits.least
            {
                guess.tokens = draft;
            }
        }
    }

    /// Tells the tokens of a sequence that a step with a draft gave, and takes back what was drafted wrongly.
    pub(super) fn verify(&mut self, part: &Part, choice: usize, outcome: &Outcome) {
        let (Outcome::Logits(logits), Some((source, drafted))) = (outcome, part.draft) else {
            unreachable!("all logits of a draft are wanted")
        };
        let certain = part.tokens.len() - drafted;
        let vocab = logits.len() / part.tokens.len();
        let draft = &part.tokens[certain..];
        let active = &mut self.active[part.active];
        let accepted = active.verify(choice, source, draft, &logits[(certain - 1) * vocab..]);
        self.tally.drafts.note(source as usize, drafted, accepted);
        let text = &mut active.texts[choice];
        text.pending.clear();
        let went_back = match (self.engine.has_states(), accepted == drafted) {
            (true, true) => {
                self.engine.unmark(part.sequence);
                Ok(())
            }
            (true, false) => {
                text.pending.extend_from_slice(&part.tokens[..certain + accepted]);
                self.engine.go_back(part.sequence)
            }
            (false, _) => {
                let length = self.engine.length(part.sequence) - (drafted - accepted);
                self.engine.truncate(part.sequence, length)
            }
        };
        if let Err(error) = went_back {
            text.writer.stop();
            active.job.fail(error.again());
            self.note(&error);
        }
    }
}
