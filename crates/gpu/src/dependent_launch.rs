//! Dependent launches, as CUDA's programmatic dependent launch: kernels wait for the previous dispatch by a counter in memory instead of a
//! barrier. Behind a barrier a dispatch starts when the previous one has ended, and loads its first weights only then. A dependent launch
//! starts while the previous dispatch still runs, loads what does not depend on it (its weights), and continues when all workgroups of
//! the previous dispatch have incremented the counter.
//!
//! Vulkan does not guarantee that dispatches start in recording order. The caller proves it on the device first
//! (`kiln_kernels::dependent_launch`). A kernel that waits too long sets a flag and continues, so that a wrong proof costs one result, not the
//! device.

use crate::params::{Address, push};
use crate::{Buffer, Error, Shader, Span};

/// Each counter has a cache line of its own. The first line holds the flag that a kernel sets when it gives up waiting.
pub(crate) const LINE: u64 = 128;

/// The fields that a dependent launch appends to its parameter block (`dependent_launch.glsl`).
const FIELDS: &str = "uvec2 grid_counters; uint signal_at; uint wait_for;";
/// Most bytes of these fields, alignment included.
pub const FIELD_BYTES: usize = 24;

impl Shader {
    /// This kernel as a dependent launch. Its file must include `kiln.glsl`.
    pub fn launching_dependent(mut self) -> Shader {
        if !self.launches_dependent {
            let end = self.params.rfind('}').expect("a kernel's parameters should be one block");
            self.params.insert_str(end, &format!("{FIELDS} "));
            self.launches_dependent = true;
            self = self.define("DEPENDENT_LAUNCH", 1);
        }
        self
    }
}

/// Bytes of the counters for `dispatches` dispatches.
pub fn counter_bytes(dispatches: usize) -> u64 {
    LINE * (dispatches as u64 + 2)
}

/// The counters of a recording: the current line, and what was written since the last barrier.
#[derive(Debug)]
pub(crate) struct Chain {
    pub(crate) counters: Buffer,
    lines: Lines,
    /// Ranges written since the last barrier: a kernel that reads one of them before `grid_wait` needs a barrier.
    written: Vec<Span>,
}

impl Chain {
    pub(crate) fn new(counters: &Buffer, on: bool) -> Chain {
        Chain { counters: counters.clone(), lines: Lines::new(counters.bytes(), on), written: Vec::new() }
    }

    /// A barrier was recorded. `fresh`: the counters were zeroed as well.
    pub(crate) fn after_barrier(&mut self, fresh: bool) {
        self.lines.after_barrier(fresh);
        self.written.clear();
    }

    /// Whether any of these ranges was written since the last barrier.
    pub(crate) fn has_written(&self, spans: &[Span]) -> bool {
        spans.iter().any(|span| self.written.iter().any(|written| written.overlaps(*span)))
    }

    pub(crate) fn write(&mut self, spans: &[Span]) {
        self.written.extend_from_slice(spans);
    }

    /// Whether the next dispatch can wait for those since the last wait by their counter.
    pub(crate) fn can_wait(&self) -> bool {
        self.lines.can_wait()
    }

    /// The next dispatch waits for those since the last wait.
    pub(crate) fn wait(&mut self) {
        self.lines.wait();
    }

    /// Whether dispatches are pending that only a counter orders: what comes next must wait for them.
    pub(crate) fn is_waiting(&self) -> bool {
        self.lines.from > 0
    }

    /// Records a step that does not increment a counter.
    pub(crate) fn uncounted(&mut self) {
        self.lines.counted = false;
    }

    /// Assigns a counter to a dispatch and returns its parameters with the counter fields appended.
    pub(crate) fn count(&mut self, name: &str, params: &[u8], groups: [u32; 3]) -> Result<Vec<u8>, Error> {
        let (at, from) = self.lines.count(groups.iter().product()).ok_or_else(|| Error::OverLimit {
            name: name.to_owned(),
            what: "bytes of counters",
            needs: counter_bytes(0),
            limit: self.counters.bytes(),
        })?;
        let mut bytes = params.to_vec();
        push(&mut bytes, Address(self.counters.address().0));
        push(&mut bytes, at);
        push(&mut bytes, from);
        Ok(bytes)
    }
}

