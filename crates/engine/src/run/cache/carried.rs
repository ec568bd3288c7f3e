//! States of the last tokens of each sequence, kept on the device for the model's draft head. They lie in a ring, so that the state of an
//! accepted token is there whatever was drafted behind it. A sequence without one drafts worse, and writes the same.

use std::ops::Range;

use super::layout::Layout;
use crate::arch::{CARRIED, CARRIED_TOKENS};
use crate::executor;

/// What is kept of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Carried {
    /// Which ring.
    slot: u32,
    /// The state of token `q` lies at place `(q + shift) % CARRIED_TOKENS`.
    shift: usize,
    /// States are kept of `count` tokens before this one.
    end: usize,
    count: usize,
}

/// Who runs a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runs {
    /// The model.
    Model,
    /// The model, step after step with the same inputs: each step finds the state where the one before left it.
    Ahead,
    /// The draft head, behind states of the model.
    Head,
    /// The draft head, behind its own.
    HeadAgain,
}

impl Carried {
    pub(super) fn new(slot: u32, length: usize) -> Carried {
        Carried { slot, shift: 0, end: length, count: 0 }
    }

    pub(super) fn slot(&self) -> u32 {
        self.slot
    }

    /// The same in another ring that holds the same.
    pub(super) fn moved(self, slot: u32) -> Carried {
        Carried { slot, ..self }
    }

    /// Where the state of a token is or will be.
    fn row(&self, token: usize) -> usize {
        self.slot as usize * CARRIED + (token + self.shift) % CARRIED_TOKENS
    }

    /// Whether the state is kept that the token at `position` is read with.
    pub(crate) fn precedes(&self, position: usize) -> bool {
        (self.end - self.count + 1..=self.end).contains(&position)
    }

    /// The rows of kept states that the token at `position` reads and writes, one of `fed`: others of these before it were kept.
    pub(crate) fn rows(&self, runs: Runs, position: usize, fed: Range<usize>) -> [Option<usize>; 2] {
        let Range { start, end } = fed;
        let before = (self.precedes(position) || position > start).then(|| self.row(position - 1));
        let handed_on = self.slot as usize * CARRIED + CARRIED_TOKENS;
        let is_last = position + 1 == end;
        match runs {
            Runs::Model => [before, (position + CARRIED_TOKENS >= end).then(|| self.row(position))],
            Runs::Ahead => [before, before],
            Runs::Head => [before, is_last.then_some(handed_on)],
            Runs::HeadAgain => [Some(handed_on), is_last.then_some(handed_on)],
        }
    }

    /// Tokens from `start` on went through the model.
    pub(super) fn fed(&mut self, start: usize, tokens: usize) {
        let first = self.end - self.count;
        let first = if (first..=self.end).contains(&start) { first } else { start };
        self.end = start + tokens;
        self.count = (self.end - first).min(CARRIED_TOKENS);
    }

    /// One more token went through the model in a step that found its state where the one before left it.
    pub(super) fn fed_ahead(&mut self) {
        self.shift = (self.shift + CARRIED_TOKENS - 1) % CARRIED_TOKENS;
        (self.end, self.count) = (self.end + 1, 1);
    }

    /// The sequence was shortened.
    pub(super) fn shorten(&mut self, length: usize) {
        let gone = self.end.saturating_sub(length);
        (self.end, self.count) = (self.end - gone, self.count.saturating_sub(gone));
    }

    /// From now on the state before the token at `position` is kept: the caller fills this piece.
    pub(super) fn assume(&mut self, layout: &Layout, position: usize) -> Option<executor::Range> {
        (self.end, self.count) = (position, usize::from(position > 0));
        let row = (position > 0).then(|| self.row(position - 1))?;
        layout.carried_row(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_the_last_tokens_are_found_whatever_was_accepted() {
        let mut carried = Carried::new(2, 0);
        let base = 2 * CARRIED;
        assert_eq!(carried.rows(Runs::Model, 0, 0..40), [None, None], "nothing stands before the first token");
        assert_eq!(carried.rows(Runs::Model, 39, 39..40), [None, Some(base + 7)]);
        carried.fed(0, 40);
        assert_eq!(carried.rows(Runs::Model, 40, 40..44), [Some(base + 7), Some(base + 8)]);
        carried.fed(40, 4);
        // Two of three drafted tokens were wrong.
        carried.shorten(42);
        assert_eq!(carried.rows(Runs::Head, 42, 42..43), [Some(base + 9), Some(base + CARRIED_TOKENS)]);
        assert_eq!(carried.rows(Runs::HeadAgain, 43, 43..44), [Some(base + CARRIED_TOKENS); 2]);
        assert!(carried.precedes(42) && !carried.precedes(43) && carried.precedes(13) && !carried.precedes(8));
        // A recurrent model goes back further, and takes accepted tokens in again.
        carried.fed(40, 1);
        assert!(carried.precedes(41) && carried.precedes(40) && !carried.precedes(42));
        carried.shorten(3);
        assert!(!carried.precedes(3), "what is no longer kept is not found");
    }

    #[test]
    fn steps_that_run_ahead_find_each_state_in_the_same_place() {
        let mut carried = Carried::new(0, 0);
        carried.fed(0, 5);
        let [before, keep] = carried.rows(Runs::Ahead, 5, 5..6);
        assert_eq!((before, keep), (Some(4), Some(4)));
        for token in 5..50 {
            assert_eq!(carried.rows(Runs::Ahead, token, token..token + 1), [Some(4); 2]);
            carried.fed_ahead();
        }
        assert_eq!(carried.rows(Runs::Model, 50, 50..52), [Some(4), Some(5)]);
        assert!(!carried.precedes(49));
    }
}
