//! How requests share an engine.

use std::time::Duration;

use super::drafting::{DraftLimits, Heads};
use super::lookup::Lookup;

/// How requests share an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// Requests that may wait; one more is refused.
    pub queue: usize,
    /// How long one step may keep those who write waiting for others' prompts.
    pub stutter: Duration,
    /// How long one step may take while a single prompt is read and nobody writes: whoever comes then waits for its end. None for as
    /// long as it takes, where nobody else will come.
    pub alone: Option<Duration>,
    /// Bytes of host memory for texts that must make room for others.
    pub swap_bytes: usize,
    /// Whether tokens are drafted by lookup.
    pub lookup: Lookup,
    /// Whether the kernels of all batch shapes are compiled in the background: where requests of many sizes will come.
    pub compiles_ahead: bool,
    /// How a draft model or a head drafts, where the engine has one.
    pub draft: DraftLimits,
    /// Whether the head in the model's file drafts, where it was read.
    pub heads: Heads,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            queue: 1024,
            stutter: Duration::from_millis(70),
            alone: None,
            swap_bytes: 4 << 30,
            lookup: Lookup::Auto,
            compiles_ahead: false,
            draft: DraftLimits::default(),
            heads: Heads::default(),
        }
    }
}
