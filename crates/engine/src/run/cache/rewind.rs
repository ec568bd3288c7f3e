//! Taking back drafted tokens: attention caches are cut by length; a recurrent state, which has no way back, is copied before.

use super::{Copy, KvCache, PageKind, SequenceCache};
use crate::Error;

/// Where a sequence can go back to: a copy of its state, and its tokens there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    state: u32,
    length: usize,
}

/// Drafts are never longer.
const MOST_REVOCABLE: usize = 64;

impl KvCache {
    /// Tokens that a sequence may take in behind so many certain ones so that they can be taken back: those for which no page is released
    /// that has to come back. 0 where a state cannot be copied.
    pub(crate) fn revocable(&self, sequence: &SequenceCache, certain: usize) -> usize {
        let now = sequence.tokens.len();
        // With a state, the way back leads to before the certain ones.
        let (back, has_way) = match self.has_states() {
            true => (now, !self.free_states.is_empty()),
            false => (now + certain, true),
        };
        let stays = |more: &usize| {
            let end = now + certain + more;
            PageKind::ALL.into_iter().all(|kind| self.first_seen(kind, end) == self.first_seen(kind, back))
        };
        if has_way { (0..=MOST_REVOCABLE).rev().find(stays).unwrap_or(0) } else { 0 }
    }

    /// Marks where a sequence is, so that it can come back: these copies keep its state. `None` where no state is free for it.
    pub(crate) fn mark(&mut self, sequence: &mut SequenceCache) -> Option<Vec<Copy>> {
        let from = sequence.state?;
        let state = self.free_states.pop()?;
        sequence.mark = Some(Mark { state, length: sequence.tokens.len() });
        Some(self.layout.state(from).zip(self.layout.state(state)).collect())
    }

    /// Forgets a mark: the sequence goes on from where it is.
    pub(crate) fn unmark(&mut self, sequence: &mut SequenceCache) {
        self.free_states.extend(sequence.mark.take().map(|mark| mark.state));
    }

    /// Brings a sequence back to its mark.
    pub(crate) fn go_back(&mut self, sequence: &mut SequenceCache) -> Result<(), Error> {
        let Some(Mark { state, length }) = sequence.mark.take() else { return Ok(()) };
        self.free_states.extend(sequence.state.replace(state));
        self.truncate_caches(sequence, length)
    }
}
