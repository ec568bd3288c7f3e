//! Drafts of the head in the model's own file ([`crate::blocks::draft_head`]): each step reads one token of each sequence with the state that
//! the step before handed on, the first one with the state that the model had. The head's keys and values lie in the sequence's own pages.

use std::time::Instant;

use super::acceptance::StepTimes;
use super::batch::{Carry, Inputs, Taken};
use super::cache::Runs;
use super::draft_model::{Ask, probability};
use super::draw::End;
use super::engine::{Engine, Ready, SequenceId};
use super::shapes;
use super::writer::Draw;
use crate::Error;

/// What is known of the head of a model.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HeadTimes {
    /// How long its steps take.
    times: StepTimes,
}

impl HeadTimes {
    /// Seconds that drafts of these lengths take; 0 before a step was timed.
    pub(super) fn cost(&self, lengths: &[usize]) -> f64 {
        if !self.times.are_known() {
            return 0.0;
        }
        let longest = lengths.iter().copied().max().unwrap_or(0);
        (0..longest).map(|k| self.times.of(lengths.iter().filter(|length| **length > k).count())).sum()
    }
}

/// Tokens of a sequence that the head reads in one step.
struct Reads {
    sequence: SequenceId,
    /// The position of the first of them.
    start: usize,
    tokens: Vec<u32>,
    runs: Runs,
}

impl Engine {
    /// Whether the model has a head that drafts tokens, and it was read.
    pub fn drafts(&self) -> bool {
        self.model().facts.drafts
    }

    /// Whether the model has a head that can draft for a sequence. Where pictures shift positions, it cannot.
    pub(super) fn has_head_for(&self, id: SequenceId) -> bool {
        let is_text = self.sequences.get(&id).is_some_and(|s| s.spans.is_empty() && !s.lost_pictures);
        self.drafts() && is_text
    }

    /// Drafts for several sequences at once; those behind tokens of low probability are cut.
    pub(super) fn draft_by_head(&mut self, asks: &[Ask], least_probability: f32) -> Result<Vec<Vec<u32>>, Error> {
        let mut drafts = vec![Vec::new(); asks.len()];
        let mut going = Vec::with_capacity(asks.len());
        for (at, ask) in asks.iter().enumerate() {
            let start = self.length(ask.sequence);
            let tokens = ask.tokens[start..].to_vec();
            self.make_room(ask.sequence, tokens.len() + ask.length)?;
            going.push((at, Reads { sequence: ask.sequence, start, tokens, runs: Runs::Head }));
        }
        while !going.is_empty() {
            let (start, before) = (Instant::now(), self.work.preparing);
            let draws: Vec<Draw> = going.iter().map(|(at, _)| asks[*at].as_drawn()).collect();
            let reads: Vec<&Reads> = going.iter().map(|(_, reads)| reads).collect();
            let drawn = match self.head_draws(&reads, &draws, least_probability) {
                Err(wrong @ (Error::Stalled | Error::OutOfRange)) => {
                    // The next draft goes the slower way.
                    self.recover(&wrong, std::iter::empty())?;
                    break;
                }
                drawn => drawn?,
            };
            let took = start.elapsed().saturating_sub(self.work.preparing.saturating_sub(before));
            self.head.times.learn(reads.iter().map(|reads| reads.tokens.len()).sum(), took.as_secs_f64());
            let mut next = Vec::with_capacity(going.len());
            for ((at, reads), token) in going.into_iter().zip(drawn) {
                let Some(token) = token else { continue };
                drafts[at].push(token);
                let is_end = self.model().tokenizer.end_ids().contains(&token);
                if drafts[at].len() < asks[at].length && !is_end {
                    let start = reads.start + reads.tokens.len();
                    next.push((at, Reads { start, tokens: vec![token], runs: Runs::HeadAgain, ..reads }));
                }
            }
            going = next;
        }
        Ok(drafts)
    }

    /// The logits that the head gives behind the tokens of a sequence, `next`, and each of `follow` in turn: for measuring heads.
    pub fn head_logits(&mut self, id: SequenceId, next: u32, follow: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        self.usable(id)?;
        if !self.has_head_for(id) {
            return Err(Error::NoSequence { why: "the model has no head that drafts for it" });
        }
        let start = self.length(id);
        self.make_room(id, follow.len() + 1)?;
        let mut all = Vec::with_capacity(follow.len() + 1);
        for (at, token) in std::iter::once(next).chain(follow.iter().copied()).enumerate() {
            let runs = if at == 0 { Runs::Head } else { Runs::HeadAgain };
            let reads = Reads { sequence: id, start: start + at, tokens: vec![token], runs };
            let (ready, rows) = self.enter_head(&[&reads], End::Draft)?;
            self.executor.run(ready.plan)?;
            all.push(self.head_row(ready, rows[0])?);
        }
        Ok(all)
    }

