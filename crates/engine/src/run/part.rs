//! What one sequence brings into a step.

use super::engine::{SequenceId, Wanted};

/// What one sequence has in a step.
pub(super) struct Part {
    pub(super) active: usize,
    /// Which text goes on; none while the prompt is read.
    pub(super) choice: Option<usize>,
    pub(super) sequence: SequenceId,
    pub(super) tokens: Vec<u32>,
    pub(super) wanted: Wanted,
}

impl Part {
    /// Whether it has drafted tokens behind the last one of a text.
    pub(super) fn has_draft(&self) -> bool {
        self.choice.is_some() && self.tokens.len() > 1
    }
}
