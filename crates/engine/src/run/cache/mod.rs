//! The KV cache: page pools, page tables, prefix hashes and state slots of all sequences. Nothing here touches a device: methods
//! change tables and return the copies and ranges that the engine then executes.

mod carried;
mod checkpoints;
mod events;
mod hash;
mod layout;
mod lru;
mod pool;
mod reuse;
mod rewind;
mod staged;
mod swap;
mod table;
#[cfg(test)]
mod tests;

use std::ops::Add;

pub(crate) use carried::{Carried, Runs};
pub(crate) use checkpoints::{Stop, stops};
pub(crate) use events::CacheWatch;
pub use events::{CacheEvent, CacheSink, CacheTier, StoredPages};
pub(crate) use hash::{CacheScope, PrefixHash};
pub(crate) use lru::{Blob, Rank};
pub(crate) use pool::Page;
pub(crate) use reuse::{Load, Reused};
pub(crate) use staged::{MissingPage, SavedState};
pub(crate) use swap::{SwapPlan, Swapped};
pub(crate) use table::PageTable;

use crate::Error;
use crate::arch::{PAGE, Room, pages_of_window};
use crate::executor::Range;
use crate::plan::Fixed;
use checkpoints::Checkpoints;
use events::EventLog;
use hash::PrefixHasher;
use layout::Layout;
use lru::ByteLru;
use pool::PagePool;
use rewind::Mark;
use staged::Staged;

/// Kinds of caches.
pub(crate) const KINDS: usize = 2;

/// A kind of cache; each has pages and numbers of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PageKind {
    /// Caches of layers that see every token.
    Full,
    /// Caches of layers that see the last tokens alone.
    Window,
}

impl PageKind {
    /// All kinds, in the order of page tables.
    pub(crate) const ALL: [PageKind; KINDS] = [PageKind::Full, PageKind::Window];

    /// What its pages are called in messages.
    fn what(self) -> &'static str {
        match self {
            PageKind::Full => "pages of the cache",
            PageKind::Window => "pages of the cache of windows",
        }
    }
}

/// Numbers of pages, of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageCount([usize; KINDS]);

impl PageCount {
    /// The same number of every kind.
    pub(crate) fn each(n: usize) -> PageCount {
        PageCount([n; KINDS])
    }

    fn by_kind(of: impl Fn(PageKind) -> usize) -> PageCount {
        PageCount(PageKind::ALL.map(of))
    }
}

impl Add for PageCount {
    type Output = PageCount;

    fn add(self, other: PageCount) -> PageCount {
        PageCount(std::array::from_fn(|kind| self.0[kind] + other.0[kind]))
    }
}

impl std::iter::Sum for PageCount {
    fn sum<I: Iterator<Item = PageCount>>(counts: I) -> PageCount {
        counts.fold(PageCount::default(), Add::add)
    }
}

/// A copy between two pieces of one slot: from, to.
pub(crate) type Copy = (Range, Range);

/// A page that was added to a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddedPage {
    pub(crate) kind: PageKind,
    /// Its place in the sequence.
    pub(crate) at: usize,
    pub(crate) page: Page,
}

/// A page that was evicted and is to be kept in host memory: it must be read before anything is written to the device.
#[derive(Debug)]
pub(crate) struct Demotion {
    pub(crate) kind: PageKind,
    pub(crate) hash: PrefixHash,
    pub(crate) from: Vec<Range>,
}

/// Cross-attention keys and values of the text that an encoder read for a sequence.
#[derive(Clone, Debug, Default)]
pub(crate) struct EncoderContext {
    /// The pages that hold them; none while they lie in host memory.
    pub(crate) table: PageTable,
    /// Tokens that the encoder read.
    pub(crate) tokens: usize,
}

