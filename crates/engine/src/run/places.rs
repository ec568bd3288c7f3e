//! Where the rows of a sequence stand and what they see, where pictures change that: patches have rows and columns in models whose tokens have
//! several positions, what comes behind them stands nearer than its number among the tokens says, and rows of some pictures see each other in
//! both directions. All of it follows from where pictures stand, so that pages that were found again, forks and sequences that come back from host
//! memory need nothing else.

use super::batch::position;
use super::media::Span;
use crate::arch::{Coordinates, Pictures};
use crate::vision::Grid;

/// How the vectors of a picture stand in a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Its rows and columns, in models whose tokens have several positions; nothing where each vector stands one further, as tokens do.
    pub grid: Option<Grid>,
    /// Whether all of its vectors see each other.
    pub both_ways: bool,
}

impl Span {
    fn len(&self) -> usize {
        self.vectors.tokens().len()
    }

    /// The position behind it.
    fn end(&self) -> usize {
        self.start + self.len()
    }

    fn grid(&self) -> Option<Grid> {
        self.vectors.standing().grid
    }

    /// Positions that it takes less than it has rows: what comes behind stands as far away as the longer side is long.
    fn saved(&self) -> usize {
        self.grid().map_or(0, |grid| self.len().saturating_sub(grid.rows.max(grid.columns)))
    }

    fn has(&self, at: usize) -> bool {
        (self.start..self.end()).contains(&at)
    }

    /// Whether a prompt must not be cut between the tokens before and from `at` on.
    fn forbids(&self, at: usize) -> bool {
        self.vectors.standing().both_ways && self.start < at && at < self.end()
    }
}

/// Where a piece of a prompt from `start` on should end that would end at `end`: all rows that see each other go through the model together.
pub(super) fn uncut(spans: &[Span], start: usize, end: usize) -> usize {
    match spans.iter().find(|span| span.forbids(end)) {
        Some(span) if span.start > start => span.start,
        Some(span) => span.end(),
        None => end,
    }
}

/// A sequence with the tokens that are being fed, and where its pictures stand.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen<'s> {
    pub(super) spans: &'s [Span],
    /// Tokens that it has.
    pub(super) before: &'s [u32],
    /// Tokens behind them.
    pub(super) fed: &'s [u32],
}

impl Seen<'_> {
    /// Pictures that are in the sequence: some may have been taken back, or may be still to come.
    fn there(&self) -> impl Iterator<Item = &Span> {
        let token = |at: usize| match at.checked_sub(self.before.len()) {
            None => self.before.get(at),
            Some(at) => self.fed.get(at),
        };
        self.spans
            .iter()
            .filter(move |span| token(span.start).is_some_and(|t| span.vectors.tokens().first() == Some(t)))
    }

    /// Time, height, width and the extra number of a row.
    pub(super) fn coordinates(&self, at: usize) -> [i32; 4] {
        let saved: usize = self.there().filter(|span| span.end() <= at).map(Span::saved).sum();
        let span = self.there().find(|span| span.has(at));
        if let Some((span, grid)) = span.and_then(|span| Some((span, span.grid()?))) {
            let (first, nth) = (span.start - saved, at - span.start);
            let [row, column] = [nth / grid.columns.max(1), nth % grid.columns.max(1)];
            return [position(first), position(first + row), position(first + column), 0];
        }
        let at = position(at - saved);
        [at, at, at, 0]
    }

    /// The position of the last row that a row sees.
    pub(super) fn last(&self, at: usize) -> usize {
        let mutual = self.there().find(|span| span.has(at) && span.vectors.standing().both_ways);
        mutual.map_or(at, |span| span.end() - 1)
    }

    /// Whether rows that see each other would go through the model in two pieces.
    pub(super) fn is_cut(&self) -> bool {
        let end = self.before.len() + self.fed.len();
        self.there().any(|span| span.forbids(end))
    }

    /// What the tokens that are being fed ask of a plan.
    pub(super) fn pictures(&self, several_positions: bool) -> Pictures {
        let (start, end) = (self.before.len(), self.before.len() + self.fed.len());
        let touched = |span: &&Span| span.start < end && span.end() > start;
        let is_grid = || self.there().filter(touched).any(|span| span.grid().is_some());
        let coordinates = match several_positions {
            true if is_grid() => Coordinates::Four,
            true if self.there().any(|span| span.end() <= start && span.saved() > 0) => Coordinates::Each,
            _ => Coordinates::Positions,
        };
        Pictures {
            vectors: self.there().any(|span| touched(&span)),
            sees_ahead: (start..end).any(|at| self.last(at) > at),
            coordinates,
        }
    }
}

