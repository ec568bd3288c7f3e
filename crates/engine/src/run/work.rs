//! What runs have cost: rows that were computed, plans that were prepared.

use std::time::Duration;

/// What runs cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Work {
    /// Rows that were computed, padding included. Steps of run-ahead decode are not among them.
    pub(super) rows: u64,
    /// Time that went into preparing plans: mostly into compiling kernels.
    pub(super) preparing: Duration,
    /// Plans that were prepared.
    pub(super) plans: u64,
}

impl std::ops::Sub for Work {
    type Output = Work;

    fn sub(self, before: Work) -> Work {
        Work {
            rows: self.rows - before.rows,
            preparing: self.preparing.saturating_sub(before.preparing),
            plans: self.plans - before.plans,
        }
    }
}
