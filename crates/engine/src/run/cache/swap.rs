//! Sequences that leave the device and come back: full pages go to host memory under their prefix hash, where others find them too.

use super::lru::Blob;
use super::table::PageTable;
use super::{EncoderContext, KINDS, KvCache, Load, PageKind, SequenceCache};
use crate::Error;
use crate::arch::PAGE;
use crate::executor::Range;

/// What a sequence that left the device takes in host memory.
#[derive(Debug)]
pub(crate) struct Swapped {
    /// Its full pages that have a hash, by kind, from the first that it sees on.
    pages: [Vec<Blob>; KINDS],
    /// All else.
    rest: Blob,
}

impl Swapped {
    /// Bytes of host memory.
    pub(crate) fn bytes(&self) -> usize {
        self.pages.iter().flatten().map(|blob| blob.len()).sum::<usize>() + self.rest.len()
    }
}

/// What must be read before a sequence leaves the device: each list becomes one blob.
#[derive(Debug)]
pub(crate) struct SwapPlan {
    pub(crate) pages: Vec<Vec<Range>>,
    pub(crate) rest: Vec<Range>,
}

impl KvCache {
    /// What must be read of a sequence before it leaves the device.
    pub(crate) fn swap_plan(&self, sequence: &SequenceCache) -> SwapPlan {
        let pages = PageKind::ALL.into_iter().zip(&sequence.tables).flat_map(|(kind, table)| {
            let full = table.pages.iter().take(sequence.hashes.len().saturating_sub(table.first));
            full.map(move |page| self.layout.page(kind, *page).collect())
        });
        SwapPlan { pages: pages.collect(), rest: self.ranges_from(sequence, sequence.hashes.len()) }
    }

    /// Releases pages and state of a sequence whose contents were read as its [`SwapPlan`] says.
    pub(crate) fn swap_out(&mut self, sequence: &mut SequenceCache, pages: Vec<Blob>, rest: Blob) -> Swapped {
        let (hashes, mut blobs) = (sequence.hashes.clone(), pages.into_iter());
        let pages = PageKind::ALL.map(|kind| {
            let first = sequence.tables[kind as usize].first;
            let full = hashes.get(first..).unwrap_or_default();
            let count = if self.layout.has(kind) { full.len() } else { 0 };
            let pages: Vec<Blob> = blobs.by_ref().take(count).collect();
            for (hash, blob) in full.iter().zip(&pages) {
                self.keep_page(kind, *hash, Blob::clone(blob));
            }
            pages
        });
        let empty = self.empty_tables(sequence.tokens.len());
        let tables = std::mem::replace(&mut sequence.tables, empty);
        self.release_tables(&tables);
        let cross = sequence.encoder.as_mut().map(|encoder| std::mem::take(&mut encoder.table));
        self.release_encoder(cross.map(|table| EncoderContext { table, tokens: 0 }));
        self.free_states.extend(sequence.state.take());
        self.free_rings.extend(sequence.carried.take().map(|carried| carried.slot()));
        Swapped { pages, rest }
    }

    /// Brings a sequence back: pages that the device still has are shared, all others are loaded.
    pub(crate) fn swap_in(&mut self, sequence: &mut SequenceCache, swapped: &Swapped) -> Result<Vec<Load>, Error> {
        self.room_for(self.pages_needed(sequence, 0))?;
        sequence.state = self.take_state()?;
        sequence.carried = self.take_ring(sequence.tokens.len());
        let mut loads = Vec::new();
        for (kind, blobs) in PageKind::ALL.into_iter().zip(&swapped.pages) {
            let first = sequence.tables[kind as usize].first;
            for (at, blob) in (first..).zip(blobs) {
                let hash = sequence.hashes[at];
                let page = match self.pools[kind as usize].find(hash) {
                    Some(page) => {
                        self.pools[kind as usize].share(page);
                        page
                    }
                    None => {
                        let page = self.take_page(kind)?;
                        self.pools[kind as usize].publish(page, hash);
                        let to = self.layout.page(kind, page).collect();
                        loads.push(Load { to, blob: Blob::clone(blob), page: Some((kind, page)) });
                        page
                    }
                };
                sequence.tables[kind as usize].pages.push_back(page);
            }
        }
        self.note_published(sequence);
        self.take_missing(sequence)?;
        let to = self.ranges_from(sequence, sequence.hashes.len());
        loads.push(Load { to, blob: Blob::clone(&swapped.rest), page: None });
        Ok(loads)
    }

    /// Takes the pages that a sequence lacks for its tokens.
    fn take_missing(&mut self, sequence: &mut SequenceCache) -> Result<(), Error> {
        if let Some(encoder) = sequence.encoder.as_ref().filter(|encoder| encoder.table.is_empty()) {
            let table = self.take_encoder_pages(encoder.tokens)?;
            sequence.encoder = Some(EncoderContext { table, tokens: encoder.tokens });
        }
        self.reserve(sequence, 0).map(drop)
    }

    /// Makes an empty sequence one of these tokens, whose contents come from elsewhere: [`KvCache::ranges`] says where they go.
    pub(crate) fn restore(&mut self, sequence: &mut SequenceCache, tokens: &[u32]) -> Result<(), Error> {
        (sequence.tokens, sequence.tables) = (tokens.to_vec(), self.empty_tables(tokens.len()));
        self.room_for(self.pages_needed(sequence, 0))?;
        self.take_missing(sequence)
    }

    /// Tables without pages for a sequence of `tokens` tokens.
    fn empty_tables(&self, tokens: usize) -> [PageTable; KINDS] {
        PageKind::ALL.map(|kind| PageTable { first: self.first_seen(kind, tokens), ..PageTable::default() })
    }

    /// Everything that is cached of a sequence: the rows of its tokens in every cache, as far as later tokens see them, and its
    /// state.
    pub(crate) fn ranges(&self, sequence: &SequenceCache) -> Vec<Range> {
        self.ranges_from(sequence, 0)
    }

    /// The same without the pages before this one.
    fn ranges_from(&self, sequence: &SequenceCache, page: usize) -> Vec<Range> {
        let own = PageKind::ALL.into_iter().zip(&sequence.tables);
        let own = own.map(|(kind, table)| (kind, table, sequence.tokens.len(), page));
        let cross = sequence.encoder.iter().map(|encoder| (PageKind::Full, &encoder.table, encoder.tokens, 0));
        let mut ranges = Vec::new();
        for (kind, table, tokens, from) in own.chain(cross) {
            for (at, &page) in (table.first..).zip(&table.pages).filter(|(at, _)| *at >= from) {
                ranges.extend(self.layout.rows(kind, page, tokens.saturating_sub(at * PAGE).min(PAGE)));
            }
        }
        ranges.extend(sequence.state.into_iter().flat_map(|state| self.layout.state(state)));
        ranges.retain(|range| range.bytes > 0);
        ranges
    }

    /// Bytes that are cached of a sequence of `tokens` tokens.
    pub(crate) fn bytes_of_tokens(&self, tokens: usize) -> usize {
        let rows = |kind| tokens - self.first_seen(kind, tokens) * PAGE;
        let pages: usize = PageKind::ALL.into_iter().map(|kind| self.layout.row_bytes(kind, rows(kind))).sum();
        pages + self.layout.state_bytes()
    }

    /// Bytes that are cached of a sequence.
    pub(crate) fn bytes(&self, sequence: &SequenceCache) -> usize {
        let cross = sequence.encoder.as_ref().map_or(0, |encoder| self.bytes_of_tokens(encoder.tokens));
        self.bytes_of_tokens(sequence.tokens.len()) + cross
    }
}
