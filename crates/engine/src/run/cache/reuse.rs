//! Finding what is cached of a prompt: pages on the device, evicted pages in host memory, and state checkpoints.

use super::hash::{CacheScope, PrefixHash};
use super::lru::{Blob, Rank};
use super::pool::Page;
use super::table::PageTable;
use super::{KvCache, PageKind, SequenceCache};
use crate::arch::PAGE;
use crate::executor::Range;

/// What is known of a prompt before it is fed.
#[derive(Debug, Default)]
pub(crate) struct Reused {
    /// Tokens that need not be fed.
    pub(crate) tokens: usize,
    /// Those of them that come from host memory.
    pub(crate) host_tokens: usize,
    /// Those of them that were read from disk.
    pub(crate) disk_tokens: usize,
    /// What must be written to the device first.
    pub(crate) loads: Vec<Load>,
}

/// Bytes from host memory, and where they go.
#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) to: Vec<Range>,
    pub(crate) blob: Blob,
    /// The page that it fills, which others find from then on.
    pub(crate) page: Option<(PageKind, Page)>,
}

/// Where pages of a prefix are looked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Tier {
    /// On the device, and in host memory.
    Host,
    /// On the device alone.
    Device,
}

impl KvCache {
    /// Gives an empty sequence what is cached of a prefix of `tokens` already. At least one token is left to be fed, because its
    /// logits are wanted.
    pub(crate) fn reuse(&mut self, sequence: &mut SequenceCache, tokens: &[u32]) -> Reused {
        if !sequence.tokens.is_empty() || !self.shares_prefixes() || tokens.is_empty() {
            return Reused::default();
        }
        let known = &tokens[..tokens.len() - 1];
        // Where no page is free for those in host memory, the ones on the device are of use all the same.
        let tiers = [Tier::Host, Tier::Device];
        tiers.into_iter().find_map(|tier| self.reuse_from(tier, sequence, known)).unwrap_or_default()
    }

    fn reuse_from(&mut self, tier: Tier, sequence: &mut SequenceCache, tokens: &[u32]) -> Option<Reused> {
        let hashes = self.known_prefix(tier, sequence.scope, tokens);
        if self.has_states() {
            let seen = |hash: &&PrefixHash| self.checkpoints.was_seen(**hash);
            sequence.branch = hashes.iter().take_while(seen).count() * PAGE;
            return self.reuse_checkpoint(tier, sequence, &hashes, tokens);
        }
        let complete = |full: &usize| self.has_window_pages(tier, &hashes[..*full], full * PAGE);
        let full = (0..=hashes.len()).rev().find(complete)?;
        self.share_prefix(sequence, &hashes[..full], &tokens[..full * PAGE])
    }

    /// Gives an empty sequence the full pages of a prefix. `None`: no page is left for those that come from host memory, and
    /// nothing has changed.
    fn share_prefix(&mut self, sequence: &mut SequenceCache, hashes: &[PrefixHash], tokens: &[u32]) -> Option<Reused> {
        // Pages on the device are held first, so that making room for others evicts none of them.
        let found = PageKind::ALL.map(|kind| self.on_device(kind, hashes, tokens.len()));
        for (pool, found) in self.pools.iter_mut().zip(&found) {
            found.iter().flatten().for_each(|page| pool.share(*page));
        }
        let mut reused = Reused { tokens: tokens.len(), ..Reused::default() };
        let mut complete = true;
        for (kind, found) in PageKind::ALL.into_iter().zip(found) {
            let first = self.first_seen(kind, tokens.len());
            let mut table = PageTable { first, ..PageTable::default() };
            let (before, mut staged) = (reused.loads.len(), 0);
            for (at, page) in (first..).zip(found) {
                staged += usize::from(page.is_none() && self.staged.pages.contains_key(&(kind, hashes[at])));
                let page = page.or_else(|| self.load_page(kind, hashes[at], &mut reused.loads));
                complete &= page.is_some();
                table.pages.extend(page);
            }
            sequence.tables[kind as usize] = table;
            // A token may have pages of both kinds.
            let loaded = reused.loads.len() - before;
            reused.host_tokens = reused.host_tokens.max(loaded.saturating_sub(staged) * PAGE);
            reused.disk_tokens = reused.disk_tokens.max(staged * PAGE);
        }
        if !complete {
            self.release_all(sequence, &reused.loads);
            return None;
        }
        sequence.tokens.extend(tokens);
        sequence.hashes = hashes.to_vec();
        self.note_published(sequence);
        Some(reused)
    }

    /// The full pages that a prefix of `tokens` tokens is continued with, where the device has them.
    fn on_device(&self, kind: PageKind, hashes: &[PrefixHash], tokens: usize) -> Vec<Option<Page>> {
        if !self.layout.has(kind) {
            return Vec::new();
        }
        let first = self.first_seen(kind, tokens).min(hashes.len());
        hashes[first..].iter().map(|hash| self.pools[kind as usize].find(*hash)).collect()
    }

    /// Takes a page for one in host memory.
    pub(super) fn load_page(&mut self, kind: PageKind, hash: PrefixHash, loads: &mut Vec<Load>) -> Option<Page> {
        let blob = self.staged.pages.get(&(kind, hash)).cloned().or_else(|| self.host.get((kind, hash)))?;
        let page = self.take_page(kind).ok()?;
        self.pools[kind as usize].publish(page, hash);
        loads.push(Load { to: self.layout.page(kind, page).collect(), blob, page: Some((kind, page)) });
        Some(page)
    }

