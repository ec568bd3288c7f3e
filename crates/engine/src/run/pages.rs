//! Which pages of the key-value caches belong to whom. Full pages are found again by what they hold: sequences that begin alike
//! share the pages of their common beginning.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher as _, RandomState};

use crate::arch::PAGE;

/// A page: its rows are `number * PAGE ..` of every cache.
pub(crate) type Page = u32;

/// What a page and all pages before it hold. Two hashes with keys of this process, so that nobody can make two texts meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Chain([u64; 2]);

/// What is known of one page.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// Sequences that hold it.
    holders: u32,
    /// What it holds, once it is full and others may find it.
    chain: Option<Chain>,
    /// When it was last given back, for pages without holders that can still be found.
    idle_since: u64,
}

/// The pages of an engine.
#[derive(Debug)]
pub(crate) struct Pages {
    entries: Vec<Entry>,
    free: Vec<Page>,
    known: HashMap<Chain, Page>,
    /// Pages without holders that can still be found, oldest first.
    idle: BTreeMap<u64, Page>,
    clock: u64,
    keys: [RandomState; 2],
}

impl Pages {
    /// So many pages, all free.
    pub(crate) fn new(count: usize) -> Pages {
        let count = u32::try_from(count).expect("pages are numbered with 32 bits");
        Pages {
            entries: vec![Entry::default(); count as usize],
            // The lowest numbers go first.
            free: (0..count).rev().collect(),
            known: HashMap::new(),
            idle: BTreeMap::new(),
            clock: 0,
            keys: [RandomState::new(), RandomState::new()],
        }
    }

    /// Pages in all.
    pub(crate) fn count(&self) -> usize {
        self.entries.len()
    }

    /// Pages that can be had: free ones, and those that are only kept in case somebody begins alike.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Takes a page to write to. Beginnings that nobody has used for longest are forgotten first.
    pub(crate) fn take(&mut self) -> Option<Page> {
        let page = match self.free.pop() {
            Some(page) => page,
            None => {
                let (_, page) = self.idle.pop_first()?;
                self.forget(page);
                page
            }
        };
        self.entries[page as usize].holders = 1;
        Some(page)
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
    pub(crate) fn give_back(&mut self, page: Page) {
        let entry = &mut self.entries[page as usize];
        entry.holders -= 1;
        if entry.holders > 0 {
            return;
        }
        if entry.chain.is_some() {
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

    /// Whether the only holder may write to a page. One that can be found is hidden first.
    pub(crate) fn may_write(&mut self, page: Page) -> bool {
        if self.entries[page as usize].holders > 1 {
            return false;
        }
        self.forget(page);
        true
    }

    fn forget(&mut self, page: Page) {
        if let Some(chain) = self.entries[page as usize].chain.take()
            && self.known.get(&chain) == Some(&page)
        {
            self.known.remove(&chain);
        }
    }

    /// What a page holds after `before`: for the first page a number that keeps owners apart.
    pub(crate) fn chain(&self, before: Result<Chain, u64>, tokens: &[u32]) -> Chain {
        debug_assert_eq!(tokens.len(), PAGE, "only full pages are shared");
        Chain([0, 1].map(|i: usize| self.keys[i].hash_one((before.map(|chain| chain.0), tokens))))
    }

    /// Lets others find a full page. The first one that holds a text is the one that is found.
    pub(crate) fn publish(&mut self, page: Page, chain: Chain) {
        self.entries[page as usize].chain = Some(chain);
        self.known.entry(chain).or_insert(page);
    }

    /// The page that holds this.
    pub(crate) fn find(&self, chain: Chain) -> Option<Page> {
        self.known.get(&chain).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_found_again_until_they_are_needed() {
        let mut pages = Pages::new(2);
        let text = [7; PAGE];
        let (a, chain) = (pages.take().unwrap(), pages.chain(Err(0), &text));
        pages.publish(a, chain);
        pages.give_back(a);
        assert_eq!((pages.available(), pages.find(chain)), (2, Some(a)));
        assert_eq!(pages.find(pages.chain(Err(1), &text)), None, "another owner's text");
        assert_eq!(pages.find(pages.chain(Ok(chain), &text)), None, "the same text elsewhere");

        pages.share(a);
        let b = pages.take().unwrap();
        assert_eq!((pages.take(), pages.available()), (None, 0), "both are held");
        pages.give_back(b);
        pages.give_back(a);
        assert_eq!((pages.take(), pages.find(chain)), (Some(b), Some(a)), "unknown pages go first");
        assert_eq!((pages.take(), pages.find(chain)), (Some(a), None));
    }

    #[test]
    fn the_beginning_that_was_not_used_for_longest_goes_first() {
        let mut pages = Pages::new(3);
        let chains: Vec<Chain> = (0..3).map(|i| pages.chain(Err(0), &[i; PAGE])).collect();
        let held: Vec<Page> = chains.iter().map(|_| pages.take().unwrap()).collect();
        held.iter().zip(&chains).for_each(|(page, chain)| pages.publish(*page, *chain));
        held.iter().for_each(|page| pages.give_back(*page));
        // The first is used again.
        pages.share(held[0]);
        pages.give_back(held[0]);
        assert_eq!(pages.take(), Some(held[1]));
        assert_eq!(pages.take(), Some(held[2]));
        assert_eq!(pages.find(chains[0]), Some(held[0]));
    }

    #[test]
    fn only_a_single_holder_writes_and_what_it_writes_to_is_hidden() {
        let mut pages = Pages::new(2);
        let (a, chain) = (pages.take().unwrap(), pages.chain(Err(0), &[1; PAGE]));
        pages.publish(a, chain);
        pages.share(a);
        assert!(!pages.may_write(a));
        pages.give_back(a);
        assert!(pages.may_write(a));
        assert_eq!(pages.find(chain), None);
        pages.give_back(a);
        assert_eq!(pages.available(), 2);
    }
}