    /// One step of the head: the token that each sequence would draw, if it is probable enough.
    fn head_draws(
        &mut self,
        reads: &[&Reads],
        draws: &[Draw],
        least_probability: f32,
    ) -> Result<Vec<Option<u32>>, Error> {
        let vocab = self.model().config.vocab;
        let position = |reads: &Reads| reads.start + reads.tokens.len() - 1;
        if least_probability > 0.0 || !self.draws_beside_prompts() {
            let (ready, rows) = self.enter_head(reads, End::Draft)?;
            self.executor.run(ready.plan)?;
            let mut drawn = Vec::with_capacity(reads.len());
            for ((reads, draw), row) in reads.iter().zip(draws).zip(rows) {
                let mut logits = self.head_row(ready, row)?;
                let mut sure = logits.clone();
                draw.favour(&mut sure);
                let token = draw.token(position(reads), &mut logits);
                drawn.push(token.filter(|token| probability(&sure, *token) >= least_probability));
            }
            return Ok(drawn);
        }
        let cuts = draws.iter().any(|draw| draw.row.cuts());
        let (ready, rows) = self.enter_head(reads, End::DraftTokens { cuts })?;
        let tokens = ready.tokens.expect("a plan that draws should have been asked for");
        let mut positions = vec![-1i32; tokens.positions.len()];
        reads.iter().zip(&rows).for_each(|(reads, row)| positions[*row] = super::batch::position(position(reads)));
        self.executor.write(ready.plan, &tokens.positions, bytemuck::cast_slice(&positions))?;
        let settings = rows.iter().zip(draws).map(|(row, draw)| (*row, &draw.row, &draw.bias[..]));
        tokens.settings.write(&mut *self.executor, ready.plan, settings)?;
        self.executor.run(ready.plan)?;
        let mut drawn = vec![-1i32; tokens.token.len()];
        self.executor.read(ready.plan, &tokens.token, bytemuck::cast_slice_mut(&mut drawn))?;
        let known = |row: &usize| u32::try_from(drawn[*row]).ok().filter(|token| (*token as usize) < vocab);
        Ok(rows.iter().map(known).collect())
    }

    /// The logits of one row.
    fn head_row(&mut self, ready: Ready, row: usize) -> Result<Vec<f32>, Error> {
        let mut logits = vec![0.0f32; ready.ports.logits.shape[0]];
        let part = ready.ports.logits.narrow(1, row, 1);
        self.executor.read(ready.plan, &part, bytemuck::cast_slice_mut(&mut logits))?;
        Ok(logits)
    }

    /// Writes what a step of the head needs: every token is a row of its own. Gives the row of the last token of each sequence.
    fn enter_head(&mut self, reads: &[&Reads], end: End) -> Result<(Ready, Vec<usize>), Error> {
        let rows = reads.iter().map(|reads| reads.tokens.len()).sum();
        let shape = shapes::shape([rows, 0, 0], false, self.executor.takes_any_shape());
        let ready = self.prepared((shape, end, false))?;
        let mut taken = Vec::with_capacity(rows);
        let mut last = Vec::with_capacity(reads.len());
        for Reads { sequence, start, tokens, runs } in reads {
            let cache = &self.sequence(*sequence)?.cache;
            let end = start + tokens.len();
            let carry = cache.carried.map(|carried| Carry { carried, runs: *runs, start: *start, end });
            for (at, token) in tokens.iter().enumerate() {
                let (tokens, start) = (std::slice::from_ref(token), start + at);
                taken.push(Taken {
                    tokens,
                    start,
                    tables: &cache.tables,
                    encoder: None,
                    state: None,
                    first: false,
                    carry,
                });
            }
            last.push(taken.len() - 1);
        }
        let inputs = Inputs::new(&shape, &ready.ports, &taken, &[]);
        for (tensor, bytes) in inputs.bytes() {
            self.executor.write(ready.plan, tensor, bytes)?;
        }
        Ok((ready, last))
    }
}