/// What the cache holds of one sequence.
#[derive(Debug, Default)]
pub(crate) struct SequenceCache {
    /// Every token that was fed.
    pub(crate) tokens: Vec<u32>,
    /// The pages that hold their keys and values, by kind.
    pub(crate) tables: [PageTable; KINDS],
    /// The prefix that ends with each full page.
    hashes: Vec<PrefixHash>,
    /// Its state slot, in models with recurrent layers; none while it lies in host memory.
    pub(crate) state: Option<u32>,
    scope: CacheScope,
    /// Tokens of its prompt that were computed before, for any sequence, whether or not they were found.
    pub(crate) branch: usize,
    /// In encoder-decoder models: what the encoder left for it.
    pub(crate) encoder: Option<EncoderContext>,
    /// Where it goes back to if drafted tokens are wrong, in models with recurrent layers.
    mark: Option<Mark>,
    /// What is kept of its last tokens for the draft head, where there is one and a place for it.
    pub(crate) carried: Option<Carried>,
}

/// The pools of a model and the rules by which sequences share them.
#[derive(Debug)]
pub(crate) struct KvCache {
    layout: Layout,
    pools: [PagePool; KINDS],
    /// Tokens that layers with a window see.
    window: Option<usize>,
    free_states: Vec<u32>,
    /// Rings of states for a draft head that no sequence holds.
    free_rings: Vec<u32>,
    states: usize,
    context: usize,
    hasher: PrefixHasher,
    checkpoints: Checkpoints,
    /// Evicted pages in host memory.
    host: ByteLru<(PageKind, PrefixHash)>,
    demotions: Vec<Demotion>,
    /// What was read from disk for the prompt that is looked up next.
    staged: Staged,
    /// What became of pages, where somebody wants to know.
    events: Option<EventLog>,
    /// Whether what is cached of a prefix depends on nothing behind it or beside it.
    is_causal: bool,
}

impl KvCache {
    /// The cache of a model with these slots, made for this much room. `is_causal`: what is cached of a prefix depends on that
    /// prefix alone.
    pub(crate) fn new(fixed: &Fixed, room: &Room, window: Option<usize>, is_causal: bool) -> KvCache {
        let layout = Layout::new(fixed, room);
        let pages = [room.pages, room.window_pages];
        let pools = PageKind::ALL.map(|kind| PagePool::new(if layout.has(kind) { pages[kind as usize] } else { 0 }));
        let has_pages = PageKind::ALL.into_iter().any(|kind| layout.has(kind));
        let states = u32::try_from(room.states).expect("states are numbered with 32 bits");
        KvCache {
            pools,
            window,
            free_states: if layout.has_states() { (0..states).rev().collect() } else { Vec::new() },
            free_rings: (0..u32::try_from(layout.rings()).unwrap_or(0)).rev().collect(),
            states: room.states,
            context: if has_pages { room.context } else { usize::MAX },
            hasher: PrefixHasher::new(),
            checkpoints: Checkpoints::new(0),
            host: ByteLru::new(0),
            demotions: Vec::new(),
            staged: Staged::default(),
            events: None,
            is_causal: is_causal && (has_pages || layout.has_states()),
            layout,
        }
    }

    /// Most tokens of one sequence; without end where nothing is kept of each token.
    pub(crate) fn context(&self) -> usize {
        self.context
    }

    /// Whether any layer has a state.
    pub(crate) fn has_states(&self) -> bool {
        self.layout.has_states()
    }

    /// Whether any layer has pages.
    pub(crate) fn has_pages(&self) -> bool {
        PageKind::ALL.into_iter().any(|kind| self.layout.has(kind))
    }

    /// State slots that no sequence holds.
    pub(crate) fn free_states(&self) -> usize {
        self.free_states.len()
    }

    /// Bounds the bytes of state checkpoints in host memory. Those that were saved are forgotten.
    pub(crate) fn limit_checkpoints(&mut self, bytes: usize) {
        self.checkpoints = Checkpoints::new(bytes);
    }

