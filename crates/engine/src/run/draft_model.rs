//! Drafts of a second, smaller model with the same vocabulary. It has an engine and a KV cache of its own, drafts for all sequences of a step
//! together, and keeps the rows of tokens that were accepted. Nothing that it computes can change what the first model generates.

use std::collections::HashMap;
use std::time::Instant;

use kiln_kernels::sample::Row;

use super::acceptance::StepTimes;
use super::engine::{Engine, Entry, SequenceId, Wanted};
use super::writer::Draw;
use crate::Error;
use crate::model::Model;
use crate::tokenizer::Tokenizer;

/// Vocabularies may differ by so many tokens at their end: padding, and control tokens that were added later.
const MOST_DIFFERENT: usize = 128;

/// Tokens by whose probabilities a draft is judged, as llama.cpp does.
const JUDGED: usize = 10;

/// A model that drafts for another one.
pub struct DraftModel {
    engine: Engine,
    /// Its own sequences, by those that it drafts for.
    sequences: HashMap<SequenceId, SequenceId>,
    /// How long its steps take.
    times: StepTimes,
    /// Tokens that both models know.
    vocab: usize,
    /// What neither model goes on behind.
    ends: Vec<u32>,
}

/// A sequence that needs a draft.
pub(super) struct Ask {
    pub(super) sequence: SequenceId,
    /// Who may share the prefixes of its prompt.
    pub(super) owner: u64,
    /// All of its tokens, the last drawn one included.
    pub(super) tokens: Vec<u32>,
    /// How its tokens are drawn, where a device could do that: the draft draws alike.
    pub(super) draw: Option<Draw>,
    /// Tokens of the draft at most.
    pub(super) length: usize,
}

impl Ask {
    /// How the draft is drawn: as the sequence's own tokens are, with the same noise; else the likeliest token.
    pub(super) fn as_drawn(&self) -> Draw {
        self.draw.clone().unwrap_or(Draw { row: Row::default(), bias: Vec::new() })
    }
}

impl Engine {
    /// Has a smaller model draft for this one.
    pub fn draft_with(&mut self, draft: DraftModel) {
        self.draft = Some(Box::new(draft));
    }

    /// The model that drafts for this one.
    pub fn draft_model(&self) -> Option<&DraftModel> {
        self.draft.as_deref()
    }
}

/// A draft on the way.
struct Going {
    /// Whose, by its number among those that asked.
    ask: usize,
    /// The draft model's own sequence.
    own: SequenceId,
    /// Tokens that are fed next.
    tokens: Vec<u32>,
}

impl DraftModel {
    /// An engine that drafts for a model. Whether the two fit was asked before it was loaded ([`DraftModel::check`]).
    pub fn new(engine: Engine, target: &Model) -> Result<DraftModel, Error> {
        DraftModel::check(engine.model(), target)?;
        let vocab = engine.model().config.vocab.min(target.config.vocab);
        let ends = target.tokenizer.end_ids().to_vec();
        Ok(DraftModel { engine, sequences: HashMap::new(), times: StepTimes::default(), vocab, ends })
    }

    /// Whether a model can draft for another one: it generates text, token by token, and its tokens mean the same.
    pub fn check(draft: &Model, target: &Model) -> Result<(), Error> {
        let kind = |model: &Model| {
            let facts = &model.facts;
            match () {
                () if facts.encodes => Some("gives vectors of texts"),
                () if facts.fills => Some("fills in masks of a text"),
                () if facts.start.is_some() => Some("reads one text and writes another"),
                () => None,
            }
        };
        if let Some(what) = kind(target) {
            return Err(Error::Draft {
                why: format!("the model itself {what}, and drafts are for models that continue a text"),
                hint: "run it without a draft model",
            });
        }
        if let Some(what) = kind(draft) {
            return Err(Error::Draft {
                why: format!("the draft model {what}, it does not continue a text"),
                hint: "a draft model is a smaller one of the same family",
            });
        }
        same_vocabulary(&draft.tokenizer, &target.tokenizer)
    }

    /// Where it runs.
    pub fn describe(&self) -> String {
        self.engine.describe()
    }

    /// The engine, for whoever looks at its memory.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Gives back memory that only running takes.
    pub(super) fn rest(&mut self) {
        self.engine.rest();
    }

