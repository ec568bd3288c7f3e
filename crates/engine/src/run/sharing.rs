//! Texts with a beginning in common, as those of many users behind one system prompt: their first pages are the same, and attention that
//! has such texts side by side reads these pages once for several of them.

use super::engine::{Engine, SequenceId};
use super::memory::Held;

/// Texts from which on attention is on a path that serves several together.
const LEAST: usize = 8;
/// Neighbours that are looked at together: as many as share a matrix where four heads share keys.
const NEIGHBOURS: usize = 4;
/// One of so many pages must be saved. Texts that are served together are cut into more runs, whose results are added up.
const SAVED: usize = 4;

impl Engine {
    fn held(&self, id: SequenceId) -> Option<&Held> {
        self.sequences.get(&id).map(|sequence| &sequence.held[0])
    }

    /// The numbers of texts in an order that has those with pages in common side by side.
    pub(super) fn side_by_side(&self, ids: &[SequenceId]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..ids.len()).collect();
        let pages = |at: usize| self.held(ids[at]).into_iter().flat_map(Held::beginning);
        order.sort_by(|a, b| pages(*a).cmp(pages(*b)));
        order
    }

    /// Whether enough pages are the same among neighbours.
    pub(super) fn share_pages(&self, ids: &[SequenceId]) -> bool {
        if ids.len() < LEAST {
            return false;
        }
        let (mut all, mut saved) = (0, 0);
        for group in ids.chunks(NEIGHBOURS) {
            let held: Vec<&Held> = group.iter().filter_map(|id| self.held(*id)).collect();
            let [first, others @ ..] = &held[..] else { continue };
            all += held.iter().map(|held| held.beginning().count()).sum::<usize>();
            let common = |other: &&Held| first.beginning().zip(other.beginning()).take_while(|(a, b)| a == b).count();
            saved += others.iter().map(common).sum::<usize>();
        }
        saved > 0 && SAVED * saved >= all
    }
}
