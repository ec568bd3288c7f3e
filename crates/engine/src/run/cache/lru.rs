//! Blobs in host memory, found by key and bounded in bytes.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::Arc;

/// Contents of pages or states.
pub(crate) type Blob = Arc<Vec<u8>>;

/// How soon a blob is evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    /// Before all others: it may never be asked for.
    Spare,
    /// When it is the least recently used one.
    Kept,
}

#[derive(Debug)]
struct Entry {
    blob: Blob,
    rank: Rank,
    used: u64,
}

/// Blobs, of which the least recently used ones are evicted.
#[derive(Debug)]
pub(crate) struct ByteLru<K> {
    limit: usize,
    bytes: usize,
    clock: u64,
    entries: HashMap<K, Entry>,
    order: BTreeMap<(Rank, u64), K>,
}

impl<K: Copy + Eq + Hash> ByteLru<K> {
    /// An empty store for at most `limit` bytes.
    pub(crate) fn new(limit: usize) -> ByteLru<K> {
        ByteLru { limit, bytes: 0, clock: 0, entries: HashMap::new(), order: BTreeMap::new() }
    }

    /// Bytes that it may hold.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes that it holds.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether it has a blob.
    pub(crate) fn contains(&self, key: K) -> bool {
        self.entries.contains_key(&key)
    }

    /// The blob of a key; it is the most recently used one then.
    pub(crate) fn get(&mut self, key: K) -> Option<Blob> {
        let entry = self.entries.get_mut(&key)?;
        self.order.remove(&(entry.rank, entry.used));
        self.clock += 1;
        (entry.rank, entry.used) = (Rank::Kept, self.clock);
        self.order.insert((entry.rank, entry.used), key);
        Some(Arc::clone(&entry.blob))
    }

    /// Takes a blob in and gives those that were evicted for it; that may be the blob itself, where it is too large.
    pub(crate) fn insert(&mut self, key: K, blob: Blob, rank: Rank) -> Vec<(K, Blob)> {
        self.remove(key);
        self.clock += 1;
        self.bytes += blob.len();
        self.order.insert((rank, self.clock), key);
        self.entries.insert(key, Entry { blob, rank, used: self.clock });
        let mut evicted = Vec::new();
        while self.bytes > self.limit
            && let Some((_, oldest)) = self.order.first_key_value()
        {
            let oldest = *oldest;
            evicted.extend(self.remove(oldest).map(|blob| (oldest, blob)));
        }
        evicted
    }

    fn remove(&mut self, key: K) -> Option<Blob> {
        let entry = self.entries.remove(&key)?;
        self.order.remove(&(entry.rank, entry.used));
        self.bytes -= entry.blob.len();
        Some(entry.blob)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spare_blobs_go_first_then_the_least_recently_used() {
        let [a, b, c, d, e] = [0, 1, 2, 3, 4];
        let blob = |bytes: usize| Arc::new(vec![0; bytes]);
        let mut lru = ByteLru::new(30);
        assert!(lru.insert(a, blob(10), Rank::Kept).is_empty());
        assert!(lru.insert(b, blob(10), Rank::Spare).is_empty());
        assert!(lru.insert(c, blob(10), Rank::Kept).is_empty());
        assert!(lru.get(a).is_some());
        let evicted = |lru: &mut ByteLru<i32>, key, bytes| -> Vec<i32> {
            lru.insert(key, blob(bytes), Rank::Kept).into_iter().map(|(key, _)| key).collect()
        };
        assert_eq!(evicted(&mut lru, d, 10), [b], "the spare one");
        assert_eq!(evicted(&mut lru, e, 10), [c], "the least recently used one");
        assert_eq!((lru.bytes(), lru.contains(a), lru.get(c)), (30, true, None));
        assert_eq!(evicted(&mut lru, e, 20), [a], "the same key again counts once");
        assert_eq!(evicted(&mut lru, a, 31), [d, e, a], "one that is too large does not stay");
        assert_eq!(lru.bytes(), 0);
    }

    #[test]
    fn a_spare_blob_that_was_asked_for_stays_like_all_others() {
        let [a, b, c] = [0, 1, 2];
        let mut lru = ByteLru::new(2);
        lru.insert(a, Arc::new(vec![0]), Rank::Spare);
        lru.insert(b, Arc::new(vec![0]), Rank::Spare);
        assert!(lru.get(a).is_some());
        lru.insert(c, Arc::new(vec![0]), Rank::Kept);
        assert!(lru.contains(a) && !lru.contains(b));
    }
}