    /// Seconds that drafts of these lengths take; 0 before anybody can tell.
    pub(super) fn cost(&self, lengths: &[usize]) -> f64 {
        if !self.times.are_known() {
            return 0.0;
        }
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let of = |k: usize| lengths.iter().filter(|length| **length > k).count();
        // The first step takes in the token drawn last, and the last drafted one where that was right.
        let first = if longest > 0 { self.times.of(2 * of(0)) } else { 0.0 };
        first + (1..longest).map(|k| self.times.of(of(k))).sum::<f64>()
    }

    /// Tokens that it can draft behind so many.
    pub(super) fn room(&self, tokens: usize) -> usize {
        self.engine.context().saturating_sub(tokens)
    }

    /// Drafts for several sequences at once. One that has not caught up with its sequence yet gets none in this step; those whose target's
    /// sequence is closed are forgotten.
    pub(super) fn draft(
        &mut self,
        asks: &[Ask],
        is_open: impl Fn(SequenceId) -> bool,
        least_probability: f32,
    ) -> Result<Vec<Vec<u32>>, Error> {
        let closed: Vec<SequenceId> = self.sequences.keys().copied().filter(|id| !is_open(*id)).collect();
        closed.into_iter().for_each(|id| self.forget(id));
        let mut drafts = vec![Vec::new(); asks.len()];
        let mut going: Vec<Going> = Vec::new();
        let mut budget = self.engine.batch();
        for (at, ask) in asks.iter().enumerate() {
            if let Some((own, tokens)) = self.catch_up(ask, &mut budget)? {
                going.push(Going { ask: at, own, tokens });
            }
        }
        self.make_room(asks, &mut going);
        let mut marked = Vec::new();
        for round in 0.. {
            if going.is_empty() {
                break;
            }
            let drawn = self.step(asks, &going, least_probability)?;
            if round == 0 && self.engine.has_states() {
                // What was fed is certain; what is drafted is taken back, because a state cannot be shortened.
                for going in &going {
                    if self.engine.mark(going.own)? {
                        marked.push(going.own);
                    }
                }
                going.retain(|going| marked.contains(&going.own));
            }
            let mut next = Vec::with_capacity(going.len());
            for Going { ask, own, .. } in going {
                let Some(token) = drawn.get(&ask).copied().flatten() else { continue };
                drafts[ask].push(token);
                if drafts[ask].len() < asks[ask].length && !self.ends.contains(&token) {
                    next.push(Going { ask, own, tokens: vec![token] });
                }
            }
            going = next;
        }
        for id in marked {
            self.engine.go_back(id)?;
        }
        Ok(drafts)
    }

    /// Closes sequences until there are pages for the drafts: those that have no part in this step first, then the last of it.
    fn make_room(&mut self, asks: &[Ask], going: &mut Vec<Going>) {
        let lacks = |engine: &Engine, going: &[Going]| {
            let more = |going: &Going| going.tokens.len() + asks[going.ask].length;
            engine.room_for(going.iter().map(|going| engine.pages_to_feed(going.own, more(going))).sum()).is_err()
        };
        if lacks(&self.engine, going) {
            let others = self.sequences.keys().copied().filter(|id| asks.iter().all(|ask| ask.sequence != *id));
            others.collect::<Vec<_>>().into_iter().for_each(|id| self.forget(id));
        }
        while lacks(&self.engine, going)
            && let Some(last) = going.pop()
        {
            self.forget(asks[last.ask].sequence);
        }
    }

    /// Feeds what a sequence lacks, as far as the budget goes; gives its own sequence with the tokens that are still to be fed, or
    /// nothing where those do not fit into a step.
    fn catch_up(&mut self, ask: &Ask, budget: &mut usize) -> Result<Option<(SequenceId, Vec<u32>)>, Error> {
        let vocab = self.vocab;
        // What the draft model does not know, a picture for example, is any token to it.
        let tokens: Vec<u32> = ask.tokens.iter().map(|id| if (*id as usize) < vocab { *id } else { 0 }).collect();
        let own = match self.sequences.get(&ask.sequence) {
            Some(own) => *own,
            None => {
                let own = match self.engine.open(ask.owner) {
                    Ok(own) => own,
                    Err(Error::NoRoom { .. }) => return Ok(None),
                    Err(error) => return Err(error),
                };
                self.sequences.insert(ask.sequence, own);
                self.engine.reuse(own, &tokens)?;
                own
            }
        };
        let held = self.engine.tokens(own);
        let common = held.iter().zip(&tokens).take_while(|(a, b)| a == b).count().min(tokens.len() - 1);
        if common < held.len() {
            let back = if self.engine.has_states() { 0 } else { common };
            if self.engine.truncate(own, back).is_err() {
                self.engine.truncate(own, 0)?;
            }
        }
        let rest = &tokens[self.engine.length(own)..];
        if rest.len() <= *budget {
            *budget -= rest.len();
            return Ok(Some((own, rest.to_vec())));
        }
        let piece = &rest[..std::mem::take(budget)];
        if !piece.is_empty() && self.engine.room_for(self.engine.pages_to_feed(own, piece.len())).is_ok() {
            self.engine.feed(&[Entry { sequence: own, tokens: piece, wanted: Wanted::Nothing }])?;
        }
        Ok(None)
    }

