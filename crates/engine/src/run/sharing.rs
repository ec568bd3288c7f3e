//! Texts with a beginning in common, as those of many users behind one system prompt: their first pages are the same, and attention that
//! has such texts side by side reads these pages once for several of them.

use super::cache::PageTable;
use super::engine::{Engine, SequenceId};

/// Neighbours that are looked at together: as many as share a matrix where four heads share keys.
const NEIGHBOURS: usize = 4;
/// One of so many pages must be saved. Texts that are served together are cut into more runs, whose results are added up.
const SAVED: usize = 4;

impl Engine {
    fn page_table(&self, id: SequenceId) -> Option<&PageTable> {
        self.sequences.get(&id).map(|sequence| &sequence.cache.tables[0])
    }

    /// The numbers of texts in an order that has those with pages in common side by side.
    pub(super) fn side_by_side(&self, ids: &[SequenceId]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..ids.len()).collect();
        let pages = |at: usize| self.page_table(ids[at]).into_iter().flat_map(PageTable::prefix);
        order.sort_by(|a, b| pages(*a).cmp(pages(*b)));
        order
    }

    /// Whether enough pages are the same among neighbours.
    pub(super) fn share_pages(&self, ids: &[SequenceId]) -> bool {
        let (mut all, mut saved) = (0, 0);
        for group in ids.chunks(NEIGHBOURS) {
            let tables: Vec<&PageTable> = group.iter().filter_map(|id| self.page_table(*id)).collect();
            let [first, others @ ..] = &tables[..] else { continue };
            all += tables.iter().map(|table| table.prefix().count()).sum::<usize>();
            let common = |other: &&PageTable| first.prefix().zip(other.prefix()).take_while(|(a, b)| a == b).count();
            saved += others.iter().map(common).sum::<usize>();
        }
        saved > 0 && SAVED * saved >= all
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
mod tests {
    use std::sync::Arc;

    use kiln_gguf::Gguf;

    use super::*;
    use crate::arch::{PAGE, Room};
    use crate::executor::{Arithmetic, CpuExecutor};
    use crate::model::Model;
    use crate::quantise_recipe::Recipe;
    use crate::run::{Entry, Wanted};
    use crate::synth::{Preset, Synth};

    #[test]
    fn who_shares_pages_stands_side_by_side_and_few_common_pages_are_not_enough() {
        let synth = Synth::new(Preset::from_name("tiny-llama").unwrap(), Recipe::from_name("F32").unwrap(), 1);
        let model = Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap());
        let room = Room { pages: 60, sequences: 12, ..Room::one(8 * PAGE) };
        let executor = Box::new(CpuExecutor::new(Arithmetic::Fast));
        let mut engine = Engine::new(model, executor, room, &mut |_, _| {}).unwrap();
        let mut read = |beginning: usize, pages: usize, salt: usize| {
            let token = |i: usize| if i < beginning * PAGE { i * 7 % 251 } else { (i * 11 + salt) % 241 };
            let tokens: Vec<u32> = (0..pages * PAGE + 3).map(|i| token(i) as u32).collect();
            let sequence = engine.open(1).unwrap();
            let known = engine.reuse(sequence, &tokens).unwrap();
            engine.feed(&[Entry { sequence, tokens: &tokens[known..], wanted: Wanted::Nothing }]).unwrap();
            sequence
        };
        // Two of three pages in common, in turn with texts that have nothing in common.
        let ids: Vec<SequenceId> = (0..8).map(|i| if i % 2 == 0 { read(2, 3, i) } else { read(0, 1, i) }).collect();
        let longer = read(1, 7, 70);
        let order = engine.side_by_side(&ids);
        let places: Vec<usize> = (0..8).filter(|at| order[*at].is_multiple_of(2)).collect();
        assert_eq!(places[3] - places[0], 3, "{order:?}");
        let sorted: Vec<SequenceId> = order.iter().map(|at| ids[*at]).collect();
        assert!(engine.share_pages(&sorted), "six of the pages of four of eight texts");
        assert!(!engine.share_pages(&ids[..1]), "one text alone");
        assert!(!engine.share_pages(&[ids[0], longer]), "one page of twelve");
    }
}
