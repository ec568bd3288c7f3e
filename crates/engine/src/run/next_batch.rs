//! What the next step computes: which sequences decode, and how many tokens of which prompts are prefilled beside them. Sequences make room
//! for each other where pages are short.

use super::engine::{SequenceId, Wanted};
use super::part::Part;
use super::places::uncut;
use super::schedule::Schedule;
use super::shapes;
use crate::Error;

/// Prompt tokens that a step takes at least, however slow the device is: fewer would not be worth a step.
const LEAST_CHUNK: usize = 32;

impl Schedule {
    /// The parts of the next step: a token of each decoding sequence, and chunks of prompts.
    pub(super) fn batch(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        for (at, active) in self.active.iter().enumerate() {
            for (choice, text) in active.texts.iter().enumerate() {
                if text.writer.is_writing() && !self.engine.is_swapped(text.sequence) {
                    let (sequence, tokens) = (text.sequence, [&text.pending[..], &[text.next]].concat());
                    let choice = Some(choice);
                    parts.push(Part { active: at, choice, sequence, tokens, wanted: Wanted::Last, draft: None });
                }
            }
        }
        let writing = parts.len();
        let mut reading: Vec<(usize, usize)> = self
            .active
            .iter()
            .enumerate()
            .filter(|(_, a)| a.reading.is_some_and(|id| !self.engine.is_swapped(id)))
            .map(|(at, a)| (a.job.request.prompt.len() - a.read, at))
            .collect();
        let mut budget = self.budget(writing, reading.len());
        // The request that has waited longest gets half of the budget, short prompts get the rest.
        if let Some(oldest) = reading.iter().position(|(_, at)| Some(*at) == reading.iter().map(|(_, at)| *at).min()) {
            let oldest = reading.remove(oldest);
            reading.sort_unstable();
            let half = if reading.is_empty() { budget } else { budget.div_ceil(2) };
            self.add_chunk(&mut parts, oldest, half.max(1), &mut budget);
        }
        for prompt in reading {
            self.add_chunk(&mut parts, prompt, usize::MAX, &mut budget);
        }
        self.make_room(parts)
    }

    /// Adds a chunk of a prompt, at most `share` tokens.
    fn add_chunk(&self, parts: &mut Vec<Part>, (left, at): (usize, usize), share: usize, budget: &mut usize) {
        let active = &self.active[at];
        let Some(sequence) = active.reading else { return };
        let tokens = left.min(share).min(*budget).min(active.until_stop());
        if tokens == 0 {
            return;
        }
        let tokens = uncut(&active.job.request.spans, active.read, active.read + tokens) - active.read;
        *budget = budget.saturating_sub(tokens);
        let wanted = if tokens == left { Wanted::Last } else { Wanted::Nothing };
        let tokens = active.job.request.prompt[active.read..active.read + tokens].to_vec();
        parts.push(Part { active: at, choice: None, sequence, tokens, wanted, draft: None });
    }

    /// Prompt tokens of the next step. If no other request would wait, as many as the engine takes at once.
    pub(super) fn budget(&self, writing: usize, reading: usize) -> usize {
        let most = self.engine.batch().max(1);
        let time = match self.policy.alone {
            // Before anything was read, nobody knows how much is too much.
            alone if writing == 0 && reading <= 1 && self.waiting.is_empty() => {
                alone.filter(|_| self.rate.has_learnt())
            }
            _ => Some(self.policy.stutter),
        };
        let rows = time.map_or(most, |time| self.rate.rows_in(time, most, writing));
        // Where the engine pads, a chunk ends where its shape is full: the rows behind that would be computed for nothing.
        let tokens = if self.engine.pads() { shapes::full_beside(writing, rows) } else { rows.saturating_sub(writing) };
        tokens.max(LEAST_CHUNK.min(most))
    }

    /// Takes parts out until the pages suffice for the rest: chunks of prompts first, then sequences are swapped out, prompts before others and
    /// the youngest first.
    fn make_room(&mut self, mut parts: Vec<Part>) -> Vec<Part> {
        loop {
            let needed = parts.iter().map(|p| self.engine.pages_to_feed(p.sequence, p.tokens.len())).sum();
            if self.engine.room_for(needed).is_ok() {
                return parts;
            }
            if let Some(at) = parts.iter().rposition(|p| p.choice.is_none())
                && parts.len() > 1
            {
                parts.remove(at);
                continue;
            }
            // Prompts that were taken out keep the pages of what was computed of them.
            if let Some(reader) = self.youngest_reader_beside(&parts)
                && self.swap_out(reader)
            {
                continue;
            }
            let youngest = (0..parts.len()).max_by_key(|i| (self.active[parts[*i].active].number, parts[*i].choice));
            let Some(youngest) = youngest else { return parts };
            let part = parts.remove(youngest);
            if parts.is_empty() || !self.swap_out(part.sequence) {
                // No sequence is left that could make room: the request fails.
                self.end_for_want_of_room(&part);
                parts.retain_mut(|p| p.active != part.active);
            }
        }
    }

    /// The youngest of the prompts that hold pages and are not among these parts.
    fn youngest_reader_beside(&self, parts: &[Part]) -> Option<SequenceId> {
        let readers = self.active.iter().filter_map(|a| a.reading.map(|id| (a.number, id)));
        let holds = |id: SequenceId| !self.engine.is_swapped(id) && self.engine.bytes_of(id) > 0;
        let beside = readers.filter(|(_, id)| holds(*id) && parts.iter().all(|part| part.sequence != *id));
        beside.max_by_key(|(number, _)| *number).map(|(_, id)| id)
    }

    fn swap_out(&mut self, id: SequenceId) -> bool {
        if self.engine.swapped_bytes() + self.engine.bytes_of(id) > self.policy.swap_bytes {
            return false;
        }
        if let Err(error) = self.engine.swap_out(id) {
            self.note(&error);
            return false;
        }
        self.tally.swaps += 1;
        true
    }

    fn end_for_want_of_room(&mut self, part: &Part) {
        let wanted = self.engine.pages_to_feed(part.sequence, part.tokens.len());
        let error = match (&self.lost, self.engine.room_for(wanted)) {
            (Some(why), _) => Error::Lost { why: why.clone() },
            (None, Err(error)) => error,
            (None, Ok(())) => Error::NoSequence {
                why: "it had to make room for others, and the host memory for such texts is used up",
            },
        };
        // Indices of other parts stay valid: the request leaves when the next step begins.
        self.active[part.active].job.fail(error);
    }
}
