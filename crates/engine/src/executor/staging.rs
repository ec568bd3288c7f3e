//! Caches and states of the CPU's layers that come to a GPU for a part of a plan: which pieces of them a run needs there, and which it changes.

use std::collections::HashMap;

use kiln_kernels::tensor::{Slot, Tensor};

use super::Range;
use crate::arch::PAGE;
use crate::plan::{Plan, SlotKind};

/// What the host has written to the inputs of a plan that say which pages there are, by slot.
pub(super) type Inputs = HashMap<Slot, Vec<i32>>;

/// The inputs of a plan that visits are found by.
pub(super) fn inputs(plan: &Plan) -> Vec<Slot> {
    let ports = &plan.ports;
    let windows = ports.windows.iter().flat_map(|places| [places.table, places.rows]);
    let sources = ports.source.iter().flat_map(|source| [source.table, source.lengths]);
    let all = [ports.rows, ports.table, ports.lengths].into_iter().chain(windows).chain(sources);
    all.map(|port| port.slot).collect()
}

/// A cache or a state that a part of a plan has on its device while it runs.
pub(super) struct StagedCache {
    pub(super) slot: Slot,
    bytes: usize,
    /// Whether the part changes it.
    written: bool,
    /// How its pages are found; a state comes as a whole.
    pages: Option<Paged>,
}

/// Where the pages of a cache are named.
struct Paged {
    /// Bytes of a row.
    row: usize,
    /// The input with the rows that are written.
    rows: Slot,
    /// Page tables and lengths of the sequences.
    tables: Vec<[Tensor; 2]>,
}

impl StagedCache {
    /// What of the shared slots that may visit a part of a plan does.
    pub(super) fn of(part: &Plan, staging: &[Option<usize>]) -> Vec<StagedCache> {
        let staging = |slot: &usize| staging.get(*slot).is_some_and(Option::is_some);
        let touched = |slot: &usize, writes: bool| {
            part.steps.iter().any(|step| {
                let operation = step.call.operation();
                let all = if writes { operation.writes() } else { operation.reads() };
                all.iter().any(|t| t.slot.0 as usize == *slot)
            })
        };
        let visit = |at: usize| {
            let info = &part.slots[at];
            let written = touched(&at, true);
            let ports = &part.ports;
            let pages = match info.kind {
                SlotKind::Cache => {
                    let source = ports.source.map(|source| [source.table, source.lengths]);
                    Some((ports.rows, [ports.table, ports.lengths], source))
                }
                SlotKind::WindowCache => ports.windows.map(|places| (places.rows, [places.table, ports.lengths], None)),
                _ => None,
            };
            let pages = pages.map(|(rows, own, source)| Paged {
                row: info.bytes / info.shape[1].max(1),
                rows: rows.slot,
                tables: std::iter::once(own).chain(source).collect(),
            });
            let slot = Slot(u32::try_from(at).expect("slots are numbered with 32 bits"));
            (written || touched(&at, false)).then_some(StagedCache { slot, bytes: info.bytes, written, pages })
        };
        (0..part.n_fixed).filter(staging).filter_map(visit).collect()
    }

    fn range(&self, offset: usize, bytes: usize) -> Range {
        Range { slot: self.slot, offset, bytes }
    }

    /// What must come before the part runs: a state, and the pages with rows that it reads and does not write itself.
    pub(super) fn coming(&self, inputs: &Inputs) -> Vec<Range> {
        let Some(paged) = &self.pages else { return vec![self.range(0, self.bytes)] };
        let mut written: HashMap<i32, usize> = HashMap::new();
        let rows = inputs.get(&paged.rows).filter(|_| self.written);
        for row in rows.into_iter().flatten().filter(|row| **row >= 0) {
            *written.entry(row / PAGE as i32).or_default() += 1;
        }
        let mut pages = Vec::new();
        for [table, lengths] in &paged.tables {
            let (Some(entries), Some(lengths)) = (inputs.get(&table.slot), inputs.get(&lengths.slot)) else { continue };
            for (column, length) in entries.chunks(table.shape[0]).zip(lengths) {
                let length = usize::try_from(*length).unwrap_or(0);
                for (at, page) in column.iter().take(length.div_ceil(PAGE)).enumerate().filter(|(_, page)| **page >= 0)
                {
                    let filled = (length - at * PAGE).min(PAGE);
                    if filled > written.get(page).copied().unwrap_or(0) {
                        pages.push(*page as usize);
                    }
                }
            }
        }
        pages.sort_unstable();
        pages.dedup();
        let bytes = PAGE * paged.row;
        merged(pages.into_iter().map(|page| self.range(page * bytes, bytes)))
    }

