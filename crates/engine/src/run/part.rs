//! What one sequence brings into a step.

use super::drafting::Source;
use super::engine::{SequenceId, Wanted};

/// What one sequence has in a step.
pub(super) struct Part {
    pub(super) active: usize,
    /// Which text goes on; none while the prompt is read.
    pub(super) choice: Option<usize>,
    pub(super) sequence: SequenceId,
    pub(super) tokens: Vec<u32>,
    pub(super) wanted: Wanted,
    /// Where the last tokens were drafted: by whom, and how many.
    pub(super) draft: Option<(Source, usize)>,
}

impl Part {
    /// Whether it has drafted tokens behind the last one of a text.
    pub(super) fn has_draft(&self) -> bool {
        self.draft.is_some()
    }

    /// Whether it is one token of a text, as run-ahead decode takes it.
    pub(super) fn is_one_token(&self) -> bool {
        self.choice.is_some() && self.tokens.len() == 1
    }
}
