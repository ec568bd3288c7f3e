//! Bytes that many hold together, within a limit.

use std::sync::atomic::{AtomicUsize, Ordering};

/// A limit, and what is held of it.
#[derive(Debug)]
pub(super) struct Budget {
    most: usize,
    held: AtomicUsize,
}

/// Bytes of a budget, which come back when this is dropped.
#[derive(Debug)]
pub(super) struct Held {
    budget: &'static Budget,
    bytes: usize,
}

impl Budget {
    pub(super) const fn new(most: usize) -> Budget {
        Budget { most, held: AtomicUsize::new(0) }
    }

    /// Holds bytes, where there is room for them.
    pub(super) fn hold(&'static self, bytes: usize) -> Option<Held> {
        let more = |held: usize| held.checked_add(bytes).filter(|held| *held <= self.most);
        self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Held { budget: self, bytes })
    }
}

impl Held {
    /// How many they are.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_comes_back() {
        static BUDGET: Budget = Budget::new(100);
        let first = BUDGET.hold(60).unwrap();
        assert!(BUDGET.hold(41).is_none() && BUDGET.hold(usize::MAX).is_none());
        let second = BUDGET.hold(40).unwrap();
        assert!(BUDGET.hold(1).is_none());
        drop((first, second));
        assert_eq!(BUDGET.hold(100).map(|held| held.bytes()), Some(100));
    }
}