    /// Bounds the bytes of evicted pages in host memory. Those that were kept are forgotten.
    pub(crate) fn limit_host_pages(&mut self, bytes: usize) {
        self.host = ByteLru::new(bytes);
    }

    /// Bytes of evicted pages in host memory.
    pub(crate) fn host_page_bytes(&self) -> usize {
        self.host.bytes()
    }

    /// Pages that were evicted since they were last asked for.
    pub(crate) fn take_demotions(&mut self) -> Vec<Demotion> {
        std::mem::take(&mut self.demotions)
    }

    /// Keeps the contents of an evicted page in host memory.
    pub(crate) fn keep_page(&mut self, kind: PageKind, hash: PrefixHash, blob: Blob) {
        let evicted: Vec<_> =
            self.host.insert((kind, hash), blob, Rank::Kept).into_iter().map(|(key, _)| key).collect();
        self.note_host(kind, hash, &evicted);
    }

    /// Bytes of state checkpoints in host memory.
    pub(crate) fn checkpoint_bytes(&self) -> usize {
        self.checkpoints.bytes()
    }

    /// Whether sequences share what is cached of a common prefix. A state belongs to all tokens before it at once, so where there
    /// are states, checkpoints of them must have room.
    pub(crate) fn shares_prefixes(&self) -> bool {
        self.is_causal && (!self.has_states() || self.checkpoints.limit() >= self.layout.state_bytes())
    }

    /// Pages of a kind that can be taken now, and in all; none where no layer has such a cache.
    pub(crate) fn pages(&self, kind: PageKind) -> Option<(usize, usize)> {
        let pool = &self.pools[kind as usize];
        self.layout.has(kind).then(|| (pool.available(), pool.count()))
    }

    /// Whether these pages can be taken now.
    pub(crate) fn room_for(&self, wanted: PageCount) -> Result<(), Error> {
        for (kind, needed) in PageKind::ALL.into_iter().zip(wanted.0) {
            if let Some((free, all)) = self.pages(kind)
                && needed > free
            {
                return Err(Error::NoRoom { what: kind.what(), needed, free, all });
            }
        }
        Ok(())
    }

    /// The first page that the token at index `tokens` sees. No token after that sees any before it.
    fn first_seen(&self, kind: PageKind, tokens: usize) -> usize {
        let window = self.window.filter(|_| kind == PageKind::Window);
        window.map_or(0, |window| (tokens + 1).saturating_sub(window) / PAGE)
    }

    /// Pages that a new prompt takes, with the sequences of its choices that continue it.
    pub(crate) fn pages_of_prompt(&self, tokens: usize, choices: usize) -> PageCount {
        PageCount::by_kind(|kind| {
            let most = self.window.filter(|_| kind == PageKind::Window).map_or(usize::MAX, pages_of_window);
            tokens.div_ceil(PAGE).min(most) + choices
        })
    }

    /// How many more pages a sequence needs for `more` tokens.
    pub(crate) fn pages_needed(&self, sequence: &SequenceCache, more: usize) -> PageCount {
        let end = (sequence.tokens.len() + more).div_ceil(PAGE);
        let encoder = sequence.encoder.as_ref().filter(|encoder| encoder.table.is_empty());
        let encoder = encoder.map_or(0, |encoder| encoder.tokens.div_ceil(PAGE));
        PageCount::by_kind(|kind| match self.layout.has(kind) {
            true => {
                let encoder = if kind == PageKind::Full { encoder } else { 0 };
                end.saturating_sub(sequence.tables[kind as usize].end()) + encoder
            }
            false => 0,
        })
    }

    /// Pages that feeding `more` tokens takes: new ones, and one for a last page that others share.
    pub(crate) fn pages_to_feed(&self, sequence: &SequenceCache, more: usize) -> PageCount {
        let copies = PageCount::by_kind(|kind| {
            let page = sequence.tables[kind as usize].at(sequence.tokens.len() / PAGE);
            usize::from(page.is_some_and(|page| self.pools[kind as usize].is_shared(page)))
        });
        self.pages_needed(sequence, more) + copies
    }

