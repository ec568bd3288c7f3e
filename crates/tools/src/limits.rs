//! How much tools may take: turns, time, bytes.

use std::time::{Duration, Instant};

/// What bounds the tools of one conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Answers to one message that may call tools; then the model must answer without.
    pub turns: usize,
    /// Calls of one answer that are made.
    pub calls: usize,
    /// How long one call may take.
    pub call_time: Duration,
    /// How long one message may take with all its answers and calls.
    pub total_time: Duration,
    /// Bytes of a result that the model is given.
    pub output: usize,
    /// Bytes that an MCP server may send while it is asked one thing; pictures are among them.
    pub received: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            turns: 16,
            calls: 16,
            call_time: Duration::from_secs(60),
            total_time: Duration::from_secs(600),
            output: 64 << 10,
            received: 8 << 20,
        }
    }
}

/// How long somebody waits for a result.
pub struct Wait<'a> {
    /// Until then.
    pub until: Instant,
    /// Or until this says so; it is asked several times a second.
    pub cancelled: &'a dyn Fn() -> bool,
}

impl Wait<'_> {
    /// How long a sleep may take before `cancelled` is asked again; none when the time is over.
    pub(crate) fn slice(&self) -> Option<Duration> {
        let left = self.until.saturating_duration_since(Instant::now());
        (!left.is_zero()).then(|| left.min(Duration::from_millis(50)))
    }
}
