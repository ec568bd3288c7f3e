//! How fast an engine prefills, as far as its steps have shown.

use std::time::Duration;

use super::work::Work;

/// A step with fewer rows tells more about what every step costs than about rows.
const LEAST_ROWS: u64 = 32;

/// Rows that an engine computes in a second while it prefills, padding included.
pub(super) struct PrefillRate {
    rows_per_second: f64,
    has_learnt: bool,
}

impl Default for PrefillRate {
    fn default() -> PrefillRate {
        PrefillRate { rows_per_second: 1000.0, has_learnt: false }
    }
}

impl PrefillRate {
    /// Learns from a step with enough rows. What went into making its plan says nothing about the next step.
    pub(super) fn learn(&mut self, work: Work, took: Duration) {
        let ran = took.saturating_sub(work.preparing);
        if work.rows >= LEAST_ROWS && ran > Duration::ZERO {
            let rate = work.rows as f64 / ran.as_secs_f64();
            self.rows_per_second = 0.5 * self.rows_per_second + 0.5 * rate;
            self.has_learnt = true;
        }
    }

    /// Whether any step has told.
    pub(super) fn has_learnt(&self) -> bool {
        self.has_learnt
    }

    /// Rows of a step that takes so long.
    pub(super) fn rows_in(&self, time: Duration) -> usize {
        (self.rows_per_second * time.as_secs_f64()) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn plans_that_are_made_do_not_slow_the_rate() {
        // 5,000 rows a second; each step meets a new shape, whose plan takes ten times as long.
        let (mut rate, mut plain) = (PrefillRate::default(), PrefillRate::default());
        let (ran, preparing) = (Duration::from_millis(100), SECOND);
        for _ in 0..20 {
            rate.learn(Work { rows: 500, preparing, plans: 1 }, ran + preparing);
            plain.learn(Work { rows: 500, ..Work::default() }, ran);
        }
        assert_eq!(rate.rows_in(SECOND), plain.rows_in(SECOND));
        assert!((4900..=5000).contains(&rate.rows_in(SECOND)), "{}", rate.rows_in(SECOND));
    }

    #[test]
    fn only_steps_with_rows_and_time_of_their_own_tell() {
        let mut rate = PrefillRate::default();
        rate.learn(Work { rows: LEAST_ROWS - 1, ..Work::default() }, SECOND);
        rate.learn(Work { rows: 500, preparing: SECOND, plans: 1 }, SECOND);
        assert!(!rate.has_learnt() && rate.rows_in(SECOND) == 1000);
        rate.learn(Work { rows: LEAST_ROWS, ..Work::default() }, SECOND);
        assert!(rate.has_learnt() && rate.rows_in(SECOND) < 1000);
    }
}
