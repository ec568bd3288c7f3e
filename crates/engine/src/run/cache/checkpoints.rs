//! State checkpoints: what recurrent layers remember after a prefix, with the rows of the page that is not full there. A prefix of
//! such a model can be continued only from a token index at which a checkpoint was saved.
//!
//! Full pages before the checkpoint are not part of it: they are found in the pools by their own hashes.

use std::collections::{HashMap, HashSet};

use super::hash::{PrefixHash, PrefixHasher};
use super::lru::{Blob, ByteLru, Rank};
use crate::arch::PAGE;

/// Tokens between two checkpoints of a long prompt, at least.
const INTERVAL: usize = 1024;
/// Page hashes that are known to have been computed: two generations of this many.
const MOST_SEEN: usize = 1 << 15;

/// Where a checkpoint stands: behind full pages that end with `pages`, and `tail` tokens more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Place {
    pages: PrefixHash,
    tail: usize,
}

/// The saved states of all prefixes.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    blobs: ByteLru<PrefixHash>,
    places: HashMap<PrefixHash, Place>,
    /// Tokens behind the last full page, of all checkpoints that stand behind the same full pages.
    tails: HashMap<PrefixHash, Vec<usize>>,
    seen: [HashSet<PrefixHash>; 2],
}

impl Checkpoints {
    /// No checkpoints, and room for `limit` bytes of them.
    pub(crate) fn new(limit: usize) -> Checkpoints {
        let (places, tails, seen) = (HashMap::new(), HashMap::new(), Default::default());
        Checkpoints { blobs: ByteLru::new(limit), places, tails, seen }
    }

    /// Bytes that checkpoints may take.
    pub(crate) fn limit(&self) -> usize {
        self.blobs.limit()
    }

    /// Bytes that they take.
    pub(crate) fn bytes(&self) -> usize {
        self.blobs.bytes()
    }

    /// Whether there is a checkpoint of this prefix.
    pub(crate) fn contains(&self, prefix: PrefixHash) -> bool {
        self.blobs.contains(prefix)
    }

    /// Saves what is remembered after `tail` tokens behind full pages.
    pub(crate) fn insert(&mut self, prefix: PrefixHash, pages: PrefixHash, tail: usize, blob: Blob, rank: Rank) {
        let evicted = self.blobs.insert(prefix, blob, rank);
        if self.places.insert(prefix, Place { pages, tail }).is_none() {
            self.tails.entry(pages).or_default().push(tail);
        }
        evicted.into_iter().for_each(|(prefix, _)| self.forget(prefix));
    }

    fn forget(&mut self, prefix: PrefixHash) {
        let Some(Place { pages, tail }) = self.places.remove(&prefix) else { return };
        let Some(tails) = self.tails.get_mut(&pages) else { return };
        if let Some(at) = tails.iter().position(|other| *other == tail) {
            tails.swap_remove(at);
        }
        if tails.is_empty() {
            self.tails.remove(&pages);
        }
    }

    /// The longest of the checkpoints behind these full pages whose tail begins `rest`: its prefix and its tail's tokens.
    pub(crate) fn longest(
        &self,
        hasher: &PrefixHasher,
        pages: PrefixHash,
        rest: &[u32],
    ) -> Option<(PrefixHash, usize)> {
        let mut tails = self.tails.get(&pages)?.clone();
        tails.sort_unstable();
        let fitting = tails.into_iter().rev().filter(|tail| *tail <= rest.len());
        let prefixes = fitting.map(|tail| (hasher.extend(pages, &rest[..tail]), tail));
        // Several checkpoints may have tails of one length.
        prefixes.into_iter().find(|(prefix, _)| self.blobs.contains(*prefix))
    }

    /// What was saved for a prefix.
    pub(crate) fn get(&mut self, prefix: PrefixHash) -> Option<Blob> {
        self.blobs.get(prefix)
    }