    /// What goes back after the part has run: a state, and the rows that it has written.
    pub(super) fn going(&self, inputs: &Inputs) -> Vec<Range> {
        if !self.written {
            return Vec::new();
        }
        let Some(paged) = &self.pages else { return vec![self.range(0, self.bytes)] };
        let rows = inputs.get(&paged.rows).into_iter().flatten().filter(|row| **row >= 0);
        let mut rows: Vec<usize> = rows.map(|row| *row as usize).collect();
        rows.sort_unstable();
        rows.dedup();
        merged(rows.into_iter().map(|row| self.range(row * paged.row, paged.row)))
    }
}

/// Ranges in ascending order, neighbours as one.
fn merged(ranges: impl Iterator<Item = Range>) -> Vec<Range> {
    let mut all: Vec<Range> = Vec::new();
    for range in ranges {
        match all.last_mut() {
            Some(last) if last.offset + last.bytes == range.offset => last.bytes += range.bytes,
            _ => all.push(range),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use kiln_gguf::TensorType;

    use super::*;

    const ROW: usize = 8;

    fn tensor(slot: u32, shape: [usize; 4]) -> Tensor {
        Tensor::dense(Slot(slot), TensorType::I32, shape)
    }

    /// A cache whose rows are named by slot 10, its pages by slot 11, three to each of two sequences, lengths by slot 12.
    fn cache(written: bool) -> StagedCache {
        let tables = vec![[tensor(11, [3, 2, 1, 1]), tensor(12, [2, 1, 1, 1])]];
        let pages = Some(Paged { row: ROW, rows: Slot(10), tables });
        StagedCache { slot: Slot(5), bytes: 100 * PAGE * ROW, written, pages }
    }

    fn ranges(ranges: &[Range]) -> Vec<(usize, usize)> {
        ranges.iter().map(|range| (range.offset / ROW, range.bytes / ROW)).collect()
    }

    fn inputs(rows: Vec<i32>, table: Vec<i32>, lengths: Vec<i32>) -> Inputs {
        [(Slot(10), rows), (Slot(11), table), (Slot(12), lengths)].into()
    }

    #[test]
    fn pages_with_earlier_rows_come_and_rows_that_were_written_go() {
        let page = PAGE as i32;
        // The first sequence has two full pages, 7 and 4, and continues with ten tokens of the third, 9; the second begins on page 2. A row of
        // padding goes nowhere.
        let rows = (0..10).map(|i| 9 * page + i).chain((0..5).map(|i| 2 * page + i)).chain([-1]).collect();
        let inputs = inputs(rows, vec![7, 4, 9, 2, -1, -1], vec![2 * page + 10, 5]);
        assert_eq!(ranges(&cache(true).coming(&inputs)), [(4 * PAGE, PAGE), (7 * PAGE, PAGE)]);
        assert_eq!(ranges(&cache(true).going(&inputs)), [(2 * PAGE, 5), (9 * PAGE, 10)]);
        // A part that reads what another one wrote needs all of it.
        let all = [(2 * PAGE, PAGE), (4 * PAGE, PAGE), (7 * PAGE, PAGE), (9 * PAGE, PAGE)];
        assert_eq!((ranges(&cache(false).coming(&inputs)), cache(false).going(&inputs).len()), (all.to_vec(), 0));
    }

    #[test]
    fn a_page_that_was_begun_comes_and_neighbours_are_one_range() {
        let page = PAGE as i32;
        let inputs = inputs(vec![4 * page + 3, 4 * page + 4], vec![3, 4, -1, 0, 0, 0], vec![page + 5, 0]);
        assert_eq!(ranges(&cache(true).coming(&inputs)), [(3 * PAGE, 2 * PAGE)]);
        assert_eq!(ranges(&cache(true).going(&inputs)), [(4 * PAGE + 3, 2)]);
    }

    #[test]
    fn a_state_comes_and_goes_as_a_whole() {
        let state = StagedCache { slot: Slot(6), bytes: 48, written: true, pages: None };
        let whole = vec![Range { slot: Slot(6), offset: 0, bytes: 48 }];
        assert_eq!((state.coming(&Inputs::new()), state.going(&Inputs::new())), (whole.clone(), whole));
    }
}