/// Assigns counter lines: dispatches between two waits share one.
#[derive(Debug)]
struct Lines {
    /// Whether kernels wait by counters. If not, barriers order them and their wait count is 0.
    on: bool,
    /// Number of the last line; 0 if the buffer has none.
    last: u64,
    /// Number of the current line. When lines run out, dispatches share the last one and barriers order them.
    line: u64,
    /// Workgroups recorded so far that increment it.
    here: u32,
    /// Value that the previous line must reach; 0 after a barrier.
    from: u32,
    /// Whether every step since the last wait increments a counter.
    counted: bool,
}

impl Lines {
    /// Lines of a buffer of `bytes` bytes.
    fn new(bytes: u64, on: bool) -> Lines {
        Lines { on, last: (bytes / LINE).saturating_sub(1), line: 1, here: 0, from: 0, counted: true }
    }

    fn after_barrier(&mut self, fresh: bool) {
        self.line = match (fresh, self.here) {
            (true, _) => 1,
            // No dispatch has used this line.
            (false, 0) => self.line,
            (false, _) => (self.line + 1).min(self.last),
        };
        (self.here, self.from, self.counted) = (0, 0, true);
    }

    /// The last line is never waited for: dispatches before a barrier may have incremented it.
    fn can_wait(&self) -> bool {
        self.on && self.counted && self.here > 0 && self.line < self.last
    }

    fn wait(&mut self) {
        self.line += 1;
        (self.from, self.here) = (self.here, 0);
    }

    /// Adds `groups` workgroups to the current line. Returns the byte offset of the line and the value to wait for on the previous one, or
    /// `None` if the buffer has no line.
    fn count(&mut self, groups: u32) -> Option<(u32, u32)> {
        let at = u32::try_from(self.line * LINE).ok().filter(|_| self.line <= self.last)?;
        self.here += groups;
        Some((at, self.from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(dispatches: usize) -> Lines {
        Lines::new(counter_bytes(dispatches), true)
    }

    #[test]
    fn barriers_between_dispatches_take_no_lines_of_others() {
        let mut lines = lines(3);
        // Copies before, between and behind dispatches, each with a barrier of its own.
        for line in [1, 2] {
            for _ in 0..5 {
                lines.after_barrier(false);
            }
            let at = u32::try_from(LINE).unwrap() * line;
            assert_eq!(lines.count(4), Some((at, 0)), "a barrier was waited for");
        }
        assert!(lines.can_wait());
        lines.wait();
        assert_eq!(lines.count(2), Some((3 * u32::try_from(LINE).unwrap(), 4)));
    }

    #[test]
    fn dispatches_past_the_room_for_counters_wait_by_barriers() {
        let mut lines = lines(2);
        let mut waits = 0;
        for dispatch in 0..9 {
            if lines.can_wait() {
                lines.wait();
                waits += 1;
            } else if dispatch > 0 {
                lines.after_barrier(false);
            }
            let (at, from) = lines.count(7).unwrap();
            assert!(u64::from(at) + LINE <= counter_bytes(2), "dispatch {dispatch} counts at {at}");
            assert_eq!(from, if waits > 0 && dispatch == waits { 7 } else { 0 }, "dispatch {dispatch}");
        }
        assert_eq!(waits, 2);
        lines.after_barrier(true);
        assert_eq!(lines.count(1), Some((u32::try_from(LINE).unwrap(), 0)), "fresh counters");
        assert!(lines.can_wait());
    }

    #[test]
    fn a_buffer_without_a_line_is_an_error() {
        assert_eq!(Lines::new(LINE, true).count(1), None);
        assert!(!Lines::new(0, true).can_wait());
    }
}
