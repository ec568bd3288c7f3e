//! The cache without a device.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kiln_gguf::TensorType;

use super::*;
use crate::plan::SlotKind;

/// Elements of a row of the caches, and of a state.
const ROW: usize = 8;
const STATE: usize = 16;

/// What a model has.
#[derive(Clone, Copy, Default)]
struct Model {
    pages: usize,
    window: Option<usize>,
    window_pages: usize,
    states: usize,
}

impl Model {
    fn cache(self) -> KvCache {
        let mut fixed = Fixed::default();
        let mut add = |kind, rows| {
            if rows > 0 {
                fixed.add("slot", kind, TensorType::F32, [ROW, rows, 1, 1]);
            }
        };
        add(SlotKind::Weight, 3);
        add(SlotKind::Cache, self.pages * PAGE);
        add(SlotKind::Cache, self.pages * PAGE);
        add(SlotKind::WindowCache, self.window_pages * PAGE);
        add(SlotKind::State, self.states * STATE / ROW);
        let (pages, window_pages, states) = (self.pages, self.window_pages, self.states);
        let room = Room { pages, window_pages, states, ..Room::one(1000 * PAGE) };
        KvCache::new(&fixed, &room, self.window, true)
    }
}

fn text(n: usize, salt: u32) -> Vec<u32> {
    (0..n as u32).map(|i| i * i * 7 + i * 37 + salt).collect()
}

fn open(cache: &mut KvCache, scope: u64) -> SequenceCache {
    cache.open(CacheScope(scope)).unwrap().0
}

/// A sequence of these tokens, found as far as possible and fed from there.
fn fed(cache: &mut KvCache, scope: u64, tokens: &[u32]) -> (SequenceCache, usize) {
    let mut sequence = open(cache, scope);
    let found = cache.reuse(&mut sequence, tokens).tokens;
    cache.reserve(&mut sequence, tokens.len() - found).unwrap();
    cache.append(&mut sequence, &tokens[found..]);
    (sequence, found)
}

#[test]
fn a_common_prefix_is_shared_within_a_scope_and_copied_before_it_is_written_to() {
    let mut cache = Model { pages: 8, ..Model::default() }.cache();
    let tokens = text(2 * PAGE + 10, 1);
    let (first, found) = fed(&mut cache, 1, &tokens);
    assert_eq!((found, cache.pages(PageKind::Full)), (0, Some((5, 8))));
    let (second, found) = fed(&mut cache, 1, &tokens);
    assert_eq!((found, cache.pages(PageKind::Full)), (2 * PAGE, Some((4, 8))), "only the last page is its own");
    let (stranger, found) = fed(&mut cache, 2, &tokens);
    assert_eq!(found, 0, "another scope");
    cache.close(stranger);

    let (mut fork, copies) = cache.fork(&first).unwrap();
    assert_eq!((copies.len(), cache.pages(PageKind::Full)), (0, Some((4, 8))));
    assert_eq!(cache.pages_to_feed(&fork, 1), PageCount([1, 0]), "a copy of the page that both end in");
    let copies = cache.reserve(&mut fork, 1).unwrap();
    let bytes = 4 * ROW * PAGE;
    let page = |slot, page: u32| Range::new(slot, page as usize * bytes, bytes);
    let (from, to) = (first.tables[0].at(2).unwrap(), fork.tables[0].at(2).unwrap());
    assert_eq!(copies, [1, 2].map(|slot| (page(slot, from), page(slot, to))));
    [first, second, fork].into_iter().for_each(|sequence| cache.close(sequence));
    assert_eq!(cache.pages(PageKind::Full), Some((8, 8)));
}

#[test]
fn the_end_of_a_prefix_is_evicted_before_its_start() {
    let mut cache = Model { pages: 4, ..Model::default() }.cache();
    let prefix = text(3 * PAGE + 1, 1);
    let (first, _) = fed(&mut cache, 0, &prefix);
    cache.close(first);
    let (other, _) = fed(&mut cache, 0, &text(2 * PAGE, 9));
    let mut again = open(&mut cache, 0);
    assert_eq!(cache.reuse(&mut again, &prefix).tokens, 2 * PAGE, "only the last page is gone");
    cache.close(other);
}

