//! What the disk has of a prompt: which pages and states would be of use, and those that were read for the lookup that follows.

use std::collections::HashMap;

use super::hash::{PrefixHash, PrefixHasher};
use super::lru::{Blob, Rank};
use super::reuse::Tier;
use super::{KvCache, PageKind, SequenceCache};
use crate::arch::PAGE;
use crate::executor::Range;

/// What was read from disk.
#[derive(Debug, Default)]
pub(super) struct Staged {
    pub(super) pages: HashMap<(PageKind, PrefixHash), Blob>,
    pub(super) state: Option<PrefixHash>,
}

/// A page that neither the device nor host memory has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MissingPage {
    pub(crate) kind: PageKind,
    pub(crate) hash: PrefixHash,
}

/// A state that would let a prompt be continued from behind full pages and `tail` tokens more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SavedState {
    /// Number of full pages.
    pub(crate) full: usize,
    pub(crate) pages: PrefixHash,
    pub(crate) tail: usize,
    pub(crate) prefix: PrefixHash,
}

impl KvCache {
    /// Hashes prefixes with a key that outlives the process. What was cached so far is not found any more.
    pub(crate) fn set_hash_key(&mut self, key: [u8; 32]) {
        self.hasher = PrefixHasher::with_key(key);
    }

    /// Bytes of pages and states in every slot.
    pub(crate) fn layout_sizes(&self) -> Vec<usize> {
        self.layout.sizes()
    }

    /// The full pages of a sequence, with their prefixes and where they lie.
    pub(crate) fn published_pages(&self, sequence: &SequenceCache) -> Vec<(MissingPage, Vec<Range>)> {
        let mut pages = Vec::new();
        for (kind, table) in PageKind::ALL.into_iter().zip(&sequence.tables) {
            for (hash, page) in sequence.hashes.iter().skip(table.first).zip(&table.pages) {
                pages.push((MissingPage { kind, hash: *hash }, self.layout.page(kind, *page).collect()));
            }
        }
        pages
    }

    /// The full pages of a prompt that layers which see every token could have, with those on disk.
    pub(crate) fn known_on_disk(
        &self,
        sequence: &SequenceCache,
        tokens: &[u32],
        mut on_disk: impl FnMut(PageKind, PrefixHash) -> bool,
    ) -> Vec<PrefixHash> {
        let mut before = self.hasher.root(sequence.scope);
        let hashes = tokens.chunks_exact(PAGE).map(|page| {
            before = self.hasher.extend(before, page);
            before
        });
        let has =
            |hash: &PrefixHash| self.has_page(Tier::Host, PageKind::Full, *hash) || on_disk(PageKind::Full, *hash);
        hashes.take_while(has).collect()
    }

    /// States that would let a prompt be continued, the longest prefix first: those in memory, and those on disk, of which `tails`
    /// says how many tokens they stand behind full pages.
    pub(crate) fn saved_states(
        &self,
        sequence: &SequenceCache,
        hashes: &[PrefixHash],
        tokens: &[u32],
        tails: impl Fn(PrefixHash) -> Vec<usize>,
    ) -> Vec<SavedState> {
        let mut states = Vec::new();
        for full in (0..=hashes.len()).rev() {
            let pages = if full == 0 { self.hasher.root(sequence.scope) } else { hashes[full - 1] };
            let rest = &tokens[full * PAGE..tokens.len().min((full + 1) * PAGE - 1)];
            let known = self.checkpoints.longest(&self.hasher, pages, rest).map(|(_, tail)| tail);
            let mut all: Vec<usize> =
                tails(pages).into_iter().chain(known).filter(|tail| *tail <= rest.len()).collect();
            all.sort_unstable_by(|a, b| b.cmp(a));
            all.dedup();
            states.extend(all.into_iter().map(|tail| {
                let prefix = self.hasher.extend(pages, &rest[..tail]);
                SavedState { full, pages, tail, prefix }
            }));
        }
        states
    }

    /// Whether memory has the state of a prefix.
    pub(crate) fn has_checkpoint(&self, prefix: PrefixHash) -> bool {
        self.checkpoints.contains(prefix)
    }

    /// Pages of a prefix that only the disk may have.
    pub(crate) fn missing_pages(&self, hashes: &[PrefixHash]) -> Vec<MissingPage> {
        let of = |kind| {
            let first = self.first_seen(kind, hashes.len() * PAGE).min(hashes.len());
            let missing = hashes[first..].iter().filter(move |hash| !self.has_page(Tier::Host, kind, **hash));
            missing.map(move |hash| MissingPage { kind, hash: *hash })
        };
        PageKind::ALL.into_iter().flat_map(of).collect()
    }

    /// A page was read from disk for the next lookup. One of another size is no page of this cache.
    pub(crate) fn stage_page(&mut self, page: MissingPage, blob: Blob) {
        if blob.len() == self.layout.row_bytes(page.kind, PAGE) {
            self.staged.pages.insert((page.kind, page.hash), blob);
        }
    }

    /// A state was read from disk for the next lookup; it stays in memory as others do.
    pub(crate) fn stage_state(&mut self, state: &SavedState, blob: Blob) -> bool {
        let rows: usize = PageKind::ALL.into_iter().map(|kind| self.layout.row_bytes(kind, state.tail)).sum();
        if blob.len() != rows + self.layout.state_bytes() {
            return false;
        }
        self.checkpoints.insert(state.prefix, state.pages, state.tail, blob, Rank::Kept);
        self.staged.state = Some(state.prefix);
        self.checkpoints.contains(state.prefix)
    }

    /// Forgets what was read from disk and not taken.
    pub(crate) fn clear_staged(&mut self) {
        self.staged = Staged::default();
    }

    /// What identifies a checkpoint of a sequence as it is now.
    pub(crate) fn state_of(&self, sequence: &SequenceCache) -> SavedState {
        let (prefix, pages) = self.prefix_of(sequence);
        let (full, tail) = (sequence.hashes.len(), sequence.tokens.len() % PAGE);
        SavedState { full, pages, tail, prefix }
    }
}
