//! Merging neighbours, best pair first, in O(n log n). Byte-level BPE and SentencePiece differ only in which pairs merge
//! and how good a merge is.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::hash::FastMap;
use super::limit::EncodeLimit;

/// Where in the output the tokens of a word already stand.
pub(super) type WordCache<'t> = FastMap<&'t str, (u32, u32)>;
/// Words of this many bytes or more are not remembered: they do not come again.
pub(super) const MAX_CACHED_WORD: usize = 64;
/// A cache of all words of a huge text would be slower than merging.
pub(super) const MAX_CACHE_ENTRIES: usize = 1 << 16;

/// No neighbour, or no known symbol.
pub(super) const NONE: u32 = u32::MAX;

/// What a pair merges to. A lower priority merges first; of equal ones the leftmost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Merged {
    /// The rank of the merge.
    pub(super) priority: u32,
    /// The symbol that replaces the pair.
    pub(super) symbol: u32,
}

/// One symbol of the text being merged: it covers the bytes from `start`, `len` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// The symbol, [`NONE`] where the vocabulary has none for these bytes.
    pub(super) symbol: u32,
    /// First byte in the text.
    pub(super) start: u32,
    /// Length in bytes; 0 once the span is merged into its left neighbour.
    pub(super) len: u32,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    priority: u32,
    left: u32,
    /// Bytes of both parts together: if either part has changed since, this number has.
    len: u32,
    symbol: u32,
}

/// Scratch memory of merging, kept between words.
#[derive(Default)]
pub(super) struct Merger {
    /// The spans of the word: filled by the caller, merged in place by [`Merger::run`].
    pub(super) spans: Vec<Span>,
    next: Vec<u32>,
    prev: Vec<u32>,
    heap: BinaryHeap<Reverse<Candidate>>,
    best: Vec<Option<Merged>>,
}

/// Up to this many spans a plain scan for the best pair beats the heap.
const SCAN_LIMIT: usize = 24;
/// After this many candidates it is asked whether anybody still waits.
const CHECK: usize = 1 << 16;

impl Merger {
    /// Merges `self.spans` until no pair merges any more.
    /// Whoever cancels gets spans that are merged only in part.
    pub(super) fn run(&mut self, limit: &EncodeLimit, pair: impl Fn(Span, Span) -> Option<Merged>) {
        if self.spans.len() <= SCAN_LIMIT {
            self.run_scan(pair);
        } else {
            self.run_heap(limit, pair);
        }
    }

    fn run_scan(&mut self, pair: impl Fn(Span, Span) -> Option<Merged>) {
        let spans = &mut self.spans;
        let best = &mut self.best;
        best.clear();
        best.extend(spans.windows(2).map(|w| pair(w[0], w[1])));
        loop {
            let found = best.iter().enumerate().filter_map(|(i, m)| m.map(|m| (m.priority, i, m.symbol))).min();
            let Some((_, at, symbol)) = found else { return };
            spans[at].symbol = symbol;
            spans[at].len += spans[at + 1].len;
            spans.remove(at + 1);
            best.remove(at);
            if at > 0 {
                best[at - 1] = pair(spans[at - 1], spans[at]);
            }
            if at < best.len() {
                best[at] = pair(spans[at], spans[at + 1]);
            }
        }
    }

    fn run_heap(&mut self, limit: &EncodeLimit, pair: impl Fn(Span, Span) -> Option<Merged>) {
        let Self { spans, next, prev, heap, .. } = self;
        let count = spans.len() as u32;
        next.clear();
        next.extend((1..count).chain([NONE]));
        prev.clear();
        prev.extend([NONE].into_iter().chain(0..count.saturating_sub(1)));
        heap.clear();
        let candidate = |left: u32, a: Span, b: Span| {
            let merged = pair(a, b)?;
            Some(Reverse(Candidate { priority: merged.priority, left, len: a.len + b.len, symbol: merged.symbol }))
        };
        heap.extend(spans.windows(2).enumerate().filter_map(|(i, w)| candidate(i as u32, w[0], w[1])));
        let mut popped = 0usize;
        while let Some(Reverse(top)) = heap.pop() {
            popped += 1;
            if popped.is_multiple_of(CHECK) && limit.is_cancelled() {
                break;
            }
            let left = top.left as usize;
            let right = next[left];
            // A merged-away span has length 0 and keeps its old neighbour, so it must be told apart here.
            if spans[left].len == 0 || right == NONE || spans[left].len + spans[right as usize].len != top.len {
                continue;
            }
            let right = right as usize;
            spans[left].symbol = top.symbol;
            spans[left].len = top.len;
            spans[right].len = 0;
            next[left] = next[right];
            if next[left] != NONE {
                prev[next[left] as usize] = top.left;
                heap.extend(candidate(top.left, spans[left], spans[next[left] as usize]));
            }
            if prev[left] != NONE {
                heap.extend(candidate(prev[left], spans[prev[left] as usize], spans[left]));
            }
        }
        spans.retain(|span| span.len > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Symbols below 8 merge with their equal, with priorities out of order, so that both ways have work to do.
    fn toy(a: Span, b: Span) -> Option<Merged> {
        let merged = Merged { priority: (a.symbol * 5 + b.symbol * 3) % 7, symbol: (a.symbol * 2 + b.symbol) % 11 };
        (a.symbol < 8 && b.symbol < 8 && (a.symbol + b.symbol) % 3 != 1).then_some(merged)
    }

    #[test]
    fn the_heap_gives_what_the_scan_gives() {
        let mut state = 12345u32;
        for round in 0..500 {
            let spans: Vec<Span> = (0..round % 60)
                .map(|i| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    Span { symbol: (state >> 16) % 9, start: i, len: 1 }
                })
                .collect();
            let (mut scan, mut heap) = (Merger::default(), Merger::default());
            scan.spans.clone_from(&spans);
            heap.spans = spans;
            scan.run_scan(toy);
            heap.run_heap(&EncodeLimit::default(), toy);
            assert_eq!(scan.spans, heap.spans, "round {round}");
        }
    }
}
