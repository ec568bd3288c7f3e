//! The merges of byte-pair encoding, by the pair that merges.

use std::hash::BuildHasher as _;

use hashbrown::HashTable;

use super::hash::FoldState;
use super::merge::Merged;

/// What pairs of symbols merge to. The table holds numbers of merges: with the pairs in it, every place that it has free would be as large.
pub(super) struct Merges {
    table: HashTable<u32>,
    state: FoldState,
    /// The pairs, the best first.
    pairs: Box<[(u32, u32)]>,
    made: Made,
}

/// The symbols that merges make.
enum Made {
    /// This one and those behind it, in order: in most vocabularies a token comes with the merge that makes it.
    From(u32),
    Listed(Box<[u32]>),
}

impl Merges {
    /// The merges of a list, the best first: two symbols, and what they become. Of a pair that comes again the first counts.
    pub(super) fn new(list: Vec<(u32, u32, u32)>) -> Self {
        let state = FoldState::default();
        let mut table = HashTable::with_capacity(list.len());
        let (mut pairs, mut symbols): (Vec<(u32, u32)>, Vec<u32>) = (Vec::new(), Vec::new());
        for (left, right, symbol) in list {
            let place = state.hash_one(key(left, right));
            if table.find(place, |number: &u32| pairs[*number as usize] == (left, right)).is_none() {
                table.insert_unique(place, pairs.len() as u32, |_| unreachable!("there should be room for all"));
                pairs.push((left, right));
                symbols.push(symbol);
            }
        }
        let first = symbols.first().copied().unwrap_or_default();
        let made = match symbols.iter().copied().eq((first..).take(symbols.len())) {
            true => Made::From(first),
            false => Made::Listed(symbols.into_boxed_slice()),
        };
        Self { table, state, pairs: pairs.into_boxed_slice(), made }
    }

    /// What a pair merges to, if it does.
    pub(super) fn get(&self, left: u32, right: u32) -> Option<Merged> {
        let is = |number: &u32| self.pairs[*number as usize] == (left, right);
        let number = *self.table.find(self.state.hash_one(key(left, right)), is)?;
        let symbol = match &self.made {
            Made::From(first) => first + number,
            Made::Listed(symbols) => symbols[number as usize],
        };
        Some(Merged { priority: number, symbol })
    }
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_merge_by_the_first_that_names_them() {
        for made in [[7, 8, 9], [7, 9, 8]] {
            let [a, b, c] = made;
            let merges = Merges::new(vec![(1, 2, a), (2, 1, b), (1, 2, 5), (7, 2, c)]);
            let get = |left, right| merges.get(left, right).map(|merged| (merged.priority, merged.symbol));
            assert_eq!([get(1, 2), get(2, 1), get(7, 2)], [Some((0, a)), Some((1, b)), Some((2, c))]);
            assert_eq!([get(1, 1), get(2, 7), get(0, 0)], [None; 3]);
            assert_eq!(matches!(merges.made, Made::From(7)), made.is_sorted());
        }
        assert_eq!(Merges::new(Vec::new()).get(0, 0), None);
    }
}
