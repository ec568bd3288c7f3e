//! What sequences remember with: the pages of each in the caches. They are shared by texts that begin alike, copied before two
//! write to one, given back once no token can see them, moved to host memory, and saved.

use std::collections::VecDeque;
use std::ops::Add;

use super::engine::{Engine, Sequence, SequenceId};
use super::pages::{Chain, Page, Pages};
use super::source::Answered;
use crate::Error;
use crate::arch::{PAGE, Room, pages_of_window};
use crate::executor::Range;
use crate::plan::{Fixed, SlotKind};
use crate::state;

/// Kinds of caches: those of layers that see everything, and those of layers with a window.
pub(crate) const KINDS: usize = 2;

/// Pages of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count([usize; KINDS]);

impl Count {
    /// So many of every kind.
    pub(crate) fn each(n: usize) -> Count {
        Count([n; KINDS])
    }
}

impl Add for Count {
    type Output = Count;

    fn add(self, other: Count) -> Count {
        Count(std::array::from_fn(|kind| self.0[kind] + other.0[kind]))
    }
}

impl std::iter::Sum for Count {
    fn sum<I: Iterator<Item = Count>>(counts: I) -> Count {
        counts.fold(Count::default(), Add::add)
    }
}

/// The caches of one kind: their pages have numbers of their own.
#[derive(Debug)]
pub(super) struct Pool {
    kind: SlotKind,
    /// What its pages are called in messages.
    what: &'static str,
    /// Whether any layer has such a cache.
    is_used: bool,
    pages: Pages,
    /// Tokens that its layers see; none for all.
    window: Option<usize>,
}

/// The pools of a model with this much room.
pub(super) fn pools(fixed: &Fixed, room: &Room, window: Option<usize>) -> [Pool; KINDS] {
    let pool = |kind: SlotKind, what, pages, window| {
        let is_used = fixed.slots.iter().any(|slot| slot.kind == kind);
        Pool { what, is_used, pages: Pages::new(if is_used { pages } else { 0 }), window, kind }
    };
    [
        pool(SlotKind::Cache, "pages of the cache", room.pages, None),
        pool(SlotKind::WindowCache, "pages of the cache of windows", room.window_pages, window),
    ]
}

impl Pool {
    /// The first page that the token behind so many sees. No token after that sees any before it.
    fn first_seen(&self, tokens: usize) -> usize {
        self.window.map_or(0, |window| (tokens + 1).saturating_sub(window) / PAGE)
    }
}

/// The pages of one sequence in one pool, one after the other.
#[derive(Clone, Debug, Default)]
pub(crate) struct Held {
    /// Which page of the text the first one is. Those before it were given back.
    first: usize,
    pages: VecDeque<Page>,
}

impl Held {
    /// The first pages of a cache, for the first so many tokens of a text that is alone there.
    pub(crate) fn from_the_start(tokens: usize) -> Held {
        Held { first: 0, pages: (0..).take(tokens.div_ceil(PAGE)).collect() }
    }

    /// The page behind the last one.
    fn end(&self) -> usize {
        self.first + self.pages.len()
    }

    /// Page number `at` of the text, if it is held.
    pub(super) fn at(&self, at: usize) -> Option<Page> {
        self.pages.get(at.checked_sub(self.first)?).copied()
    }

    /// The pages from the beginning of the text on; none if that was given back.
    pub(super) fn beginning(&self) -> impl Iterator<Item = Page> {
        self.pages.iter().copied().take(if self.first == 0 { usize::MAX } else { 0 })
    }

    /// Whether nothing is held.
    pub(super) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The entries of a page table. A page that was given back is never seen; in its place stands one that is held, so that whoever
    /// reads a whole tile of keys reads rows of this very sequence.
    pub(super) fn entries(&self) -> impl Iterator<Item = Page> {
        let before = self.pages.front().into_iter().cycle().take(self.first);
        before.chain(&self.pages).copied()
    }
}

impl Engine {
    /// Pages of the caches that can be had now, and in all: of layers that see everything, where there are such.
    pub fn pages(&self) -> (usize, usize) {
        let pool = self.pools.iter().find(|pool| pool.is_used).unwrap_or(&self.pools[0]);
        (pool.pages.available(), pool.pages.count())
    }