    /// Pages that a sequence lacks for `more` tokens, at most those of its context.
    pub(crate) fn pages_ahead(&self, sequence: &SequenceCache, more: usize) -> PageCount {
        self.pages_needed(sequence, more.min(self.context.saturating_sub(sequence.tokens.len())))
    }

    fn take_page(&mut self, kind: PageKind) -> Result<Page, Error> {
        let pool = &mut self.pools[kind as usize];
        let all = pool.count();
        let (page, evicted) = pool.take().ok_or(Error::NoRoom { what: kind.what(), needed: 1, free: 0, all })?;
        if let Some(hash) = evicted
            && self.host.limit() > 0
            && self.host.get((kind, hash)).is_none()
        {
            let from = self.layout.page(kind, page).collect();
            self.demotions.push(Demotion { kind, hash, from });
        }
        Ok(page)
    }

    fn take_state(&mut self) -> Result<Option<u32>, Error> {
        if !self.has_states() {
            return Ok(None);
        }
        let state = self.free_states.pop();
        state.map(Some).ok_or(Error::NoRoom { what: "states", needed: 1, free: 0, all: self.states })
    }

    /// A new sequence, and what must be zero before it is used.
    pub(crate) fn open(&mut self, scope: CacheScope) -> Result<(SequenceCache, Vec<Range>), Error> {
        let state = self.take_state()?;
        let zero = state.into_iter().flat_map(|state| self.layout.state(state)).collect();
        let carried = self.take_ring(0);
        Ok((SequenceCache { state, scope, carried, ..SequenceCache::default() }, zero))
    }

    /// A place for states of a sequence of so many tokens; those it has are not known.
    fn take_ring(&mut self, length: usize) -> Option<Carried> {
        self.free_rings.pop().map(|ring| Carried::new(ring, length))
    }

    /// A step that goes on by itself took in one token of a sequence.
    pub(crate) fn append_ahead(&mut self, sequence: &mut SequenceCache, token: u32) {
        let carried = sequence.carried;
        self.append(sequence, &[token]);
        sequence.carried = carried;
        sequence.carried.iter_mut().for_each(Carried::fed_ahead);
    }

    /// What must be zero before a sequence goes on by itself: the state before its next token, where that is not known.
    pub(crate) fn carry_on(&self, sequence: &mut SequenceCache) -> Option<Range> {
        let length = sequence.tokens.len();
        let carried = sequence.carried.as_mut().filter(|carried| !carried.precedes(length))?;
        carried.assume(&self.layout, length)
    }

    /// Takes the pages that a sequence lacks for `more` tokens, at most those of its context.
    pub(crate) fn take_ahead(&mut self, sequence: &mut SequenceCache, more: usize) -> Result<Vec<AddedPage>, Error> {
        let PageCount(lacking) = self.pages_ahead(sequence, more);
        let mut added = Vec::new();
        for (kind, lacking) in PageKind::ALL.into_iter().zip(lacking) {
            for _ in 0..lacking {
                let page = self.take_page(kind)?;
                let table = &mut sequence.tables[kind as usize];
                added.push(AddedPage { kind, at: table.end(), page });
                table.pages.push_back(page);
            }
        }
        Ok(added)
    }