#[test]
fn one_token_is_left_to_be_fed() {
    let mut cache = Model { pages: 4, ..Model::default() }.cache();
    let tokens = text(2 * PAGE, 1);
    let (first, _) = fed(&mut cache, 0, &tokens);
    let mut again = open(&mut cache, 0);
    assert_eq!(cache.reuse(&mut again, &tokens).tokens, PAGE);
    assert_eq!(cache.reuse(&mut again, &tokens).tokens, 0, "only an empty sequence takes a prefix");
    cache.close(first);
}

#[test]
fn window_pages_are_released_behind_the_window_and_come_back_until_they_are_evicted() {
    let mut cache = Model { pages: 16, window: Some(PAGE), window_pages: 8, states: 0 }.cache();
    let tokens = text(5 * PAGE, 3);
    let (mut first, _) = fed(&mut cache, 0, &tokens);
    assert_eq!((first.tables[1].first, first.tables[1].pages.len()), (4, 1));
    assert_eq!(first.tables[1].entries().count(), 5, "entries of released pages stand for one that is held");
    assert!(cache.truncate(&mut first, 3 * PAGE).unwrap().is_empty());
    assert_eq!((first.tables[1].first, first.tables[1].pages.len(), first.tokens.len()), (2, 1, 3 * PAGE));
    cache.append(&mut first, &[]);
    // Another sequence takes all window pages without holders.
    let (other, _) = fed(&mut cache, 1, &text(7 * PAGE, 4));
    let error = cache.truncate(&mut first, PAGE + 1).unwrap_err();
    assert!(matches!(error, Error::NoWayBack { length: 192, asked: 65, .. }), "{error}");
    cache.close(first);
    cache.close(other);
    assert_eq!((cache.pages(PageKind::Full), cache.pages(PageKind::Window)), (Some((16, 16)), Some((8, 8))));
}

#[test]
fn state_slots_are_zeroed_counted_and_copied() {
    let mut cache = Model { pages: 4, states: 2, ..Model::default() }.cache();
    let (first, zero) = cache.open(CacheScope(0)).unwrap();
    let state = |at: usize| Range::new(3, at * 4 * STATE, 4 * STATE);
    assert_eq!(zero, [state(0)]);
    let (second, copies) = cache.fork(&first).unwrap();
    assert_eq!(copies, [(state(0), state(1))]);
    let full = cache.open(CacheScope(0)).unwrap_err();
    assert!(matches!(full, Error::NoRoom { what: "states", needed: 1, free: 0, all: 2 }), "{full}");
    cache.close(second);
    assert_eq!(cache.free_states(), 1);
    cache.close(first);
}

#[test]
fn a_swapped_sequence_holds_nothing_and_gets_room_for_the_same_bytes() {
    let mut cache = Model { pages: 4, window: Some(PAGE), window_pages: 4, states: 1 }.cache();
    let (mut sequence, _) = fed(&mut cache, 0, &text(3 * PAGE + 5, 1));
    let bytes = |ranges: &[Range]| ranges.iter().map(|range| range.bytes).sum::<usize>();
    let before = bytes(&cache.ranges(&sequence));
    assert_eq!(before, cache.bytes(&sequence));
    let SwapPlan { pages, rest } = cache.swap_plan(&sequence);
    assert_eq!(bytes(&pages.concat()) + bytes(&rest), before);
    let blobs = pages.iter().map(|page| Blob::new(vec![0; bytes(page)])).collect();
    let swapped = cache.swap_out(&mut sequence, blobs, Blob::new(vec![0; bytes(&rest)]));
    assert_eq!(swapped.bytes(), before);
    assert_eq!((cache.pages(PageKind::Full), cache.free_states()), (Some((4, 4)), 1));
    assert!(cache.ranges(&sequence).is_empty());
    assert_eq!(cache.bytes(&sequence), before, "what it takes elsewhere");
    let loads = cache.swap_in(&mut sequence, &swapped).unwrap();
    assert_eq!(loads.iter().map(|load| bytes(&load.to)).sum::<usize>(), before);
    assert!(loads.iter().all(|load| bytes(&load.to) == load.blob.len()));
    assert_eq!(bytes(&cache.ranges(&sequence)), before);
    cache.close(sequence);
    assert_eq!((cache.pages(PageKind::Full), cache.free_states()), (Some((4, 4)), 1));
}

