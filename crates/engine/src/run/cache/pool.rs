//! The pages of one kind of cache: which sequences hold them, and which full pages are found again by their prefix hash.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

use super::events::PageChange;
use super::hash::PrefixHash;

/// A page: its rows are `number * PAGE ..` of every cache of its kind.
pub(crate) type Page = u32;

/// What is known of one page.
#[derive(Clone, Copy, Debug, Default)]
struct PageEntry {
    /// Sequences that hold it.
    holders: u32,
    /// The prefix that ends with it, once it is full and published.
    hash: Option<PrefixHash>,
    /// When it was last released, for published pages without holders.
    idle_since: u64,
}

/// Pages with reference counts and an index of those that are published.
#[derive(Debug)]
pub(crate) struct PagePool {
    entries: Vec<PageEntry>,
    free: Vec<Page>,
    published: HashMap<PrefixHash, Page>,
    /// Published pages without holders, least recently used first.
    idle: BTreeMap<u64, Page>,
    clock: u64,
    /// What can be found and what no longer, where somebody wants to know.
    changes: Option<Vec<PageChange>>,
}

impl PagePool {
    /// A pool of free pages.
    pub(crate) fn new(count: usize) -> PagePool {
        let count = u32::try_from(count).expect("pages are numbered with 32 bits");
        PagePool {
            entries: vec![PageEntry::default(); count as usize],
            // The lowest numbers go first.
            free: (0..count).rev().collect(),
            published: HashMap::new(),
            idle: BTreeMap::new(),
            clock: 0,
            changes: None,
        }
    }

    /// Pages in all.
    pub(crate) fn count(&self) -> usize {
        self.entries.len()
    }

    /// Pages that can be taken: free ones, and published ones without holders.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Takes a page to write to. Without a free one, the least recently used published page without holders is evicted: the prefix
    /// that it holds, until it is written to, comes with it.
    pub(crate) fn take(&mut self) -> Option<(Page, Option<PrefixHash>)> {
        let (page, evicted) = match self.free.pop() {
            Some(page) => (page, None),
            None => {
                let (_, page) = self.idle.pop_first()?;
                (page, self.unpublish(page))
            }
        };
        self.entries[page as usize].holders = 1;
        Some((page, evicted))
    }

    /// One more sequence holds a page.
    pub(crate) fn share(&mut self, page: Page) {
        let entry = &mut self.entries[page as usize];
        if entry.holders == 0 {
            self.idle.remove(&entry.idle_since);
        }
        entry.holders += 1;
    }

    /// A sequence no longer holds a page.
    pub(crate) fn release(&mut self, page: Page) {
        let entry = &mut self.entries[page as usize];
        entry.holders -= 1;
        if entry.holders > 0 {
            return;
        }
        if entry.hash.is_some() {
            self.clock += 1;
            entry.idle_since = self.clock;
            self.idle.insert(self.clock, page);
        } else {
            self.free.push(page);
        }
    }

    /// Whether several sequences hold a page.
    pub(crate) fn is_shared(&self, page: Page) -> bool {
        self.entries[page as usize].holders > 1
    }

    /// Hides a page from others so that its only holder can write to it. `false`: several hold it, so the writer needs a copy.
    pub(crate) fn unpublish_for_write(&mut self, page: Page) -> bool {
        if self.is_shared(page) {
            return false;
        }
        self.unpublish(page);
        true
    }

    /// Hides a page; gives its prefix if no other page can be found for that.
    fn unpublish(&mut self, page: Page) -> Option<PrefixHash> {
        let hash = self.entries[page as usize].hash.take()?;
        if self.published.get(&hash) != Some(&page) {
            return None;
        }
        self.published.remove(&hash);
        self.changes.iter_mut().for_each(|changes| changes.push(PageChange { hash, is_published: false }));
        Some(hash)
    }

    /// Lets others find a full page. Where several pages hold the same prefix, the first one is found.
    pub(crate) fn publish(&mut self, page: Page, hash: PrefixHash) {
        self.entries[page as usize].hash = Some(hash);
        if let Entry::Vacant(place) = self.published.entry(hash) {
            place.insert(page);
            self.changes.iter_mut().for_each(|changes| changes.push(PageChange { hash, is_published: true }));
        }
    }

    /// Keeps what can be found and what no longer from now on.
    pub(super) fn log_changes(&mut self) {
        self.changes = Some(Vec::new());
    }

    /// What has changed since this was asked last.
    pub(super) fn take_changes(&mut self) -> Vec<PageChange> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The page that a prefix ends with.
    pub(crate) fn find(&self, hash: PrefixHash) -> Option<Page> {
        self.published.get(&hash).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::super::hash::{CacheScope, PrefixHasher};
    use super::*;

    fn hashes<const N: usize>() -> [PrefixHash; N] {
        let hasher = PrefixHasher::new();
        std::array::from_fn(|i| hasher.root(CacheScope(i as u64)))
    }

    #[test]
    fn pages_are_found_again_until_they_are_evicted() {
        let mut pool = PagePool::new(2);
        let [hash, other] = hashes();
        let a = pool.take().unwrap().0;
        pool.publish(a, hash);
        pool.release(a);
        assert_eq!((pool.available(), pool.find(hash), pool.find(other)), (2, Some(a), None));

        pool.share(a);
        let b = pool.take().unwrap().0;
        assert_eq!((pool.take(), pool.available()), (None, 0), "both are held");
        pool.release(b);
        pool.release(a);
        assert_eq!((pool.take(), pool.find(hash)), (Some((b, None)), Some(a)), "free pages go first");
        assert_eq!((pool.take(), pool.find(hash)), (Some((a, Some(hash))), None));
    }

    #[test]
    fn the_least_recently_used_page_is_evicted_first() {
        let mut pool = PagePool::new(3);
        let hashes: [PrefixHash; 3] = hashes();
        let held: Vec<Page> = hashes.iter().map(|_| pool.take().unwrap().0).collect();
        held.iter().zip(&hashes).for_each(|(page, hash)| pool.publish(*page, *hash));
        held.iter().for_each(|page| pool.release(*page));
        pool.share(held[0]);
        pool.release(held[0]);
        assert_eq!(pool.take(), Some((held[1], Some(hashes[1]))));
        assert_eq!(pool.take(), Some((held[2], Some(hashes[2]))));
        assert_eq!(pool.find(hashes[0]), Some(held[0]));
    }

    #[test]
    fn only_a_single_holder_writes_and_what_it_writes_to_is_hidden() {
        let mut pool = PagePool::new(2);
        let [hash] = hashes();
        let a = pool.take().unwrap().0;
        pool.publish(a, hash);
        pool.share(a);
        assert!(!pool.unpublish_for_write(a));
        pool.release(a);
        assert!(pool.unpublish_for_write(a));
        assert_eq!(pool.find(hash), None);
        pool.release(a);
        assert_eq!(pool.available(), 2);
    }
}
