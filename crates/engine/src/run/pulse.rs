//! A sign of life of the engine's thread, which others can see without asking it: one that hangs in a driver answers nobody.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// When the engine's thread last got on. It beats at every step, and within those that take long: whoever computes on the CPU beats
/// for each operation, and waiting for a GPU has a limit of its own.
#[derive(Debug)]
pub struct Pulse {
    since: Instant,
    /// Milliseconds from `since` to the last beat; `RESTING` where there is nothing to do.
    last: AtomicU64,
}

const RESTING: u64 = u64::MAX;

impl Default for Pulse {
    fn default() -> Pulse {
        Pulse { since: Instant::now(), last: AtomicU64::new(RESTING) }
    }
}

impl Pulse {
    fn now(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_millis()).unwrap_or(RESTING - 1)
    }

    /// The thread got on with its work.
    pub fn beat(&self) {
        self.last.store(self.now(), Ordering::Relaxed);
    }

    /// The thread waits for work, or does what may take any time.
    pub(super) fn rest(&self) {
        self.last.store(RESTING, Ordering::Relaxed);
    }

    /// Whether it got on within this time, or has nothing that it would beat for.
    pub fn got_on_within(&self, time: Duration) -> bool {
        self.silent().is_none_or(|silent| silent < time)
    }

    /// For how long there was no beat, where there is work.
    pub(super) fn silent(&self) -> Option<Duration> {
        let last = self.last.load(Ordering::Relaxed);
        (last != RESTING).then(|| Duration::from_millis(self.now().saturating_sub(last)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_counts_while_there_is_work() {
        let pulse = Pulse::default();
        assert_eq!(pulse.silent(), None);
        pulse.beat();
        std::thread::sleep(Duration::from_millis(30));
        assert!(pulse.silent().expect("it works") >= Duration::from_millis(20));
        pulse.beat();
        assert!(pulse.silent().expect("it works") < Duration::from_millis(20));
        pulse.rest();
        assert_eq!(pulse.silent(), None);
    }
}
