//! Where pages and states lie in the shared slots of a model.

use super::pool::Page;
use super::{KINDS, PageKind};
use crate::arch::{CARRIED, PAGE, Room};
use crate::executor::Range;
use crate::plan::{Fixed, SlotKind};

/// A slot that holds pages or states side by side, and the bytes of each.
#[derive(Clone, Copy, Debug)]
struct Part {
    slot: u32,
    bytes: usize,
}

impl Part {
    fn at(self, number: u32) -> Range {
        Range::new(self.slot, self.bytes * number as usize, self.bytes)
    }
}

/// Where pages and states lie.
#[derive(Debug)]
pub(crate) struct Layout {
    pages: [Vec<Part>; KINDS],
    states: Vec<Part>,
    /// Rings of states for a draft head.
    carried: Vec<Part>,
    rings: usize,
}

fn parts(fixed: &Fixed, kind: &SlotKind, count: usize) -> Vec<Part> {
    let slots = (0..).zip(&fixed.slots).filter(|(_, slot)| slot.kind == *kind);
    slots.map(|(number, slot)| Part { slot: number, bytes: slot.bytes / count.max(1) }).collect()
}

impl Layout {
    /// The layout of a model's slots, made for this much room.
    pub(crate) fn new(fixed: &Fixed, room: &Room) -> Layout {
        let pages =
            [parts(fixed, &SlotKind::Cache, room.pages), parts(fixed, &SlotKind::WindowCache, room.window_pages)];
        let (carried, rings) = (parts(fixed, &SlotKind::Carried, room.states.max(1)), room.states.max(1));
        let rings = if carried.is_empty() { 0 } else { rings };
        Layout { pages, states: parts(fixed, &SlotKind::State, room.states), carried, rings }
    }

    /// Whether any layer has a cache of this kind.
    pub(crate) fn has(&self, kind: PageKind) -> bool {
        !self.pages[kind as usize].is_empty()
    }

    /// Whether any layer has a state.
    pub(crate) fn has_states(&self) -> bool {
        !self.states.is_empty()
    }

    /// Where a page lies.
    pub(crate) fn page(&self, kind: PageKind, page: Page) -> impl Iterator<Item = Range> {
        self.pages[kind as usize].iter().map(move |part| part.at(page))
    }

    /// Where the first rows of a page lie.
    pub(crate) fn rows(&self, kind: PageKind, page: Page, rows: usize) -> impl Iterator<Item = Range> {
        self.page(kind, page).map(move |range| Range { bytes: range.bytes / PAGE * rows, ..range })
    }

    /// Where a state lies.
    pub(crate) fn state(&self, slot: u32) -> impl Iterator<Item = Range> {
        self.states.iter().map(move |part| part.at(slot))
    }

    /// Rings of states for a draft head; none where there is no head.
    pub(crate) fn rings(&self) -> usize {
        self.rings
    }

    /// Where such a ring lies.
    pub(crate) fn ring(&self, slot: u32) -> impl Iterator<Item = Range> {
        self.carried.iter().map(move |part| part.at(slot))
    }

    /// Where one of the rows of all rings lies.
    pub(crate) fn carried_row(&self, row: usize) -> Option<Range> {
        let part = self.carried.first()?;
        let bytes = part.bytes / CARRIED;
        Some(Range::new(part.slot, bytes * row, bytes))
    }

    /// Bytes of `rows` rows in all caches of a kind.
    pub(crate) fn row_bytes(&self, kind: PageKind, rows: usize) -> usize {
        self.pages[kind as usize].iter().map(|part| part.bytes / PAGE * rows).sum()
    }

    /// Bytes of a page or a state in every slot.
    pub(crate) fn sizes(&self) -> Vec<usize> {
        self.pages.iter().flatten().chain(&self.states).map(|part| part.bytes).collect()
    }

    /// Bytes of one state.
    pub(crate) fn state_bytes(&self) -> usize {
        self.states.iter().map(|part| part.bytes).sum()
    }
}
