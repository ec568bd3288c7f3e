//! What becomes of full pages that prompts can be continued from, for routers that send a prompt to where its beginning lies.

use super::hash::PrefixHash;
use super::{KvCache, PageKind, SequenceCache};
use crate::arch::PAGE;

/// Where cached pages lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheTier {
    /// On the device, where steps read them.
    Device,
    /// In host memory, from which they are loaded.
    Host,
}

/// Consecutive pages of one prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredPages {
    /// What names each page: a keyed hash of all tokens up to its end.
    pub hashes: Vec<u64>,
    /// The page before the first one; none at the beginning of a prompt.
    pub parent: Option<u64>,
    /// The tokens of all these pages. Pages that moved to host memory bring none: they were told when the device had them.
    pub tokens: Vec<u32>,
    /// Where they lie.
    pub tier: CacheTier,
    /// Who finds them: sequences of this scope alone. 0 for requests without a key and without adapters of their own.
    pub scope: u64,
}

/// What became of full pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// They can be found now.
    Stored(StoredPages),
    /// They can no longer be found there.
    Removed {
        /// What named them.
        hashes: Vec<u64>,
        /// Where they lay.
        tier: CacheTier,
    },
    /// Nothing of what was told before can be found.
    Cleared,
}

/// Takes in what became of pages, in order. It runs on the engine's thread and must not block.
pub type CacheSink = Box<dyn FnMut(Vec<CacheEvent>) + Send>;

/// Whoever wants to know what becomes of pages. Whatever was told of an engine's pages ends with the engine.
pub(crate) struct CacheWatch(CacheSink);

impl CacheWatch {
    /// Nothing was told so far.
    pub(crate) fn new(sink: CacheSink) -> CacheWatch {
        let mut watch = CacheWatch(sink);
        watch.tell(vec![CacheEvent::Cleared]);
        watch
    }

    pub(crate) fn tell(&mut self, events: Vec<CacheEvent>) {
        if !events.is_empty() {
            (self.0)(events);
        }
    }
}

impl Drop for CacheWatch {
    fn drop(&mut self) {
        self.tell(vec![CacheEvent::Cleared]);
    }
}

/// A page that can be found from now on, or no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageChange {
    pub(super) hash: PrefixHash,
    pub(super) is_published: bool,
}

/// Events that nobody has taken yet.
#[derive(Debug, Default)]
pub(super) struct EventLog {
    device: Vec<CacheEvent>,
    host: Vec<CacheEvent>,
}

impl EventLog {
    /// Of a tier, events keep their order; pages move to host memory before they leave the device.
    fn take(&mut self) -> Vec<CacheEvent> {
        let mut events = std::mem::take(&mut self.host);
        events.append(&mut self.device);
        events
    }

    fn stored(&mut self, pages: StoredPages) {
        let events = self.of(pages.tier);
        if let Some(CacheEvent::Stored(last)) = events.last_mut()
            && pages.parent.is_some()
            && pages.parent == last.hashes.last().copied()
            && pages.scope == last.scope
        {
            last.hashes.extend(pages.hashes);
            last.tokens.extend(pages.tokens);
            return;
        }
        events.push(CacheEvent::Stored(pages));
    }

    fn removed(&mut self, hash: PrefixHash, tier: CacheTier) {
        let events = self.of(tier);
        match events.last_mut() {
            Some(CacheEvent::Removed { hashes, .. }) => hashes.push(hash.short()),
            _ => events.push(CacheEvent::Removed { hashes: vec![hash.short()], tier }),
        }
    }

    fn of(&mut self, tier: CacheTier) -> &mut Vec<CacheEvent> {
        match tier {
            CacheTier::Device => &mut self.device,
            CacheTier::Host => &mut self.host,
        }
    }
}

impl KvCache {
    /// The kind of pages that is told of: without those of layers that see every token nothing of a prefix is found.
    fn told_kind(&self) -> PageKind {
        if self.layout.has(PageKind::Full) { PageKind::Full } else { PageKind::Window }
    }

    /// Tells of pages from now on.
    pub(crate) fn log_events(&mut self) {
        let kind = self.told_kind();
        self.pools[kind as usize].log_changes();
        self.events = Some(EventLog::default());
    }

    /// What became of pages since this was asked last.
    pub(crate) fn take_events(&mut self) -> Vec<CacheEvent> {
        self.note_changes(None);
        self.events.as_mut().map(EventLog::take).unwrap_or_default()
    }

    /// Pages of a sequence were published: their tokens are known now.
    pub(super) fn note_published(&mut self, sequence: &SequenceCache) {
        self.note_changes(Some(sequence));
    }

    /// Pages that were published for no sequence were hidden again before anything was in them: nothing is told of them.
    fn note_changes(&mut self, sequence: Option<&SequenceCache>) {
        let kind = self.told_kind();
        let Some(log) = &mut self.events else { return };
        let mut next = 0;
        for PageChange { hash, is_published } in self.pools[kind as usize].take_changes() {
            if !is_published {
                log.removed(hash, CacheTier::Device);
                continue;
            }
            let Some(sequence) = sequence else { continue };
            // As a rule pages are published in their order.
            let behind = sequence.hashes.iter().skip(next).position(|other| *other == hash).map(|at| next + at);
            let Some(at) = behind.or_else(|| sequence.hashes.iter().position(|other| *other == hash)) else { continue };
            next = at + 1;
            log.stored(StoredPages {
                hashes: vec![hash.short()],
                parent: at.checked_sub(1).map(|before| sequence.hashes[before].short()),
                tokens: sequence.tokens[at * PAGE..(at + 1) * PAGE].to_vec(),
                tier: CacheTier::Device,
                scope: sequence.scope.0,
            });
        }
    }

    /// A page was taken into host memory, and others had to leave it.
    pub(super) fn note_host(&mut self, kind: PageKind, hash: PrefixHash, evicted: &[(PageKind, PrefixHash)]) {
        let told = self.told_kind();
        let Some(log) = &mut self.events else { return };
        if kind == told {
            let (hashes, tier) = (vec![hash.short()], CacheTier::Host);
            log.stored(StoredPages { hashes, parent: None, tokens: Vec::new(), tier, scope: 0 });
        }
        evicted.iter().filter(|(kind, _)| *kind == told).for_each(|(_, hash)| log.removed(*hash, CacheTier::Host));
    }
}