#[test]
fn what_does_not_fit_is_refused_with_the_numbers() {
    let mut cache = Model { pages: 2, ..Model::default() }.cache();
    let (first, _) = fed(&mut cache, 0, &text(100, 1));
    let second = open(&mut cache, 0);
    let full = cache.room_for(cache.pages_to_feed(&second, 1)).unwrap_err();
    assert!(matches!(full, Error::NoRoom { needed: 1, free: 0, all: 2, .. }), "{full}");
    cache.close(first);
    assert!(cache.room_for(cache.pages_to_feed(&second, 128)).is_ok());
}

fn save(cache: &mut KvCache, sequence: &SequenceCache) -> usize {
    let ranges = cache.checkpoint(sequence);
    let bytes = ranges.iter().map(|range| range.bytes).sum();
    if bytes > 0 {
        cache.save_checkpoint(sequence, Blob::new(vec![0; bytes]), Rank::Kept);
    }
    bytes
}

#[test]
fn a_hybrid_continues_where_pages_and_a_state_are_saved_at_the_same_token() {
    let mut cache = Model { pages: 8, window: Some(PAGE), window_pages: 8, states: 2 }.cache();
    assert!(!cache.shares_prefixes(), "without room for checkpoints nothing is shared");
    cache.limit_checkpoints(1 << 20);
    let tokens = text(3 * PAGE, 1);
    let mut first = open(&mut cache, 0);
    let mut feed = |cache: &mut KvCache, tokens: &[u32]| {
        cache.reserve(&mut first, tokens.len()).unwrap();
        cache.append(&mut first, tokens);
        save(cache, &first)
    };
    // At a page boundary a checkpoint is the state alone; elsewhere also the rows of the page that is not full, of three caches.
    assert_eq!(feed(&mut cache, &tokens[..PAGE]), 4 * STATE);
    assert_eq!(feed(&mut cache, &tokens[PAGE..PAGE + 10]), 4 * STATE + 3 * 10 * 4 * ROW);
    assert_eq!(cache.checkpoint(&first), [], "it is saved already");
    cache.close(first);

    for (known, cached) in [(2 * PAGE, PAGE + 10), (PAGE + 10, PAGE), (PAGE, 0)] {
        let mut again = open(&mut cache, 0);
        let Reused { tokens: found, loads, .. } = cache.reuse(&mut again, &tokens[..known]);
        assert_eq!((found, loads.len()), (cached, usize::from(cached > 0)), "of {known}");
        for Load { to, blob, .. } in loads {
            assert_eq!(to.iter().map(|range| range.bytes).sum::<usize>(), blob.len());
            assert!(to.iter().all(|range| range.bytes > 0));
        }
        cache.close(again);
    }
    assert_eq!((cache.pages(PageKind::Full), cache.pages(PageKind::Window)), (Some((8, 8)), Some((8, 8))));

    // Once the page before it is evicted, a checkpoint is of no use.
    let (other, _) = fed(&mut cache, 5, &text(8 * PAGE, 7));
    let mut again = open(&mut cache, 0);
    assert_eq!(cache.reuse(&mut again, &tokens).tokens, 0);
    cache.close(other);
    cache.close(again);
}

#[test]
fn a_prompt_that_leaves_a_known_prefix_says_where() {
    let mut cache = Model { states: 2, ..Model::default() }.cache();
    cache.limit_checkpoints(1 << 20);
    let system = text(3 * PAGE, 1);
    let (first, _) = fed(&mut cache, 0, &[&system[..], &text(PAGE, 2)].concat());
    let mut second = open(&mut cache, 0);
    assert_eq!(cache.reuse(&mut second, &[&system[..], &text(PAGE, 3)].concat()).tokens, 0, "no state was saved");
    assert_eq!(second.branch, 3 * PAGE);
    cache.close(first);
    cache.close(second);
}