    /// One step: the next token of each draft; none where it ends.
    fn step(
        &mut self,
        asks: &[Ask],
        going: &[Going],
        least_probability: f32,
    ) -> Result<HashMap<usize, Option<u32>>, Error> {
        let entries: Vec<Entry<'_>> = going
            .iter()
            .map(|going| Entry { sequence: going.own, tokens: &going.tokens, wanted: Wanted::Last })
            .collect();
        let draws: Vec<Draw> = going.iter().map(|going| self.draw_of(&asks[going.ask])).collect();
        let (start, before) = (Instant::now(), self.engine.work.preparing);
        let drawn: Vec<Option<u32>> = if least_probability > 0.0 || !self.engine.draws_beside_prompts() {
            let positions: Vec<usize> =
                entries.iter().map(|entry| self.engine.length(entry.sequence) + entry.tokens.len() - 1).collect();
            let logits = self.engine.feed(&entries)?;
            let choose = |((draw, position), mut logits): ((&Draw, usize), Vec<f32>)| {
                logits.truncate(self.vocab);
                let mut sure = logits.clone();
                draw.favour(&mut sure);
                let token = draw.token(position, &mut logits)?;
                (probability(&sure, token) >= least_probability).then_some(token)
            };
            draws.iter().zip(positions).zip(logits).map(choose).collect()
        } else {
            let draws: Vec<Option<Draw>> = draws.into_iter().map(Some).collect();
            self.engine.feed_drawing(&entries, &draws)?
        };
        let rows = entries.iter().map(|entry| entry.tokens.len()).sum();
        let took = start.elapsed().saturating_sub(self.engine.work.preparing.saturating_sub(before));
        if rows <= 4 * going.len() {
            // Prompts are another matter.
            self.times.learn(rows, took.as_secs_f64());
        }
        let known = |token: &u32| (*token as usize) < self.vocab;
        Ok(going.iter().zip(drawn).map(|(going, token)| (going.ask, token.filter(known))).collect())
    }

    /// How the draft of a sequence is drawn.
    fn draw_of(&self, ask: &Ask) -> Draw {
        let mut draw = ask.as_drawn();
        draw.bias.retain(|(id, _)| (*id as usize) < self.vocab);
        draw
    }

    fn forget(&mut self, sequence: SequenceId) {
        if let Some(own) = self.sequences.remove(&sequence) {
            self.engine.close(own);
        }
    }
}

/// The probability of a token among the likeliest ones.
pub(super) fn probability(logits: &[f32], token: u32) -> f32 {
    let mut best: Vec<f32> = logits.iter().copied().filter(|logit| !logit.is_nan()).collect();
    let kept = JUDGED.min(best.len());
    if kept == 0 {
        return 0.0;
    }
    best.select_nth_unstable_by(kept - 1, |a, b| b.total_cmp(a));
    let top = &best[..kept];
    let most = top.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = top.iter().map(|logit| (logit - most).exp()).sum();
    logits.get(token as usize).map_or(0.0, |logit| (logit - most).exp() / sum)
}

/// Refuses a draft model whose tokens are others, with the first difference.
fn same_vocabulary(draft: &Tokenizer, target: &Tokenizer) -> Result<(), Error> {
    let hint = "use a draft model of the same family; drafts by lookup need none";
    let (have, want) = (draft.n_tokens(), target.n_tokens());
    if have.abs_diff(want) > MOST_DIFFERENT {
        let why = format!("it has {have} tokens in its vocabulary and the model has {want}");
        return Err(Error::Draft { why, hint });
    }
    let spelling = |tokenizer: &Tokenizer, id: u32| {
        tokenizer.spelling(id).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    };
    for id in 0..have.min(want) as u32 {
        if draft.spelling(id) != target.spelling(id) {
            let (ours, theirs) = (spelling(draft, id), spelling(target, id));
            let why = format!("token {id} is {ours:?} there and {theirs:?} in the model");
            return Err(Error::Draft { why, hint });
        }
    }
    Ok(())
}
