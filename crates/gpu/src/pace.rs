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

    /// Seconds this will take.
    pub(crate) fn estimate(&self, cost: Cost) -> f64 {
        // Every dispatch costs something, whatever it does.
        let least = 2e-6;
        self.factor * (cost.bytes / self.bytes_per_second).max(cost.flops / self.flops_per_second) + least
    }

    /// Learns from a submit that was estimated at `estimated` seconds under the present factor and took `measured`.
    pub(crate) fn learn(&mut self, estimated: f64, measured: f64) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_follow_what_was_measured() {
        let mut pace = Pace::new(false);
        let cost = Cost { bytes: 3e9, flops: 0.0 };
        assert!((pace.estimate(cost) - 0.1).abs() < 1e-3);
        let slow = pace.estimate(cost);
        pace.learn(slow, 10.0 * slow);
        assert!((pace.estimate(cost) - 1.0).abs() < 1e-2, "slower is believed at once");
        for _ in 0..40 {
            let estimated = pace.estimate(cost);
            pace.learn(estimated, 0.001);
        }
        let learnt = pace.estimate(cost);
        assert!(learnt < 0.002, "faster is learnt in steps: {learnt}");
        let nothing = pace.estimate(Cost::default());
        pace.learn(nothing, 100.0 * nothing);
        assert_eq!(pace.estimate(cost), learnt, "the cost of launching nothing is not the device's speed");
    }
}
