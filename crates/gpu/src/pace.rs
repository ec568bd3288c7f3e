//! How long work will take, learnt from how long work took. Submits are cut so that each stays far below the time
//! after which drivers take a GPU for hung (two seconds on some).

/// A submit should take about this long.
pub(crate) const TARGET_SECONDS: f64 = 0.1;

/// Arithmetic and traffic of one dispatch, as its caller counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Bytes moved.
    pub bytes: f64,
    /// Arithmetic operations.
    pub flops: f64,
}

/// The device's speed as far as it is known.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    bytes_per_second: f64,
    flops_per_second: f64,
    /// Measured time over estimated time, smoothed.
    factor: f64,
}

impl Pace {
    /// First guesses are low: a submit that is too small costs microseconds, one too large may cost the device.
    pub(crate) fn new(is_cpu: bool) -> Pace {
        let (bytes_per_second, flops_per_second) = if is_cpu { (2e9, 2e9) } else { (30e9, 200e9) };
        Pace { bytes_per_second, flops_per_second, factor: 1.0 }
    }

    /// What a dispatch adds to a submit.
    pub(crate) fn work(&self, cost: Cost) -> Work {
        let seconds = (cost.bytes / self.bytes_per_second).max(cost.flops / self.flops_per_second);
        Work { seconds, steps: 1 }
    }

    /// Seconds this will take, by what is known now.
    pub(crate) fn estimate(&self, work: Work) -> f64 {
        // Every dispatch costs something, whatever it does.
        let least = 2e-6;
        self.factor * work.seconds + least * work.steps as f64
    }

    /// Learns from a submit that took `measured` seconds. The same recording may run many times: each time it is judged
    /// by what is known now, not by what was known when it was recorded, or the difference would count again and again.
    pub(crate) fn learn(&mut self, work: Work, measured: f64) {
        let estimated = self.estimate(work);
        // What is short by both accounts says more about launching than about the device's speed: believed, a copy of a
        // few bytes would make every later dispatch a submit of its own.
        if measured <= 0.0 || (estimated < 0.01 * TARGET_SECONDS && measured < 0.5 * TARGET_SECONDS) {
            return;
        }
        let wanted = (self.factor * measured / estimated).clamp(1e-4, 1e3);
        // Slower than thought is believed at once, faster only step by step.
        self.factor = if wanted > self.factor { wanted } else { 0.7 * self.factor + 0.3 * wanted };
    }
}

/// Work of a submit: seconds by the first guesses of the device's speed, and dispatches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Work {
    seconds: f64,
    steps: usize,
}

impl std::ops::Add for Work {
    type Output = Work;
    fn add(self, other: Work) -> Work {
        Work { seconds: self.seconds + other.seconds, steps: self.steps + other.steps }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_follow_what_was_measured() {
        let mut pace = Pace::new(false);
        let work = pace.work(Cost { bytes: 3e9, flops: 0.0 });
        let slow = pace.estimate(work);
        assert!((slow - 0.1).abs() < 1e-3);
        pace.learn(work, 10.0 * slow);
        assert!((pace.estimate(work) - 1.0).abs() < 1e-2, "slower is believed at once");
        for _ in 0..40 {
            pace.learn(work, 0.001);
        }
        let learnt = pace.estimate(work);
        assert!(learnt < 0.002, "faster is learnt in steps: {learnt}");
        let nothing = pace.work(Cost::default());
        pace.learn(nothing, 100.0 * pace.estimate(nothing));
        assert_eq!(pace.estimate(work), learnt, "the cost of launching nothing is not the device's speed");
    }

    /// A recording that runs again and again teaches what one run does.
    #[test]
    fn a_difference_counts_once() {
        for (times, slower) in [(1, 5.0), (50, 5.0), (50, 0.2)] {
            let mut pace = Pace::new(false);
            let work = pace.work(Cost { bytes: 3e9, flops: 0.0 });
            let measured = slower * pace.estimate(work);
            (0..times).for_each(|_| pace.learn(work, measured));
            assert!((pace.estimate(work) / measured - 1.0).abs() < 0.01, "{times} times: {}", pace.estimate(work));
        }
    }
}