/// Pretends to read the pages that were evicted.
fn demote(cache: &mut KvCache) -> usize {
    let demotions = cache.take_demotions();
    let bytes = |from: &[Range]| from.iter().map(|range| range.bytes).sum();
    demotions.iter().for_each(|d| cache.keep_page(d.kind, d.hash, Blob::new(vec![0; bytes(&d.from)])));
    demotions.len()
}

#[test]
fn evicted_pages_are_found_in_host_memory_and_loaded_into_others() {
    let mut cache = Model { pages: 4, ..Model::default() }.cache();
    cache.limit_host_pages(1 << 20);
    let tokens = text(3 * PAGE + 1, 1);
    let (first, _) = fed(&mut cache, 0, &tokens);
    cache.close(first);
    // Two pages are evicted: the last two of the prefix.
    let (other, _) = fed(&mut cache, 0, &text(2 * PAGE + 1, 9));
    assert_eq!(demote(&mut cache), 2);
    let mut again = open(&mut cache, 0);
    // No page is free for them: the one on the device is found all the same, and nothing else has changed.
    assert_eq!(cache.reuse(&mut again, &tokens).tokens, PAGE);
    cache.close(again);
    cache.close(other);
    let mut again = open(&mut cache, 0);
    let Reused { tokens: found, host_tokens, loads, .. } = cache.reuse(&mut again, &tokens);
    assert_eq!((found, host_tokens, loads.len()), (3 * PAGE, 2 * PAGE, 2));
    let page = |load: &Load| (load.page.unwrap().1, load.to.clone());
    for (at, (page, to)) in (1..).zip(loads.iter().map(page)) {
        assert_eq!(again.tables[0].at(at), Some(page));
        assert_eq!(to, cache.layout.page(PageKind::Full, page).collect::<Vec<_>>());
    }
    demote(&mut cache);
    // A load that fails leaves nothing to be found.
    cache.undo_loads(&loads);
    cache.close(again);
    cache.limit_host_pages(0);
    let mut again = open(&mut cache, 0);
    assert_eq!(cache.reuse(&mut again, &tokens).tokens, PAGE);
    cache.close(again);
    assert_eq!(cache.pages(PageKind::Full), Some((4, 4)));
}

#[test]
fn a_swapped_sequence_shares_pages_that_are_still_there() {
    let mut cache = Model { pages: 6, ..Model::default() }.cache();
    cache.limit_host_pages(1 << 20);
    let (mut sequence, _) = fed(&mut cache, 0, &text(3 * PAGE + 5, 1));
    let bytes = |ranges: &[Range]| ranges.iter().map(|range| range.bytes).sum::<usize>();
    let SwapPlan { pages, rest } = cache.swap_plan(&sequence);
    let blobs = pages.iter().map(|page| Blob::new(vec![0; bytes(page)])).collect();
    let swapped = cache.swap_out(&mut sequence, blobs, Blob::new(vec![0; bytes(&rest)]));
    // Another one takes the three free pages and the last of the prefix.
    let (other, _) = fed(&mut cache, 0, &text(3 * PAGE + 1, 2));
    assert_eq!(cache.take_demotions().len(), 0, "host memory has it already");
    cache.close(other);
    let loads = cache.swap_in(&mut sequence, &swapped).unwrap();
    assert_eq!(loads.len(), 2, "one page, and what is behind the last full one");
    cache.close(sequence);
    assert_eq!(cache.pages(PageKind::Full), Some((6, 6)));
}

/// What a router believes that follows the events: the pages of each tier by their names, with their tokens.
#[derive(Default)]
struct Router {
    device: HashMap<u64, Vec<u32>>,
    host: HashSet<u64>,
}