    /// The same of layers that see the last tokens alone, where those have pages of their own.
    pub fn window_pages(&self) -> Option<(usize, usize)> {
        let pool = &self.pools[1];
        pool.is_used.then(|| (pool.pages.available(), pool.pages.count()))
    }

    /// Whether so many pages can be had now.
    pub(crate) fn room_for(&self, wanted: Count) -> Result<(), Error> {
        for (pool, needed) in self.pools.iter().zip(wanted.0) {
            let free = pool.pages.available();
            if pool.is_used && needed > free {
                return Err(Error::NoRoom { what: pool.what, needed, free, all: pool.pages.count() });
            }
        }
        Ok(())
    }

    /// Pages that a new text of so many tokens takes, with so many others that go on from it.
    pub(crate) fn pages_of_text(&self, tokens: usize, texts: usize) -> Count {
        let of = |kind: usize| {
            let most = self.pools[kind].window.map_or(usize::MAX, pages_of_window);
            tokens.div_ceil(PAGE).min(most) + texts
        };
        Count(std::array::from_fn(of))
    }

    /// How many more pages a sequence needs for so many more tokens.
    pub(crate) fn pages_needed(&self, id: SequenceId, more: usize) -> Count {
        let Some(sequence) = self.sequences.get(&id) else { return Count::default() };
        let end = (sequence.tokens.len() + more).div_ceil(PAGE);
        let again = self.source_pages_needed(id);
        let of = |kind: usize| match self.pools[kind].is_used {
            true => end.saturating_sub(sequence.held[kind].end()) + if kind == 0 { again } else { 0 },
            false => 0,
        };
        Count(std::array::from_fn(of))
    }

    /// Pages that feeding so many more tokens takes: new ones, and one for an end that others share.
    pub(crate) fn pages_wanted(&self, id: SequenceId, more: usize) -> Count {
        let shared = |kind: usize| usize::from(self.shares_its_end(id, kind));
        self.pages_needed(id, more) + Count(std::array::from_fn(shared))
    }

    /// Whether the page that the next token is written to belongs to another sequence, too.
    fn shares_its_end(&self, id: SequenceId, kind: usize) -> bool {
        let Some(sequence) = self.sequences.get(&id) else { return false };
        let page = sequence.held[kind].at(sequence.tokens.len() / PAGE);
        page.is_some_and(|page| self.pools[kind].pages.is_shared(page))
    }

    /// Pages that a sequence lacks for so many more tokens, at most those of its context.
    pub(crate) fn pages_ahead(&self, id: SequenceId, more: usize) -> Count {
        self.pages_needed(id, more.min(self.context().saturating_sub(self.length(id))))
    }

    /// Takes those pages; gives each with its kind and its place in the sequence.
    pub(super) fn take_pages_ahead(&mut self, id: SequenceId, more: usize) -> Result<Vec<(usize, usize, Page)>, Error> {
        let Count(lacking) = self.pages_ahead(id, more);
        let mut taken = Vec::new();
        for (kind, lacking) in lacking.into_iter().enumerate() {
            for _ in 0..lacking {
                let page = self.take_page(kind)?;
                let held = &mut self.sequence_mut(id)?.held[kind];
                taken.push((kind, held.end(), page));
                held.pages.push_back(page);
            }
        }
        Ok(taken)
    }

    fn take_page(&mut self, kind: usize) -> Result<Page, Error> {
        let pool = &mut self.pools[kind];
        let (what, all) = (pool.what, pool.pages.count());
        pool.pages.take().ok_or(Error::NoRoom { what, needed: 1, free: 0, all })
    }

    /// Takes the pages for so many more tokens; the page that is written to next becomes the sequence's own.
    pub(super) fn make_room(&mut self, id: SequenceId, more: usize) -> Result<(), Error> {
        let at = self.length(id) / PAGE;
        let Count(needed) = self.pages_needed(id, more);
        for (kind, needed) in needed.into_iter().enumerate() {
            if let Some(page) = self.sequence(id)?.held[kind].at(at)
                && !self.pools[kind].pages.may_write(page)
            {
                let own = self.take_page(kind)?;
                let copies = self.page_ranges(kind, page).into_iter().zip(self.page_ranges(kind, own));
                self.executor.copy(&copies.collect::<Vec<_>>())?;
                let held = &mut self.sequence_mut(id)?.held[kind];
                held.pages[at - held.first] = own;
                self.pools[kind].pages.give_back(page);
            }
            for _ in 0..needed {
                let page = self.take_page(kind)?;
                self.sequence_mut(id)?.held[kind].pages.push_back(page);
            }
        }
        Ok(())
    }

