//! How fast an engine prefills, as far as its steps have shown, and how many rows a step should have.

use std::collections::BTreeMap;
use std::time::Duration;

use super::shapes::{fine, full};
use super::work::Work;

/// A step with fewer rows tells more about what every step costs than about rows.
const LEAST_ROWS: usize = 32;
/// Rows per second before anything was measured.
const FIRST_GUESS: f64 = 1000.0;
/// How much a new measurement counts.
const NEW: f64 = 0.5;
/// How far the other sizes move toward the fastest smaller one with each measurement. Their times were those of other contexts, so a
/// size that was slow once is tried again.
const FORGOTTEN: f64 = 0.02;

/// How much faster than others a size may turn out that was never measured.
const HOPE: f64 = 1.25;
/// How much faster a smaller step must be to be taken instead of a larger one.
const WORTH: f64 = 1.01;

/// Rows that an engine computes in a second while it prefills, padding included, by the number of rows of a step: GEMM tiles fit
/// some numbers much better than others.
#[derive(Default)]
pub(super) struct PrefillRate {
    by_rows: BTreeMap<usize, f64>,
}

impl PrefillRate {
    /// Learns from a step with enough rows. What went into preparing its plan says nothing about the next step.
    pub(super) fn learn(&mut self, work: Work, took: Duration) {
        let ran = took.saturating_sub(work.preparing);
        let rows = usize::try_from(work.rows).unwrap_or(usize::MAX);
        if rows < LEAST_ROWS || ran == Duration::ZERO {
            return;
        }
        let (size, measured) = (fine(rows), rows as f64 / ran.as_secs_f64());
        let rate = self.by_rows.entry(size).or_insert(measured);
        *rate += NEW * (measured - *rate);
        let others = self.by_rows.keys().filter(|rows| **rows != size).map(|rows| (*rows, self.of_smaller(*rows)));
        for (rows, hoped) in others.collect::<Vec<_>>() {
            self.by_rows.entry(rows).and_modify(|rate| *rate += FORGOTTEN * (hoped - *rate));
        }
    }

    /// Whether any step has told.
    pub(super) fn has_learnt(&self) -> bool {
        !self.by_rows.is_empty()
    }

    /// What steps of so many rows reach if they do as well as smaller ones: more rows are not slower where tiles fit them.
    fn of_smaller(&self, rows: usize) -> f64 {
        let smaller = self.by_rows.range(..=rows).map(|(_, rate)| *rate).reduce(f64::max);
        smaller.or_else(|| self.by_rows.values().next().copied()).unwrap_or(FIRST_GUESS)
    }

    /// Rows per second of steps of so many rows. Of sizes that were never measured, larger and smaller ones than all others may turn out faster, so
    /// they are tried; of the smaller ones only powers of two, which tiles fit best.
    fn expected(&self, rows: usize) -> f64 {
        if let Some(rate) = self.by_rows.get(&fine(rows)) {
            return *rate;
        }
        let [smallest, largest] = [self.by_rows.keys().next(), self.by_rows.keys().next_back()];
        let is_new = largest.is_some_and(|largest| rows > *largest)
            || smallest.is_some_and(|smallest| rows < *smallest && rows.is_power_of_two());
        self.of_smaller(rows) * if is_new { HOPE } else { 1.0 }
    }

