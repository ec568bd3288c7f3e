//! Handing memory on without a barrier. A dispatch that waits for those before it by a barrier starts when the last of them has
//! ended, and loads its first weights then. Kernels that hand over wait themselves, by a counter in memory: they start while the
//! dispatch before still runs, load what does not depend on it, and go on when all its workgroups have counted themselves.
//!
//! Vulkan does not promise that dispatches start in the order of their recording. Whoever uses this proves it on the device
//! first; a kernel that has waited for too long leaves a mark and goes on, so that a wrong promise costs a result and no device.

use crate::params::{Address, push};
use crate::{Buffer, Shader, Span};

/// Counters lie apart, each in a cache line of its own. The first line holds the mark of a kernel that gave up.
pub(crate) const LINE: u64 = 128;

/// What every kernel that hands over has at the end of its parameters (`hand_over.glsl`).
const FIELDS: &str = "uvec2 hand; uint hand_at; uint hand_from;";
/// Most bytes they take, with what they may be aligned by.
pub const FIELD_BYTES: usize = 24;

impl Shader {
    /// This kernel, waiting for those before it by itself. Its file must include `kiln.glsl`.
    pub fn handing_over(mut self) -> Shader {
        if !self.hands_over {
            let end = self.params.rfind('}').expect("a kernel's parameters should be one block");
            self.params.insert_str(end, &format!("{FIELDS} "));
            self.hands_over = true;
            self = self.define("HANDOVER", 1);
        }
        self
    }
}

/// Bytes of the counters of so many dispatches.
pub fn counter_bytes(dispatches: usize) -> u64 {
    LINE * (dispatches as u64 + 2)
}

/// Where a recording is in the chain of counters: dispatches between two waits count together.
#[derive(Debug)]
pub(crate) struct Chain {
    pub(crate) counters: Buffer,
    /// Whether kernels wait by counters; else barriers stand between them, and they find nothing to wait for.
    on: bool,
    /// Number of the line that dispatches count on now.
    line: u64,
    /// Workgroups that count on it, as far as they are recorded.
    here: u32,
    /// Workgroups that the line before must have counted; 0 where a barrier was waited for instead.
    from: u32,
    /// Whether all dispatches since the last wait count.
    counted: bool,
    /// What was written since the last barrier: kernels that read it before they wait need one.
    written: Vec<Span>,
}

impl Chain {
    pub(crate) fn new(counters: &Buffer, on: bool) -> Chain {
        Chain { counters: counters.clone(), on, line: 1, here: 0, from: 0, counted: true, written: Vec::new() }
    }

    /// Everything before was waited for by a barrier. `fresh`: the counters were set to zero as well.
    pub(crate) fn after_barrier(&mut self, fresh: bool) {
        self.line = if fresh { 1 } else { self.line + 1 };
        (self.here, self.from, self.counted) = (0, 0, true);
        self.written.clear();
    }

    /// Whether any of this was written since the last barrier.
    pub(crate) fn has_written(&self, spans: &[Span]) -> bool {
        spans.iter().any(|span| self.written.iter().any(|written| written.overlaps(*span)))
    }

    pub(crate) fn write(&mut self, spans: &[Span]) {
        self.written.extend_from_slice(spans);
    }

    /// Whether the next dispatch can wait for those since the last wait by their counter.
    pub(crate) fn can_wait(&self) -> bool {
        self.on && self.counted && self.here > 0 && (self.line + 2) * LINE <= self.counters.bytes()
    }

    /// The next dispatch waits for those since the last wait.
    pub(crate) fn wait(&mut self) {
        self.line += 1;
        (self.from, self.here) = (self.here, 0);
    }

    /// Whether what comes next must not run before dispatches that only a counter can be waited for by.
    pub(crate) fn is_waiting(&self) -> bool {
        self.from > 0
    }

    /// A step that does not count.
    pub(crate) fn uncounted(&mut self) {
        self.counted = false;
    }

    /// Counts a dispatch, and gives its parameters with what it needs to know.
    pub(crate) fn count(&mut self, params: &[u8], groups: [u32; 3]) -> Vec<u8> {
        assert!((self.line + 1) * LINE <= self.counters.bytes(), "there should be a counter for every dispatch");
        self.here += groups.iter().product::<u32>();
        let mut bytes = params.to_vec();
        push(&mut bytes, Address(self.counters.address().0));
        push(&mut bytes, u32::try_from(self.line * LINE).expect("counters take few bytes"));
        push(&mut bytes, self.from);
        bytes
    }
}
