//! `advance`: makes the inputs of the next decode step out of the tokens just sampled, so that no step waits for the host.

pub mod cases;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, only_scalar, require, word};
use crate::rows::reachable;
use crate::tensor::Tensor;

const NAME: &str = "advance";

/// One line for the registry.
pub const SUMMARY: &str = "tokens, positions, lengths and cache rows of the next step, from the sampled tokens";

/// Where the tokens of each row lie in caches whose pages have numbers of their own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Places {
    /// `[pages, n]`: position q of row i lies in cache row `table[q / page, i] * page + q % page`; a negative entry is no page.
    pub table: Tensor,
    /// `[n]`, written: cache rows of the new positions; -1 is nowhere.
    pub rows: Tensor,
}

/// Operands of `advance`, all I32 and dense; row i belongs to one sequence.
///
/// A row is active while its position is 0 or more. An active row ends if its token is negative (there was none to take) or if
/// a table has no page for its next position: its position becomes -1, and its token and length stay. Of a row that is not
/// active nothing changes but its cache row, which is -1, and the history, which gets -1 (or the token it ended with).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// `[n]`: the tokens that follow.
    pub sampled: Tensor,
    /// Where tokens lie in the caches.
    pub places: Places,
    /// The same for caches of a second kind. Both tables have the same shape.
    pub others: Option<Places>,
    /// `[n]`, written: the tokens of the next step.
    pub tokens: Tensor,
    /// `[n]`, in place: one more.
    pub positions: Tensor,
    /// `[n]`, in place: one more.
    pub lengths: Tensor,
    /// `[n]`, in place: one more; where tokens have coordinates that are not their positions.
    pub coordinates: Option<Tensor>,
    /// `[window, n]`, in place: the token goes to index `position % window` of its new position.
    pub recent: Option<Tensor>,
    /// `[steps, n]`, in place: the token goes to index `step % steps`.
    pub history: Tensor,
    /// `[1]`, in place: one more.
    pub step: Tensor,
    /// Tokens of a page.
    pub page: usize,
}

kiln_gpu::params! {
    struct Params {
        sampled: Address,
        table: Address,
        tokens: Address,
        positions: Address,
        lengths: Address,
        rows: Address,
        recent: Address,
        history: Address,
        step: Address,
        other_table: Address,
        other_rows: Address,
        coordinates: Address,
        n: u32,
        pages: u32,
        page: u32,
        window: u32,
        steps: u32,
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let read =
            [self.sampled, self.places.table, self.tokens, self.positions, self.lengths, self.history, self.step];
        read.into_iter().chain(self.recent).chain(self.coordinates).chain(self.others.map(|o| o.table)).collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        let written = [self.tokens, self.positions, self.lengths, self.places.rows, self.history, self.step];
        written.into_iter().chain(self.recent).chain(self.coordinates).chain(self.others.map(|o| o.rows)).collect()
    }

    fn check(&self) -> Result<(), Invalid> {
        let n = self.sampled.shape[0];
        let Places { table, rows } = self.places;
        let vectors = [
            ("sampled", self.sampled, [n, 1]),
            ("tokens", self.tokens, [n, 1]),
            ("positions", self.positions, [n, 1]),
            ("lengths", self.lengths, [n, 1]),
            ("rows", rows, [n, 1]),
            ("step", self.step, [1, 1]),
        ];
        let tables = [("table", Some(table)), ("recent", self.recent), ("history", Some(self.history))];
        let tables = tables.into_iter().filter_map(|(name, t)| Some((name, t?, [t?.shape[0], n])));
        let coordinates = self.coordinates.map(|t| ("coordinates", t, [n, 1]));
        let others = self.others.into_iter();
        let others = others
            .flat_map(|o| [("the other table", o.table, [table.shape[0], n]), ("the other rows", o.rows, [n, 1])]);
        for (name, t, [first, second]) in vectors.into_iter().chain(tables).chain(others).chain(coordinates) {
            let fits = t.ty == TensorType::I32 && t.shape == [first, second, 1, 1] && t.is_dense();
            require(fits && !t.is_empty() && t.offset.is_multiple_of(4), NAME, || {
                format!("{name} is {t}, want dense I32[{first}, {second}] for {n} rows, none of them empty")
            })?;
        }
        let positions = table.shape[0].saturating_mul(self.page);
        require(self.page > 0 && positions <= i32::MAX as usize, NAME, || {
            format!("{} pages of {} tokens, want 1 to {} tokens", table.shape[0], self.page, i32::MAX)
        })
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        for t in self.writes().iter().chain(&self.reads()) {
            reachable(NAME, t)?;
        }
        // One workgroup: all rows have read the step before it changes.
        let threads = caps.limits.max_workgroup_invocations.min(if caps.is_cpu { 32 } else { 256 });
        let shader = Shader::new(NAME, "advance/advance.comp", Params::glsl())
            .define("WG", threads)
            .define("RECENT", u32::from(self.recent.is_some()))
            .define("OTHERS", u32::from(self.others.is_some()))
            .define("COORDINATES", u32::from(self.coordinates.is_some()));
        Ok(Choice::one(Path::Scalar, shader, [1, 1, 1]))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        Params {
            sampled: at(&self.sampled),
            table: at(&self.places.table),
            tokens: at(&self.tokens),
            positions: at(&self.positions),
            lengths: at(&self.lengths),
            rows: at(&self.places.rows),
            recent: self.recent.as_ref().map_or(Address::default(), at),
            history: at(&self.history),
            step: at(&self.step),
            other_table: self.others.as_ref().map_or(Address::default(), |o| at(&o.table)),
            coordinates: self.coordinates.as_ref().map_or(Address::default(), at),
            other_rows: self.others.as_ref().map_or(Address::default(), |o| at(&o.rows)),
            n: word(self.sampled.shape[0]),
            pages: word(self.places.table.shape[0]),
            page: word(self.page),
            window: word(self.recent.map_or(0, |t| t.shape[0])),
            steps: word(self.history.shape[0]),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    #[test]
    fn operands_that_do_not_fit_are_named() {
        let t = |slot, n, m| Tensor::dense(Slot(slot), TensorType::I32, [n, m, 1, 1]);
        let good = Call {
            sampled: t(0, 3, 1),
            places: Places { table: t(1, 5, 3), rows: t(5, 3, 1) },
            others: None,
            tokens: t(2, 3, 1),
            positions: t(3, 3, 1),
            lengths: t(4, 3, 1),
            coordinates: None,
            recent: None,
            history: t(6, 8, 3),
            step: t(7, 1, 1),
            page: 16,
        };
        assert_eq!(good.check(), Ok(()));
        let reason = |call: Call| call.check().unwrap_err().reason;
        let with_table = |table| Call { places: Places { table, ..good.places }, ..good };
        assert!(reason(with_table(t(1, 5, 2))).contains("table is I32[5, 2]"));
        let others = Some(Places { table: t(9, 4, 3), rows: t(10, 3, 1) });
        assert!(reason(Call { others, ..good }).contains("the other table is I32[4, 3]"));
        assert!(reason(Call { lengths: t(4, 2, 1), ..good }).contains("lengths"));
        assert!(reason(Call { history: t(6, 0, 3), ..good }).contains("history"));
        assert!(reason(Call { recent: Some(t(8, 4, 1)), ..good }).contains("recent"));
        assert!(reason(Call { coordinates: Some(t(8, 3, 4)), ..good }).contains("coordinates is I32[3, 4]"));
        assert!(reason(Call { page: 0, ..good }).contains("5 pages of 0 tokens"));
    }
}