    /// Takes the pages for `more` tokens. If others share the page that is written to next, the sequence gets a page of its
    /// own for it: the copies fill that page.
    pub(crate) fn reserve(&mut self, sequence: &mut SequenceCache, more: usize) -> Result<Vec<Copy>, Error> {
        let at = sequence.tokens.len() / PAGE;
        let PageCount(needed) = self.pages_needed(sequence, more);
        let mut copies = Vec::new();
        for (kind, needed) in PageKind::ALL.into_iter().zip(needed) {
            if let Some(page) = sequence.tables[kind as usize].at(at)
                && !self.pools[kind as usize].unpublish_for_write(page)
            {
                let own = self.take_page(kind)?;
                copies.extend(self.layout.page(kind, page).zip(self.layout.page(kind, own)));
                let table = &mut sequence.tables[kind as usize];
                table.pages[at - table.first] = own;
                self.pools[kind as usize].release(page);
            }
            for _ in 0..needed {
                let page = self.take_page(kind)?;
                sequence.tables[kind as usize].pages.push_back(page);
            }
        }
        Ok(copies)
    }

    /// Takes the pages for the tokens that an encoder reads.
    pub(crate) fn take_encoder_pages(&mut self, tokens: usize) -> Result<PageTable, Error> {
        let needed = tokens.div_ceil(PAGE);
        self.room_for(PageCount([needed, 0]))?;
        let pages = (0..needed).map(|_| self.take_page(PageKind::Full)).collect::<Result<_, _>>()?;
        Ok(PageTable { first: 0, pages })
    }

    /// Releases what an encoder left for a sequence.
    pub(crate) fn release_encoder(&mut self, encoder: Option<EncoderContext>) {
        let pages = encoder.into_iter().flat_map(|encoder| encoder.table.pages);
        pages.for_each(|page| self.pools[PageKind::Full as usize].release(page));
    }

    /// Tokens of a sequence went through the model. Pages that are full now are published; those that no later token sees are
    /// released, and stay published until they are evicted.
    pub(crate) fn append(&mut self, sequence: &mut SequenceCache, tokens: &[u32]) {
        if let Some(carried) = &mut sequence.carried {
            carried.fed(sequence.tokens.len(), tokens.len());
        }
        sequence.tokens.extend(tokens);
        let shares = self.shares_prefixes();
        while shares && (sequence.hashes.len() + 1) * PAGE <= sequence.tokens.len() {
            let at = sequence.hashes.len();
            let before = sequence.hashes.last().copied().unwrap_or_else(|| self.hasher.root(sequence.scope));
            let hash = self.hasher.extend(before, &sequence.tokens[at * PAGE..(at + 1) * PAGE]);
            sequence.hashes.push(hash);
            if self.has_states() {
                self.checkpoints.note_seen(hash);
            }
            for (pool, table) in self.pools.iter_mut().zip(&sequence.tables) {
                if let Some(page) = table.at(at) {
                    pool.publish(page, hash);
                }
            }
        }
        self.note_published(sequence);
        for kind in PageKind::ALL {
            let first = self.first_seen(kind, sequence.tokens.len());
            let table = &mut sequence.tables[kind as usize];
            while table.first < first
                && let Some(page) = table.pages.pop_front()
            {
                table.first += 1;
                self.pools[kind as usize].release(page);
            }
        }
    }

    /// A sequence that continues another one from where that is now. Pages are shared; the copies fill its state.
    pub(crate) fn fork(&mut self, from: &SequenceCache) -> Result<(SequenceCache, Vec<Copy>), Error> {
        let state = self.take_state()?;
        let encoder = from.encoder.clone();
        let cross = encoder.iter().flat_map(|encoder| &encoder.table.pages);
        cross.for_each(|page| self.pools[PageKind::Full as usize].share(*page));
        for (pool, table) in self.pools.iter_mut().zip(&from.tables) {
            table.pages.iter().for_each(|page| pool.share(*page));
        }
        let mut copies: Vec<Copy> = match (from.state, state) {
            (Some(from), Some(to)) => self.layout.state(from).zip(self.layout.state(to)).collect(),
            _ => Vec::new(),
        };
        let carried = match (from.carried, self.free_rings.pop()) {
            (Some(carried), Some(ring)) => {
                copies.extend(self.layout.ring(carried.slot()).zip(self.layout.ring(ring)));
                Some(carried.moved(ring))
            }
            (None, ring) => ring.map(|ring| Carried::new(ring, from.tokens.len())),
            (Some(_), None) => None,
        };
        let (tokens, tables, hashes) = (from.tokens.clone(), from.tables.clone(), from.hashes.clone());
        let scope = from.scope;
        let forked = SequenceCache { tokens, tables, hashes, state, scope, branch: 0, encoder, mark: None, carried };
        Ok((forked, copies))
    }