impl Router {
    fn follow(&mut self, cache: &mut KvCache) {
        for event in cache.take_events() {
            match event {
                CacheEvent::Stored(pages) if pages.tier == CacheTier::Host => self.host.extend(pages.hashes),
                CacheEvent::Stored(pages) => {
                    assert_eq!(pages.tokens.len(), pages.hashes.len() * PAGE);
                    let mut before = pages.parent.map_or_else(Vec::new, |parent| self.device[&parent].clone());
                    for (hash, tokens) in pages.hashes.into_iter().zip(pages.tokens.chunks(PAGE)) {
                        before.extend(tokens);
                        assert_eq!(self.device.insert(hash, before.clone()), None, "a page is told once");
                    }
                }
                CacheEvent::Removed { hashes, tier: CacheTier::Host } => {
                    hashes.iter().for_each(|hash| assert!(self.host.remove(hash)));
                }
                CacheEvent::Removed { hashes, .. } => {
                    hashes.iter().for_each(|hash| assert!(self.device.remove(hash).is_some()));
                }
                CacheEvent::Cleared => *self = Router::default(),
            }
        }
    }

    /// Tokens of a prompt that it would find on the device.
    fn finds(&self, tokens: &[u32]) -> usize {
        let prefixes = (1..=(tokens.len() - 1) / PAGE).map(|pages| &tokens[..pages * PAGE]);
        prefixes.take_while(|prefix| self.device.values().any(|held| held == prefix)).count() * PAGE
    }
}

#[test]
fn a_router_that_follows_the_events_knows_what_is_found() {
    let mut cache = Model { pages: 8, ..Model::default() }.cache();
    cache.log_events();
    let mut router = Router::default();
    let prompts: Vec<Vec<u32>> = (0..6).map(|salt| text((salt as usize + 1) * PAGE / 2 + PAGE, salt * 1000)).collect();
    let (mut evicted, mut hits) = (0, 0);
    for turn in 0..40 {
        let tokens = &prompts[(turn * 5 + turn / 7) % prompts.len()];
        let expected = router.finds(tokens);
        let (sequence, found) = fed(&mut cache, 0, tokens);
        // Pages may go while others are taken: what is found at first is what counts.
        assert_eq!(found, expected, "turn {turn}");
        cache.close(sequence);
        let before = router.device.len();
        router.follow(&mut cache);
        evicted += before.saturating_sub(router.device.len());
        hits += found;
    }
    assert!(evicted > 0 && hits > 0, "{evicted} pages less, {hits} tokens found: this shows nothing");
}

#[test]
fn pages_in_host_memory_are_told_of_and_come_back_with_their_tokens() {
    let mut cache = Model { pages: 2, ..Model::default() }.cache();
    cache.limit_host_pages(1 << 20);
    cache.log_events();
    let mut router = Router::default();
    let tokens = text(PAGE + 1, 1);
    for salt in [1, 2, 1] {
        let (sequence, _) = fed(&mut cache, 0, &text(PAGE + 1, salt));
        cache.close(sequence);
        for Demotion { kind, hash, .. } in cache.take_demotions() {
            cache.keep_page(kind, hash, Arc::new(vec![0; 8]));
        }
        router.follow(&mut cache);
    }
    assert_eq!((router.host.len(), router.finds(&tokens)), (2, PAGE), "the first one is back on the device");

    // One that leaves host memory is told of as well.
    cache.host = ByteLru::new(8);
    router.host.clear();
    for salt in [1000, 2000] {
        let hash = cache.hasher.root(CacheScope(salt));
        cache.keep_page(PageKind::Full, hash, Arc::new(vec![0; 8]));
        router.follow(&mut cache);
        assert_eq!(router.host.iter().collect::<Vec<_>>(), [&hash.short()]);
    }
}

#[test]
fn who_finds_a_page_is_told_with_it() {
    let mut cache = Model { pages: 8, ..Model::default() }.cache();
    cache.log_events();
    let tokens = text(3 * PAGE, 1);
    for scope in [0, 7] {
        drop(fed(&mut cache, scope, &tokens));
        let events = cache.take_events();
        let [CacheEvent::Stored(pages)] = &events[..] else { panic!("{events:?}") };
        assert_eq!((pages.hashes.len(), pages.parent, pages.scope), (3, None, scope), "one event for pages in a row");
        assert_eq!(pages.tokens, tokens);
    }
}
