//! Drafts by lookup: what followed the last tokens of a sequence where they stood before is likely to follow again. A step verifies the
//! drafted tokens as rows of the same sequence, and only those stay that the request would have drawn anyway.

use super::media::is_vector;

/// Lengths of the pattern that is looked up: a long one first, because what follows it is surer.
const PATTERNS: [usize; 2] = [8, 4];

/// Tokens of a sequence that are searched at most, the latest ones.
const SEARCHED: usize = 1 << 16;

/// Drafts have one of these lengths, the longest first, so that steps meet few shapes.
const LENGTHS: [usize; 4] = [15, 7, 3, 1];

/// With more sequences in a step its rows already share the weights, and drafts rarely pay.
pub(super) const MOST_SEQUENCES: usize = 4;

/// A step in so many is drafted though it does not seem to pay: the text may have changed.
const PROBE: u32 = 32;

/// Whether drafts are looked up in the prompt and the generated text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lookup {
    /// Where a step's rows are known to cost less together than one by one, and no device runs ahead: on the CPU.
    #[default]
    Auto,
    /// Wherever the model can take tokens back, whatever steps cost.
    On,
    /// Never.
    Off,
}

/// What probably follows `text` and `last`: at most `most` tokens, of one of the usual numbers.
pub(super) fn draft(text: &[u32], last: u32, most: usize) -> &[u32] {
    let from = text.len().saturating_sub(SEARCHED);
    let text = &text[from..];
    let found = PATTERNS.iter().find_map(|n| follows(text, last, *n));
    let Some(found) = found else { return &[] };
    // A picture cannot be drawn.
    let tokens = found.iter().position(|token| is_vector(*token)).unwrap_or(found.len());
    let length = LENGTHS.into_iter().find(|length| *length <= tokens.min(most)).unwrap_or(0);
    &found[..length]
}

/// What stands behind the latest earlier place of the last `n` tokens.
fn follows(text: &[u32], last: u32, n: usize) -> Option<&[u32]> {
    let before = text.len().checked_sub(n - 1)?;
    let pattern = &text[before..];
    let stands = |end: &usize| text[*end] == last && *end + 1 >= n && text[*end + 1 - n..*end] == *pattern;
    let end = (0..text.len()).rev().find(stands)?;
    Some(&text[end + 1..]).filter(|found| !found.is_empty())
}

/// How the drafts of one text have fared.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drafts {
    /// The share of drafted tokens that was accepted lately.
    rate: f64,
    /// Drafts that were found and not used since one was.
    unused: u32,
    /// Tokens that were drafted and accepted in all.
    pub(super) drafted: usize,
    pub(super) accepted: usize,
}

impl Default for Drafts {
    fn default() -> Drafts {
        Drafts { rate: 0.7, unused: 0, drafted: 0, accepted: 0 }
    }
}

impl Drafts {
    /// Tokens of the next draft, at most `found`, so that a step gives the most tokens a second; 0 where no draft pays. The step has so
    /// many rows beside the draft.
    pub(super) fn length(&self, found: usize, rows: usize, times: &StepTimes) -> usize {
        let speed = |k: usize| self.expected(k) / times.of(rows + k);
        let best = LENGTHS.into_iter().filter(|k| *k <= found).max_by(|a, b| speed(*a).total_cmp(&speed(*b)));
        match best {
            Some(best) if speed(best) > speed(0) => best,
            // One token in a while costs little and tells when it pays again.
            Some(_) if self.unused >= PROBE => 1,
            _ => 0,
        }
    }

    /// Tokens that a step with `k` drafted ones gives on average: the accepted ones up to the first wrong one, and one more.
    fn expected(&self, k: usize) -> f64 {
        (0..=k).map(|i| self.rate.powf(i as f64)).sum()
    }

    /// A draft was found that does not pay.
    pub(super) fn pass(&mut self) {
        self.unused += 1;
    }

    /// So many tokens were drafted, and so many of them were right.
    pub(super) fn learn(&mut self, drafted: usize, accepted: usize) {
        self.unused = 0;
        // Tokens behind the first wrong one tell nothing.
        let judged = (accepted + 1).min(drafted);
        let weight = 1.0 - 0.8f64.powf(judged as f64);
        self.rate += weight * (accepted as f64 / judged as f64 - self.rate);
        self.rate = self.rate.clamp(0.01, 0.99);
    }
}

/// How long steps take by their rows: a line through the steps of late.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepTimes {
    weight: f64,
    rows: f64,
    seconds: f64,
    rows_squared: f64,
    product: f64,
    /// Seconds of one more row, as long as steps of different sizes told.
    slope: Option<f64>,
}

/// What a step counts after the next one, against 1 for the next.
const FORGETTING: f64 = 0.95;