impl Pictures {
    /// What both ask for.
    #[must_use]
    pub(super) fn and(self, other: Pictures) -> Pictures {
        Pictures {
            vectors: self.vectors || other.vectors,
            sees_ahead: self.sees_ahead || other.sees_ahead,
            coordinates: self.coordinates.max(other.coordinates),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::media::Rows;
    use crate::run::Vectors;

    fn span(start: usize, rows: usize, columns: usize, both_ways: bool) -> Span {
        let count = rows * columns;
        let vectors = Vectors::new(&start.to_le_bytes(), Arc::new(Rows { width: 1, values: vec![0.0; count] }));
        let grid = (!both_ways).then_some(Grid { rows, columns });
        Span { start, vectors: vectors.standing_as(Standing { grid, both_ways }) }
    }

    /// Tokens with these pictures in them.
    fn prompt(length: usize, spans: &[Span]) -> Vec<u32> {
        let mut tokens = vec![7; length];
        for span in spans {
            tokens[span.start..span.end()].copy_from_slice(span.vectors.tokens());
        }
        tokens
    }

    #[test]
    fn patches_stand_in_rows_and_columns_and_text_behind_them_nearer() {
        let spans = [span(3, 2, 4, false), span(12, 3, 2, false)];
        let tokens = prompt(20, &spans);
        for cut in [0, 1, 5, 11, 14, 19, 20] {
            let (before, fed) = tokens.split_at(cut);
            let seen = Seen { spans: &spans, before, fed };
            assert_eq!(seen.coordinates(2), [2, 2, 2, 0]);
            assert_eq!(
                [3, 6, 7, 10].map(|at| seen.coordinates(at)),
                [[3, 3, 3, 0], [3, 3, 6, 0], [3, 4, 3, 0], [3, 4, 6, 0]]
            );
            assert_eq!(seen.coordinates(11), [7, 7, 7, 0], "behind four columns");
            assert_eq!([12, 17].map(|at| seen.coordinates(at)), [[8, 8, 8, 0], [8, 10, 9, 0]]);
            assert_eq!(seen.coordinates(18), [11, 11, 11, 0], "behind three rows");
        }
        // A picture that is not there moves nothing.
        let text = prompt(20, &spans[..1]);
        assert_eq!(Seen { spans: &spans, before: &text, fed: &[] }.coordinates(18), [14, 14, 14, 0]);
    }

    #[test]
    fn plans_are_asked_only_for_what_is_needed() {
        let spans = [span(3, 2, 4, false)];
        let tokens = prompt(20, &spans);
        let asked = |start: usize, end: usize, several| {
            Seen { spans: &spans, before: &tokens[..start], fed: &tokens[start..end] }.pictures(several)
        };
        assert_eq!(asked(0, 3, true), Pictures::default());
        assert_eq!(asked(0, 4, true).coordinates, Coordinates::Four);
        assert_eq!(
            asked(10, 20, true),
            Pictures { vectors: true, coordinates: Coordinates::Four, ..Pictures::default() }
        );
        assert_eq!(asked(11, 20, true), Pictures { coordinates: Coordinates::Each, ..Pictures::default() });
        assert_eq!(asked(0, 20, false), Pictures { vectors: true, ..Pictures::default() });
        assert_eq!(asked(11, 12, false), Pictures::default());
    }

    #[test]
    fn pieces_end_before_or_behind_rows_that_see_each_other() {
        let spans = [span(3, 2, 4, true), span(11, 1, 5, true), span(30, 2, 2, false)];
        let to = |start, end| uncut(&spans, start, end);
        assert_eq!([to(0, 3), to(0, 4), to(0, 11), to(0, 12), to(0, 16)], [3, 3, 11, 11, 16]);
        assert_eq!([to(3, 4), to(5, 6), to(3, 13), to(11, 12)], [11, 11, 11, 16]);
        assert_eq!(to(20, 31), 31, "others may be cut");
        let tokens = prompt(20, &spans[..2]);
        let seen = Seen { spans: &spans, before: &tokens[..3], fed: &tokens[3..14] };
        assert!(seen.is_cut() && !Seen { fed: &tokens[3..16], ..seen }.is_cut());
        assert_eq!([2, 3, 10, 11, 16].map(|at| seen.last(at)), [2, 10, 10, 15, 16]);
        assert!(seen.pictures(false).sees_ahead);
        // The last row of a picture sees nothing ahead.
        assert!(!Seen { before: &tokens[..10], fed: &tokens[10..11], ..seen }.pictures(false).sees_ahead);
    }
}
