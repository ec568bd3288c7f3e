//! The pages of one sequence in one kind of cache.

use std::collections::VecDeque;

use super::pool::Page;
use crate::arch::PAGE;

/// The pages of one sequence in one pool, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct PageTable {
    /// Which page of the sequence the first one is. Those before it were released: no later token sees them.
    pub(super) first: usize,
    pub(super) pages: VecDeque<Page>,
}

impl PageTable {
    /// The first pages of a pool, for a sequence that is alone there.
    pub(crate) fn identity(tokens: usize) -> PageTable {
        PageTable { first: 0, pages: (0..).take(tokens.div_ceil(PAGE)).collect() }
    }

    /// The page behind the last one.
    pub(super) fn end(&self) -> usize {
        self.first + self.pages.len()
    }

    /// Page number `at` of the sequence, if it is held.
    pub(crate) fn at(&self, at: usize) -> Option<Page> {
        self.pages.get(at.checked_sub(self.first)?).copied()
    }

    /// The pages from the start of the sequence on; none if those were released.
    pub(crate) fn prefix(&self) -> impl Iterator<Item = Page> {
        self.pages.iter().copied().take(if self.first == 0 { usize::MAX } else { 0 })
    }

    /// Whether no page is held.
    pub(crate) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The entries as kernels take them. Released window pages are never attended, but kernels load whole tiles, so their entries
    /// point at a page that this sequence still holds.
    pub(crate) fn entries(&self) -> impl Iterator<Item = Page> {
        let before = self.pages.front().into_iter().cycle().take(self.first);
        before.chain(&self.pages).copied()
    }
}