/// Rows of late must differ by so much (squared, on average) before they tell what a row costs.
const LEAST_VARIANCE: f64 = 0.25;

impl StepTimes {
    /// A step of so many rows took so long.
    pub(super) fn learn(&mut self, rows: usize, seconds: f64) {
        let rows = rows as f64;
        let add = |sum: &mut f64, value: f64| *sum = FORGETTING * *sum + value;
        add(&mut self.weight, 1.0);
        add(&mut self.rows, rows);
        add(&mut self.seconds, seconds);
        add(&mut self.rows_squared, rows * rows);
        add(&mut self.product, rows * seconds);
        let (mean, time) = (self.rows / self.weight, self.seconds / self.weight);
        let variance = self.rows_squared / self.weight - mean * mean;
        if variance >= LEAST_VARIANCE {
            let slope = (self.product / self.weight - mean * time) / variance;
            // A row more costs something, and not more than a step of its own.
            self.slope = Some(slope.clamp(0.02 * time / mean, time / mean));
        }
    }

    /// How long a step of so many rows takes; any number in the same proportion before one was seen.
    fn of(&self, rows: usize) -> f64 {
        if self.weight == 0.0 {
            return 1.0 + 0.1 * rows as f64;
        }
        let (mean, time) = (self.rows / self.weight, self.seconds / self.weight);
        let slope = self.slope.unwrap_or(0.1 * time / mean);
        (time + slope * (rows as f64 - mean)).max(0.05 * time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_place_of_the_longest_pattern_gives_the_draft() {
        let text = [1, 2, 3, 4, 50, 51, 52, 53, 1, 2, 3, 4, 60, 61, 62, 63, 1, 2, 3];
        assert_eq!(draft(&text, 4, 15), [60, 61, 62, 63, 1, 2, 3]);
        assert_eq!(draft(&text, 4, 2), [60]);
        assert_eq!(draft(&text, 4, 0), [0u32; 0]);
        assert_eq!(draft(&text, 5, 15), [0u32; 0]);
        // Eight tokens alike say more than the latest four.
        let text = [9, 8, 7, 6, 1, 2, 3, 4, 70, 71, 72, 5, 1, 2, 3, 4, 80, 81, 82, 9, 8, 7, 6, 1, 2, 3];
        assert_eq!(draft(&text, 4, 7), [70, 71, 72, 5, 1, 2, 3]);
    }

    #[test]
    fn a_text_that_repeats_itself_is_its_own_draft() {
        let text: Vec<u32> = (0..40).map(|i| i % 4).collect();
        assert_eq!(draft(&text, 0, 15), [1, 2, 3]);
        for length in 0..8 {
            assert_eq!(draft(&text[..length.min(3)], 3, 15), [0u32; 0]);
        }
    }

    #[test]
    fn no_vector_is_drafted() {
        let vector = 1u32 << 31;
        let text = [1, 2, 3, 4, 50, vector, 51, 52, 1, 2, 3];
        assert_eq!(draft(&text, 4, 15), [50]);
    }

    /// Steps of `one` seconds for the first row and `more` for each other.
    fn times(one: f64, more: f64) -> StepTimes {
        let mut times = StepTimes::default();
        for i in 0..100 {
            let rows = 1 + i % 8;
            times.learn(rows, one + more * (rows - 1) as f64);
        }
        times
    }

    #[test]
    fn times_are_learnt_as_a_line() {
        let times = times(10.0, 2.0);
        assert!((times.of(1) - 10.0).abs() < 0.1 && (times.of(16) - 40.0).abs() < 0.5, "{times:?}");
        // Steps of one size alone leave the slope as it is.
        let mut later = times;
        (0..200).for_each(|_| later.learn(1, 10.0));
        assert!((later.of(1) - 10.0).abs() < 0.1 && (later.of(2) - 12.0).abs() < 0.2, "{later:?}");
    }

    #[test]
    fn drafts_are_long_where_they_are_right_and_end_where_they_do_not_pay() {
        let cheap = times(10.0, 1.0);
        let mut drafts = Drafts::default();
        (0..10).for_each(|_| drafts.learn(15, 15));
        assert_eq!(drafts.length(15, 1, &cheap), 15);
        assert_eq!(drafts.length(7, 1, &cheap), 7);
        assert_eq!(drafts.length(0, 1, &cheap), 0);
        (0..20).for_each(|_| drafts.learn(7, 0));
        assert_eq!(drafts.length(15, 1, &cheap), 0);
        // It is tried again after a while.
        (0..PROBE).for_each(|_| drafts.pass());
        assert_eq!(drafts.length(15, 1, &cheap), 1);
        // Rows that cost as much as steps never pay unless all are right.
        let dear = times(10.0, 10.0);
        assert_eq!(Drafts::default().length(15, 1, &dear), 0);
    }
}