    /// Shortens a sequence to `length` tokens; gives what must be zero then. A recurrent state has no way back but to the start, nor
    /// have layers with a window, once the pages that the next token would see were released and evicted.
    pub(crate) fn truncate(&mut self, sequence: &mut SequenceCache, length: usize) -> Result<Vec<Range>, Error> {
        let now = sequence.tokens.len();
        let no_way = |why| Error::NoWayBack { length: now, asked: length, why };
        let earlier = self.released(sequence, length).ok_or(no_way("what a window saw there is gone"))?;
        if sequence.state.is_some() && length > 0 {
            return Err(no_way("the model keeps no tokens, only a state"));
        }
        self.shorten(sequence, length, earlier);
        sequence.carried.iter_mut().for_each(|carried| carried.shorten(length));
        Ok(sequence.state.into_iter().flat_map(|state| self.layout.state(state)).collect())
    }

    /// Shortens all of a sequence but its state.
    fn truncate_caches(&mut self, sequence: &mut SequenceCache, length: usize) -> Result<(), Error> {
        let no_way =
            Error::NoWayBack { length: sequence.tokens.len(), asked: length, why: "what a window saw there is gone" };
        let earlier = self.released(sequence, length).ok_or(no_way)?;
        self.shorten(sequence, length, earlier);
        Ok(())
    }

    fn shorten(&mut self, sequence: &mut SequenceCache, length: usize, earlier: [Vec<Page>; KINDS]) {
        sequence.tokens.truncate(length);
        sequence.hashes.truncate(length / PAGE);
        for (kind, earlier) in PageKind::ALL.into_iter().zip(earlier) {
            let first = self.first_seen(kind, length);
            let (pool, table) = (&mut self.pools[kind as usize], &mut sequence.tables[kind as usize]);
            while table.end() > length.div_ceil(PAGE).max(table.first)
                && let Some(page) = table.pages.pop_back()
            {
                pool.release(page);
            }
            table.first = first.min(table.first);
            for page in earlier.into_iter().rev() {
                pool.share(page);
                table.pages.push_front(page);
            }
        }
    }

    /// Pages that were released and that the token at index `length` sees, by kind; none if one of them was evicted.
    fn released(&self, sequence: &SequenceCache, length: usize) -> Option<[Vec<Page>; KINDS]> {
        let mut all: [Vec<Page>; KINDS] = Default::default();
        for (kind, released) in PageKind::ALL.into_iter().zip(&mut all) {
            let end = sequence.tables[kind as usize].first.min(length.div_ceil(PAGE));
            for at in self.first_seen(kind, length)..end {
                let hash = sequence.hashes.get(at)?;
                released.push(self.pools[kind as usize].find(*hash)?);
            }
        }
        Some(all)
    }

    /// Releases everything that a sequence holds.
    pub(crate) fn close(&mut self, sequence: SequenceCache) {
        let mut sequence = sequence;
        self.unmark(&mut sequence);
        self.release_tables(&sequence.tables);
        self.release_encoder(sequence.encoder);
        self.free_states.extend(sequence.state);
        self.free_rings.extend(sequence.carried.map(|carried| carried.slot()));
    }

    /// Releases pages, the last ones first: the pool evicts what came back first, and without its first page nothing of a prefix
    /// can be found.
    fn release_tables(&mut self, tables: &[PageTable; KINDS]) {
        for (pool, table) in self.pools.iter_mut().zip(tables) {
            table.pages.iter().rev().for_each(|page| pool.release(*page));
        }
    }
}