    /// Takes the pages for a text of so many tokens that a sequence answers.
    pub(super) fn take_source_pages(&mut self, tokens: usize) -> Result<Held, Error> {
        let needed = tokens.div_ceil(PAGE);
        self.room_for(Count([needed, 0]))?;
        let pages = (0..needed).map(|_| self.take_page(0)).collect::<Result<_, _>>()?;
        Ok(Held { first: 0, pages })
    }

    /// Gives back the pages of a text that was answered.
    pub(super) fn give_back_source(&mut self, source: Option<Answered>) {
        let pages = source.into_iter().flat_map(|source| source.held.pages);
        pages.for_each(|page| self.pools[0].pages.give_back(page));
    }

    /// Tokens of a sequence went through the model.
    pub(super) fn append(&mut self, id: SequenceId, tokens: &[u32]) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        sequence.tokens.extend(tokens);
        // Pages that are full now can be found by others. A state belongs to all tokens at once, so there none can.
        while !self.has_states && self.has_caches && (sequence.chains.len() + 1) * PAGE <= sequence.tokens.len() {
            let at = sequence.chains.len();
            let before = sequence.chains.last().copied().ok_or(sequence.owner);
            let chain = self.pools[0].pages.chain(before, &sequence.tokens[at * PAGE..(at + 1) * PAGE]);
            sequence.chains.push(chain);
            for (pool, held) in self.pools.iter_mut().zip(&sequence.held) {
                if let Some(page) = held.at(at) {
                    pool.pages.publish(page, chain);
                }
            }
        }
        // What no token to come can see is free for others, and can be found until somebody needs the page.
        for (pool, held) in self.pools.iter_mut().zip(&mut sequence.held) {
            while held.first < pool.first_seen(sequence.tokens.len())
                && let Some(page) = held.pages.pop_front()
            {
                held.first += 1;
                pool.pages.give_back(page);
            }
        }
    }

    /// Whether sequences that begin alike share the pages of their beginning.
    pub(super) fn shares_beginnings(&self) -> bool {
        // A state remembers everything at once: there is no beginning of it to share.
        // Where tokens see the whole text, keys of a beginning depend on its end.
        // Where a text answers another, keys depend on that one.
        self.has_caches && !self.has_states && !self.sees_all() && self.start().is_none()
    }

    /// Gives an empty sequence the pages that hold the beginning of `tokens` already, and says how many tokens that are. At
    /// least one token is left to be fed, because somebody wants its logits.
    pub fn reuse(&mut self, id: SequenceId, tokens: &[u32]) -> Result<usize, Error> {
        let sequence = self.sequence(id)?;
        if !sequence.tokens.is_empty() || !self.shares_beginnings() || tokens.is_empty() {
            return Ok(0);
        }
        let (mut before, mut chains) = (Err(sequence.owner), Vec::new());
        for page in tokens[..tokens.len() - 1].chunks_exact(PAGE) {
            let chain = self.pools[0].pages.chain(before, page);
            // Layers that see everything need every page.
            if self.pools[0].is_used && self.pools[0].pages.find(chain).is_none() {
                break;
            }
            chains.push(chain);
            before = Ok(chain);
        }
        while !self.windows_know(&chains) {
            chains.pop();
        }
        let (count, held) = (chains.len(), self.found(&chains));
        for (pool, held) in self.pools.iter_mut().zip(&held) {
            held.pages.iter().for_each(|page| pool.pages.share(*page));
        }
        let sequence = self.sequence_mut(id)?;
        sequence.tokens.extend(&tokens[..count * PAGE]);
        (sequence.held, sequence.chains) = (held, chains);
        Ok(count * PAGE)
    }

    /// Whether layers with a window have all pages that the token behind these sees.
    fn windows_know(&self, chains: &[Chain]) -> bool {
        let windows = self.pools.iter().filter(|pool| pool.is_used && pool.window.is_some());
        let seen = |pool: &Pool| pool.first_seen(chains.len() * PAGE);
        windows.into_iter().all(|pool| chains[seen(pool)..].iter().all(|chain| pool.pages.find(*chain).is_some()))
    }

    /// The pages that a text of full pages goes on with; all of them are there.
    fn found(&self, chains: &[Chain]) -> [Held; KINDS] {
        std::array::from_fn(|kind| {
            let pool = &self.pools[kind];
            let first = pool.first_seen(chains.len() * PAGE);
            let pages = chains[first..].iter().filter_map(|chain| pool.pages.find(*chain));
            Held { first, pages: if pool.is_used { pages.collect() } else { VecDeque::new() } }
        })
    }

    /// A sequence that goes on from where another one is now.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId, Error> {
        self.usable(id)?;
        let state = self.take_state()?;
        let from = self.sequence(id)?;
        let (tokens, held, chains) = (from.tokens.clone(), from.held.clone(), from.chains.clone());
        let (owner, from_state, scales) = (from.owner, from.state, from.scales.clone());
        let source = from.source.clone();
        let answered = source.iter().flat_map(|source| &source.held.pages);
        answered.for_each(|page| self.pools[0].pages.share(*page));
        for (pool, held) in self.pools.iter_mut().zip(&held) {
            held.pages.iter().for_each(|page| pool.pages.share(*page));
        }
        if let (Some(from), Some(to)) = (from_state, state) {
            let copies: Vec<_> = self.state_ranges(from).into_iter().zip(self.state_ranges(to)).collect();
            self.executor.copy(&copies)?;
        }
        Ok(self.add(Sequence { tokens, held, source, chains, state, owner, scales, ..Sequence::default() }))
    }

    /// Forgets a sequence from this token on. A recurrent state has no way back but to the beginning; nor have layers with a
    /// window, once the pages that the next token would see were given back and taken by others.
    pub fn truncate(&mut self, id: SequenceId, length: usize) -> Result<(), Error> {
        let sequence = self.sequence(id)?;
        let now = sequence.tokens.len();
        if length >= now && !sequence.broken {
            return Ok(());
        }
        let length = length.min(now);
        let no_way = |why| Error::NoWayBack { length: now, asked: length, why };
        let earlier = self.earlier(sequence, length).ok_or(no_way("what a window saw there is gone"))?;
        if let Some(state) = sequence.state {
            if length > 0 {
                return Err(no_way("the model keeps no tokens, only a state"));
            }
            let ranges = self.state_ranges(state);
            self.executor.zero(&ranges)?;
        }
        let sequence = self.sequences.get_mut(&id).ok_or(Error::NoSequence { why: "it was closed" })?;
        sequence.tokens.truncate(length);
        sequence.chains.truncate(length / PAGE);
        // Rows past the length are written anew before anybody reads them, so a failed run leaves nothing behind.
        sequence.broken = false;
        for ((pool, held), earlier) in self.pools.iter_mut().zip(&mut sequence.held).zip(earlier) {
            while held.end() > length.div_ceil(PAGE).max(held.first)
                && let Some(page) = held.pages.pop_back()
            {
                pool.pages.give_back(page);
            }
            held.first = pool.first_seen(length).min(held.first);
            for page in earlier.into_iter().rev() {
                pool.pages.share(page);
                held.pages.push_front(page);
            }
        }
        Ok(())
    }

    /// Pages that were given back and that the token behind so many sees, of each kind: if nobody has taken them.
    fn earlier(&self, sequence: &Sequence, length: usize) -> Option<[Vec<Page>; KINDS]> {
        let mut all: [Vec<Page>; KINDS] = Default::default();
        for ((pool, held), earlier) in self.pools.iter().zip(&sequence.held).zip(&mut all) {
            let gone = pool.first_seen(length)..held.first.min(length.div_ceil(PAGE));
            for at in gone {
                earlier.push(sequence.chains.get(at).and_then(|chain| pool.pages.find(*chain))?);
            }
        }
        Some(all)
    }

    /// Gives back everything that a sequence holds.
    pub(super) fn give_back(&mut self, held: &[Held; KINDS]) {
        for (pool, held) in self.pools.iter_mut().zip(held) {
            held.pages.iter().for_each(|page| pool.pages.give_back(*page));
        }
    }

    fn whole(&self, wanted: &SlotKind) -> impl Iterator<Item = Range> {
        let slots = (0..).zip(&self.fixed().slots).filter(move |(_, slot)| slot.kind == *wanted);
        slots.map(|(i, slot)| Range::new(i, 0, slot.bytes))
    }

    /// Where a page lies in every cache of its kind.
    fn page_ranges(&self, kind: usize, page: Page) -> Vec<Range> {
        let pool = &self.pools[kind];
        self.parts(&pool.kind, pool.pages.count(), page)
    }

    /// Where a state lies in every recurrent layer.
    pub(super) fn state_ranges(&self, state: u32) -> Vec<Range> {
        self.parts(&SlotKind::State, self.room().states, state)
    }

    /// Part number `at` of all slots of a kind, each of which holds `count` of them side by side.
    fn parts(&self, kind: &SlotKind, count: usize, at: u32) -> Vec<Range> {
        let part =
            |whole: Range| Range { offset: whole.bytes / count * at as usize, bytes: whole.bytes / count, ..whole };
        self.whole(kind).map(part).collect()
    }

    /// Everything a sequence remembers: the rows of its tokens in every cache, as far as they can be seen, and its states.
    fn memory_of(&self, sequence: &Sequence) -> Vec<Range> {
        let mut ranges = Vec::new();
        let own = sequence.held.iter().enumerate().map(|(kind, held)| (kind, held, sequence.tokens.len()));
        let answered = sequence.source.iter().map(|source| (0, &source.held, source.tokens));
        for (kind, held, tokens) in own.chain(answered) {
            for (i, &page) in (held.first..).zip(&held.pages) {
                let rows = tokens.saturating_sub(i * PAGE).min(PAGE);
                let pages = self.page_ranges(kind, page).into_iter();
                ranges.extend(pages.map(|r| Range { bytes: r.bytes / PAGE * rows, ..r }));
            }
        }
        ranges.extend(sequence.state.into_iter().flat_map(|state| self.state_ranges(state)));
        ranges.retain(|r| r.bytes > 0);
        ranges
    }

    /// The bytes that a sequence remembers with, page by page.
    pub(crate) fn remembered(&mut self, id: SequenceId) -> Result<Vec<u8>, Error> {
        self.usable(id)?;
        let ranges = self.memory_of(self.sequence(id)?);
        let mut bytes = vec![0; ranges.iter().map(|r| r.bytes).sum()];
        self.executor.gather(&ranges, &mut bytes)?;
        Ok(bytes)
    }

    /// Bytes that a sequence of so many tokens remembers with.
    pub(crate) fn remembered_bytes(&self, tokens: usize) -> usize {
        let of = |kind: &SlotKind, count: usize, times: usize| {
            self.whole(kind).map(|r| r.bytes / count * times).sum::<usize>()
        };
        let caches = self.pools.iter().filter(|pool| pool.is_used).map(|pool| {
            let rows = tokens - pool.first_seen(tokens) * PAGE;
            of(&pool.kind, pool.pages.count() * PAGE, rows)
        });
        caches.sum::<usize>() + if self.has_states { of(&SlotKind::State, self.room().states, 1) } else { 0 }
    }

    /// Bytes of the caches and states that a sequence holds.
    pub(crate) fn bytes_of(&self, id: SequenceId) -> usize {
        let answered = self.source_tokens(id);
        self.remembered_bytes(self.length(id)) + if answered > 0 { self.remembered_bytes(answered) } else { 0 }
    }

    /// Bytes that a sequence takes in host memory while it is swapped out.
    pub(crate) fn swapped_bytes(&self, id: SequenceId) -> usize {
        self.sequences.get(&id).and_then(|s| s.swapped.as_ref()).map_or(0, Vec::len)
    }

    /// Nothing is held of so many tokens, and what can be seen of them is about to be.
    fn nothing_of(&self, tokens: usize) -> [Held; KINDS] {
        std::array::from_fn(|kind| Held { first: self.pools[kind].first_seen(tokens), ..Held::default() })
    }

    /// Takes pages for what a sequence remembers, and writes it there.
    fn refill(&mut self, id: SequenceId, bytes: &[u8]) -> Result<(), Error> {
        if self.source_pages_needed(id) > 0 {
            let held = self.take_source_pages(self.source_tokens(id))?;
            self.sequence_mut(id)?.source.iter_mut().for_each(|source| source.held = held.clone());
        }
        self.make_room(id, 0)?;
        let ranges = self.memory_of(self.sequence(id)?);
        let worked = self.executor.scatter(&ranges, bytes);
        self.sequence_mut(id)?.broken = worked.is_err();
        worked
    }

    /// Makes a sequence remember what another one did ([`Engine::remembered`]).
    pub(crate) fn remember(&mut self, id: SequenceId, tokens: &[u32], bytes: &[u8]) -> Result<(), Error> {
        self.truncate(id, 0)?;
        let held = self.nothing_of(tokens.len());
        let sequence = self.sequence_mut(id)?;
        (sequence.tokens, sequence.held) = (tokens.to_vec(), held);
        self.refill(id, bytes).inspect_err(|_| drop(self.truncate(id, 0)))
    }

    /// What is saved is the beginning of a text; of one that it answers nothing is said there.
    fn has_savable_states(&self) -> Result<(), Error> {
        if self.start().is_none() {
            return Ok(());
        }
        let why = "the model reads one text and writes another, and a saved state holds one".to_owned();
        Err(Error::SavedState { why, hint: "give the prompt again: it is read at once" })
    }

    /// Everything a sequence remembers, as bytes that [`Engine::load_state`] takes: a beginning to go on from, here or in
    /// another engine with the same model.
    pub fn save_state(&mut self, id: SequenceId) -> Result<Vec<u8>, Error> {
        self.has_savable_states()?;
        let bytes = self.remembered(id)?;
        Ok(state::write(self.model(), &self.scales_of(id), self.tokens(id), &bytes))
    }

    /// Lets a sequence go on from a saved state. One of another model, or too long for the context, is refused, and nothing has
    /// changed then.
    pub fn load_state(&mut self, id: SequenceId, bytes: &[u8]) -> Result<(), Error> {
        self.has_savable_states()?;
        let (tokens, rest) = state::open(self.model(), &self.scales_of(id), bytes)?;
        if tokens.len() > self.context() {
            let why = format!("it holds {} tokens, the context has room for {}", tokens.len(), self.context());
            return Err(Error::SavedState { why, hint: "--ctx-size makes room for more" });
        }
        let needed = self.remembered_bytes(tokens.len());
        if rest.len() != needed {
            let why = format!("it remembers {} bytes, {needed} belong to its tokens", rest.len());
            let hint = "it was saved with other --cache-type or --ctx-size flags, or by another version of Kiln; save the state again";
            return Err(Error::SavedState { why, hint });
        }
        self.remember(id, &tokens, rest)?;
        // Others find its full pages, as if they had been computed here.
        self.append(id, &[]);
        Ok(())
    }

    /// Moves what a sequence remembers to host memory; its pages and its state are free for others.
    pub fn swap_out(&mut self, id: SequenceId) -> Result<(), Error> {
        let bytes = self.remembered(id)?;
        let nothing = self.nothing_of(self.length(id));
        let sequence = self.sequence_mut(id)?;
        let (held, state) = (std::mem::replace(&mut sequence.held, nothing), sequence.state.take());
        sequence.chains.clear();
        sequence.swapped = Some(bytes);
        let source =
            sequence.source.as_mut().map(|source| Answered { held: std::mem::take(&mut source.held), tokens: 0 });
        self.give_back(&held);
        self.give_back_source(source);
        self.give_back_state(state);
        Ok(())
    }

    /// Brings a sequence back.
    pub fn swap_in(&mut self, id: SequenceId) -> Result<(), Error> {
        if self.sequence(id)?.swapped.is_none() {
            return Ok(());
        }
        self.room_for(self.pages_needed(id, 0))?;
        let state = self.take_state()?;
        let sequence = self.sequence_mut(id)?;
        sequence.state = state;
        let bytes = sequence.swapped.take().unwrap_or_default();
        self.refill(id, &bytes)
    }

    /// Whether a sequence lies in host memory.
    pub fn is_swapped(&self, id: SequenceId) -> bool {
        self.sequences.get(&id).is_some_and(|s| s.swapped.is_some())
    }
}