    /// Hides pages again that were not loaded.
    pub(crate) fn undo_loads(&mut self, loads: &[Load]) {
        for (kind, page) in loads.iter().filter_map(|load| load.page) {
            self.pools[kind as usize].unpublish_for_write(page);
        }
    }

    /// The full pages of a prefix that layers which see every token have.
    fn known_prefix(&self, tier: Tier, scope: CacheScope, tokens: &[u32]) -> Vec<PrefixHash> {
        let mut hashes = Vec::new();
        let mut before = self.hasher.root(scope);
        for page in tokens.chunks_exact(PAGE) {
            before = self.hasher.extend(before, page);
            if !self.has_page(tier, PageKind::Full, before) {
                break;
            }
            hashes.push(before);
        }
        hashes
    }

    /// Whether a page is there, where layers have such pages.
    pub(super) fn has_page(&self, tier: Tier, kind: PageKind, hash: PrefixHash) -> bool {
        !self.layout.has(kind)
            || self.pools[kind as usize].find(hash).is_some()
            || (tier == Tier::Host
                && (self.host.contains((kind, hash)) || self.staged.pages.contains_key(&(kind, hash))))
    }

    /// Whether layers with a window have all full pages that the token at index `tokens` sees.
    fn has_window_pages(&self, tier: Tier, hashes: &[PrefixHash], tokens: usize) -> bool {
        let first = self.first_seen(PageKind::Window, tokens).min(hashes.len());
        hashes[first..].iter().all(|hash| self.has_page(tier, PageKind::Window, *hash))
    }

    /// Gives an empty sequence the longest prefix that has a checkpoint and all its pages. `None`: no page was left for it.
    fn reuse_checkpoint(
        &mut self,
        tier: Tier,
        sequence: &mut SequenceCache,
        hashes: &[PrefixHash],
        tokens: &[u32],
    ) -> Option<Reused> {
        let root = self.hasher.root(sequence.scope);
        for full in (0..=hashes.len()).rev() {
            let pages = if full == 0 { root } else { hashes[full - 1] };
            // What follows a full page stands behind that one.
            let rest = &tokens[full * PAGE..tokens.len().min((full + 1) * PAGE - 1)];
            let Some((prefix, tail)) = self.checkpoints.longest(&self.hasher, pages, rest) else { continue };
            let length = full * PAGE + tail;
            if length == 0 || !self.has_window_pages(tier, &hashes[..full], length) {
                continue;
            }
            let shared = self.share_prefix(sequence, &hashes[..full], &tokens[..length]);
            let blob = self.checkpoints.get(prefix);
            let (mut reused, blob) = (shared?, blob?);
            if self.reserve(sequence, 0).is_err() {
                // No page is left for the one that is not full.
                self.release_all(sequence, &reused.loads);
                return None;
            }
            let from_disk = self.staged.state == Some(prefix);
            (reused.host_tokens, reused.disk_tokens) = if from_disk { (0, length) } else { (length, 0) };
            reused.loads.push(Load { to: self.checkpoint_ranges(sequence), blob, page: None });
            return Some(reused);
        }
        Some(Reused::default())
    }

    /// Makes a sequence empty again whose pages were not loaded; its state stays its own.
    fn release_all(&mut self, sequence: &mut SequenceCache, loads: &[Load]) {
        self.undo_loads(loads);
        let tables = std::mem::take(&mut sequence.tables);
        self.release_tables(&tables);
        sequence.tokens.clear();
        sequence.hashes.clear();
    }

    /// Where a checkpoint of a sequence lies: the rows of its last page, if that is not full, and its state.
    fn checkpoint_ranges(&self, sequence: &SequenceCache) -> Vec<Range> {
        let (last, rows) = (sequence.tokens.len() / PAGE, sequence.tokens.len() % PAGE);
        let partial = PageKind::ALL.into_iter().zip(&sequence.tables);
        let partial = partial.filter_map(|(kind, table)| Some((kind, table.at(last).filter(|_| rows > 0)?)));
        let rows = partial.flat_map(|(kind, page)| self.layout.rows(kind, page, rows));
        rows.chain(sequence.state.into_iter().flat_map(|state| self.layout.state(state))).collect()
    }

    /// The prefix that a whole sequence is, and that of its full pages.
    pub(super) fn prefix_of(&self, sequence: &SequenceCache) -> (PrefixHash, PrefixHash) {
        let pages = sequence.hashes.last().copied().unwrap_or_else(|| self.hasher.root(sequence.scope));
        (self.hasher.extend(pages, &sequence.tokens[sequence.hashes.len() * PAGE..]), pages)
    }

    /// What must be read for a checkpoint of a sequence as it is now; nothing where none is needed.
    pub(crate) fn checkpoint(&mut self, sequence: &SequenceCache) -> Vec<Range> {
        let is_whole = sequence.hashes.len() == sequence.tokens.len() / PAGE;
        let wanted = self.has_states() && self.shares_prefixes() && is_whole && sequence.state.is_some();
        if !wanted || sequence.tokens.is_empty() || self.checkpoints.get(self.prefix_of(sequence).0).is_some() {
            return Vec::new();
        }
        self.checkpoint_ranges(sequence)
    }

    /// Saves what was read.
    pub(crate) fn save_checkpoint(&mut self, sequence: &SequenceCache, blob: Blob, rank: Rank) {
        let (prefix, pages) = self.prefix_of(sequence);
        self.checkpoints.insert(prefix, pages, sequence.tokens.len() % PAGE, blob, rank);
    }
}