    /// Rows of a step that is over in this time, at most so many, such that most prompt tokens a second are computed beside so many
    /// sequences that decode.
    pub(super) fn rows_in(&self, time: Duration, most: usize, decode: usize) -> usize {
        let fits = |rows: &usize| *rows as f64 <= self.expected(*rows) * time.as_secs_f64();
        let tokens_per_second = |rows: usize| self.expected(rows) * rows.saturating_sub(decode) as f64 / rows as f64;
        let sizes = std::iter::successors(Some(full(most)), |rows| rows.checked_sub(1).map(full));
        let sizes =
            sizes.take_while(|rows| *rows >= LEAST_ROWS).filter(fits).map(|rows| (rows, tokens_per_second(rows)));
        // The largest comes first and wins where nothing is clearly faster.
        sizes.reduce(|a, b| if b.1 > WORTH * a.1 { b } else { a }).map_or(0, |(rows, _)| rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const BUDGET: Duration = Duration::from_millis(70);

    fn work(rows: usize) -> Work {
        Work { rows: rows as u64, ..Work::default() }
    }

    #[test]
    fn plans_that_are_made_do_not_slow_the_rate() {
        // 5,000 rows a second; each step meets a new shape, whose plan takes ten times as long.
        let (mut rate, mut plain) = (PrefillRate::default(), PrefillRate::default());
        let (ran, preparing) = (Duration::from_millis(100), SECOND);
        for _ in 0..20 {
            rate.learn(Work { rows: 500, preparing, plans: 1 }, ran + preparing);
            plain.learn(work(500), ran);
        }
        assert_eq!(rate.rows_in(BUDGET, 2048, 0), plain.rows_in(BUDGET, 2048, 0));
        assert_eq!(rate.rows_in(BUDGET, 2048, 0), 256, "350 rows at most, and 256 may be faster than 320");
    }

    #[test]
    fn only_steps_with_rows_and_time_of_their_own_tell() {
        let mut rate = PrefillRate::default();
        rate.learn(work(LEAST_ROWS - 1), SECOND);
        rate.learn(Work { rows: 500, preparing: SECOND, plans: 1 }, SECOND);
        assert!(!rate.has_learnt() && rate.rows_in(SECOND, 2048, 0) == 896);
        rate.learn(work(LEAST_ROWS), SECOND);
        assert!(rate.has_learnt() && rate.rows_in(SECOND, 2048, 0) == 40);
        assert_eq!(rate.rows_in(Duration::from_nanos(1), 2048, 0), 0);
    }

    /// Milliseconds of steps of an 8B model on an H200, where 768 rows take nearly as long as 1,024.
    fn milliseconds(rows: usize) -> f64 {
        match rows {
            0..=512 => 4.0 + rows as f64 * 0.059,
            640 => 52.0,
            768 => 61.0,
            896 => 59.0,
            1024 => 64.5,
            _ => rows as f64 * 0.058 + 6.0,
        }
    }

    fn after_steps(start: usize, decode: usize, most: usize, time: impl Fn(usize) -> f64) -> (PrefillRate, usize) {
        let mut rate = PrefillRate::default();
        let mut rows = start;
        for _ in 0..30 {
            rate.learn(work(rows), Duration::from_secs_f64(time(rows) / 1e3));
            rows = rate.rows_in(BUDGET, most, decode).max(LEAST_ROWS);
        }
        (rate, rows)
    }

    #[test]
    fn a_step_gets_the_rows_that_are_computed_fastest_wherever_it_started() {
        for start in [32, 64, 512, 640, 768, 1024, 2048] {
            for decode in [0, 8, 64] {
                assert_eq!(after_steps(start, decode, 2048, milliseconds).1, 1024, "from {start} beside {decode}");
            }
        }
        // A device whose rows all cost the same: as many as fit.
        assert_eq!(after_steps(64, 4, 2048, |rows| rows as f64 * 0.1).1, 640);
    }

    #[test]
    fn trying_other_sizes_costs_little() {
        // 512 rows are best where 1,024 do not fit, 15 in a millisecond; 640 to 896 take longer for each.
        let (mut rate, _) = after_steps(32, 0, 1000, milliseconds);
        let (mut rows, mut time) = (0, 0.0);
        for _ in 0..500 {
            let step = rate.rows_in(BUDGET, 1000, 0);
            rate.learn(work(step), Duration::from_secs_f64(milliseconds(step) / 1e3));
            (rows, time) = (rows + step, time + milliseconds(step));
        }
        assert!(rows as f64 / time > 0.95 * 512.0 / milliseconds(512), "{rows} rows in {time} ms");
    }

    #[test]
    fn a_size_that_was_slow_once_is_tried_again() {
        let (mut rate, _) = after_steps(1024, 8, 2048, milliseconds);
        // Behind long contexts it takes too long, and smaller steps come.
        (0..5).for_each(|_| rate.learn(work(1024), Duration::from_millis(90)));
        assert!(rate.rows_in(BUDGET, 2048, 8) < 1024);
        let back = (0..400).find(|_| {
            let rows = rate.rows_in(BUDGET, 2048, 8);
            rate.learn(work(rows), Duration::from_secs_f64(milliseconds(rows) / 1e3));
            rows == 1024
        });
        assert!(back.is_some_and(|steps| (1..300).contains(&steps)), "{back:?}");
    }
}