    /// A full page was computed.
    pub(crate) fn note_seen(&mut self, page: PrefixHash) {
        if self.seen[0].len() >= MOST_SEEN {
            self.seen[1] = std::mem::take(&mut self.seen[0]);
        }
        self.seen[0].insert(page);
    }

    /// Whether a full page was computed lately, for any sequence: prefixes that were met twice may come again.
    pub(crate) fn was_seen(&self, page: PrefixHash) -> bool {
        self.seen.iter().any(|seen| seen.contains(&page))
    }
}

/// A token index at which the prefill of a prompt stops for a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stop {
    pub(crate) at: usize,
    pub(crate) rank: Rank,
}

/// Where the prefill of a prompt stops: at the last page boundary, because the next turn may render what follows differently; where
/// it leaves a prefix that was computed before; and at intervals, of a batch at least. The end of the prompt needs no stop.
pub(crate) fn stops(cached: usize, branch: usize, prompt: usize, batch: usize) -> Vec<Stop> {
    let last = (prompt.saturating_sub(1)) / PAGE * PAGE;
    let interval = INTERVAL.max(batch.next_multiple_of(PAGE));
    let spare = (1..).map(|i| i * interval).take_while(|at| *at < last).map(|at| Stop { at, rank: Rank::Spare });
    let kept = [branch, last].map(|at| Stop { at, rank: Rank::Kept });
    let mut stops: Vec<Stop> = spare.chain(kept).filter(|stop| stop.at > cached && stop.at < prompt).collect();
    // Of two at one place the one that is kept.
    stops.sort_unstable_by(|a, b| a.at.cmp(&b.at).then(b.rank.cmp(&a.rank)));
    stops.dedup_by_key(|stop| stop.at);
    stops
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::hash::CacheScope;
    use super::*;

    #[test]
    fn the_longest_tail_that_fits_is_found_and_evicted_ones_are_not() {
        let hasher = PrefixHasher::new();
        let pages = hasher.root(CacheScope(1));
        let mut checkpoints = Checkpoints::new(30);
        let save = |checkpoints: &mut Checkpoints, tail: &[u32]| {
            let prefix = hasher.extend(pages, tail);
            checkpoints.insert(prefix, pages, tail.len(), Arc::new(vec![0; 10]), Rank::Kept);
            prefix
        };
        let short = save(&mut checkpoints, &[1]);
        let long = save(&mut checkpoints, &[1, 2, 3]);
        save(&mut checkpoints, &[1, 5, 6]);
        assert_eq!(checkpoints.longest(&hasher, pages, &[1, 2, 3, 4]), Some((long, 3)));
        assert_eq!(checkpoints.longest(&hasher, pages, &[1, 2]), Some((short, 1)));
        assert_eq!(checkpoints.longest(&hasher, pages, &[2]), None);
        assert!(checkpoints.get(short).is_some());
        save(&mut checkpoints, &[7]);
        assert_eq!(checkpoints.longest(&hasher, pages, &[1, 2, 3, 4]), Some((short, 1)), "the long one was evicted");
        assert_eq!(checkpoints.bytes(), 30);
        assert_eq!(checkpoints.places.len(), 3);
        assert_eq!(checkpoints.tails[&pages].len(), 3);
    }

    #[test]
    fn prefill_stops_at_intervals_branches_and_the_last_page() {
        let at = |stops: Vec<Stop>| stops.iter().map(|stop| stop.at).collect::<Vec<_>>();
        assert_eq!(at(stops(0, 0, 64, 512)), [] as [usize; 0], "nothing before the only page's end");
        assert_eq!(at(stops(0, 0, 65, 512)), [64]);
        assert_eq!(at(stops(0, 0, 3000, 512)), [1024, 2048, 2944]);
        assert_eq!(at(stops(0, 192, 3000, 2048)), [192, 2048, 2944]);
        assert_eq!(at(stops(2944, 0, 3000, 512)), [] as [usize; 0]);
        let same = stops(0, 1024, 1088, 512);
        assert_eq!(same, [Stop { at: 1024, rank: Rank::Kept }]);
    }
}
