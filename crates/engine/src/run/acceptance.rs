//! When drafts pay: how many drafted tokens a sequence accepts, how long steps take by their rows, and what follows for the next step.

/// Steps without a draft after which one is tried again, because the output may have changed. Each trial that fails doubles the number.
const PROBE: u32 = 32;
const LONGEST_PROBE: u32 = 1024;

/// How the drafts of one sequence have fared, from one source.
#[derive(Clone, Copy, Debug)]
pub(super) struct Acceptance {
    /// The share of drafted tokens that was accepted lately.
    rate: f64,
    /// Drafts that could have been made and were not, since one was.
    unused: u32,
    /// As many of these, and one is tried.
    patience: u32,
}

impl Default for Acceptance {
    fn default() -> Acceptance {
        Acceptance { rate: 0.7, unused: 0, patience: PROBE }
    }
}

impl Acceptance {
    /// The share of drafted tokens that was accepted lately.
    pub(super) fn rate(&self) -> f64 {
        self.rate
    }

    /// Tokens that a step with `k` drafted ones gives on average: the accepted ones up to the first wrong one, and one more.
    fn expected(&self, k: usize) -> f64 {
        (0..=k).map(|i| self.rate.powf(i as f64)).sum()
    }

    /// Whether a draft that does not seem to pay is tried all the same.
    fn is_due(&self) -> bool {
        self.unused >= self.patience
    }

    /// A draft could have been made, and was not.
    pub(super) fn pass(&mut self) {
        self.unused = self.unused.saturating_add(1);
    }

    /// So many tokens were drafted, and so many of them were right.
    pub(super) fn learn(&mut self, drafted: usize, accepted: usize) {
        if drafted == 0 {
            return;
        }
        self.patience = match accepted {
            0 if self.is_due() => (2 * self.patience).min(LONGEST_PROBE),
            0 => self.patience,
            _ => PROBE,
        };
        self.unused = 0;
        // Tokens behind the first wrong one tell nothing.
        let judged = (accepted + 1).min(drafted);
        let weight = 1.0 - 0.8f64.powf(judged as f64);
        self.rate += weight * (accepted as f64 / judged as f64 - self.rate);
        self.rate = self.rate.clamp(0.01, 0.99);
    }
}

/// A sequence that could have a draft in the next step.
pub(super) struct Candidate<'a> {
    pub(super) acceptance: Acceptance,
    /// The lengths that its draft may have, the shortest first.
    pub(super) lengths: &'a [usize],
    /// Tokens of its draft at most.
    pub(super) most: usize,
}

/// Lengths of drafts with which the next step gives the most tokens a second; 0 where a sequence's draft does not pay. The step has `rows`
/// rows without drafts, and making drafts of these lengths takes `cost` seconds.
pub(super) fn lengths(
    candidates: &[Candidate<'_>],
    rows: usize,
    times: &StepTimes,
    cost: impl Fn(&[usize]) -> f64,
) -> Vec<usize> {
    // Every lengthening of a draft, the surest first: what it adds for each row falls with the length.
    let mut steps: Vec<(f64, f64, usize, usize)> = Vec::new();
    for (at, candidate) in candidates.iter().enumerate() {
        let mut before = 0;
        for length in candidate.lengths.iter().copied().filter(|length| *length <= candidate.most) {
            let gain = candidate.acceptance.expected(length) - candidate.acceptance.expected(before);
            steps.push((gain / (length - before) as f64, gain, at, length));
            before = length;
        }
    }
    steps.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut chosen = vec![0; candidates.len()];
    let (mut expected, mut rows) = (rows as f64, rows);
    let (mut best, mut fastest) = (chosen.clone(), expected / times.of(rows));
    for (_, gain, at, length) in steps {
        expected += gain;
        rows += length - chosen[at];
        chosen[at] = length;
        let speed = expected / (times.of(rows) + cost(&chosen));
        if speed > fastest {
            (best, fastest) = (chosen.clone(), speed);
        }
    }
    // One token in a while costs little and tells when drafts pay again.
    for (length, candidate) in best.iter_mut().zip(candidates) {
        if *length == 0 && candidate.acceptance.is_due() {
            *length = candidate.lengths.iter().copied().find(|length| *length <= candidate.most).unwrap_or(0);
        }
    }
    best
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
    /// Whether a step was seen: times are seconds then.
    pub(super) fn are_known(&self) -> bool {
        self.weight > 0.0
    }

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
    pub(super) fn of(&self, rows: usize) -> f64 {
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

    const LENGTHS: [usize; 4] = [1, 3, 7, 15];

    /// Steps of `one` seconds for the first row and `more` for each other.
    fn times(one: f64, more: f64) -> StepTimes {
        let mut times = StepTimes::default();
        for i in 0..100 {
            let rows = 1 + i % 8;
            times.learn(rows, one + more * (rows - 1) as f64);
        }
        times
    }

    /// The length of the only draft of a step of one row.
    fn length(acceptance: Acceptance, most: usize, times: &StepTimes, cost: f64) -> usize {
        let candidate = Candidate { acceptance, lengths: &LENGTHS, most };
        lengths(&[candidate], 1, times, |chosen| if chosen[0] > 0 { cost * chosen[0] as f64 } else { 0.0 })[0]
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
        let mut drafts = Acceptance::default();
        (0..10).for_each(|_| drafts.learn(15, 15));
        assert_eq!(length(drafts, 15, &cheap, 0.0), 15);
        assert_eq!(length(drafts, 7, &cheap, 0.0), 7);
        assert_eq!(length(drafts, 0, &cheap, 0.0), 0);
        // What drafting costs counts: with a model as slow as the one that verifies nothing is won.
        assert_eq!(length(drafts, 15, &cheap, 10.0), 0);
        assert!(length(drafts, 15, &cheap, 1.0) >= 7);
        (0..20).for_each(|_| drafts.learn(7, 0));
        assert_eq!(length(drafts, 15, &cheap, 0.0), 0);
        // It is tried again after a while, and after a longer one where that failed.
        (0..PROBE).for_each(|_| drafts.pass());
        assert_eq!(length(drafts, 15, &cheap, 0.0), 1);
        drafts.learn(1, 0);
        (0..PROBE).for_each(|_| drafts.pass());
        assert_eq!(length(drafts, 15, &cheap, 0.0), 0);
        (0..PROBE).for_each(|_| drafts.pass());
        assert_eq!(length(drafts, 15, &cheap, 0.0), 1);
        // Rows that cost as much as steps never pay unless all are right.
        let dear = times(10.0, 10.0);
        assert_eq!(length(Acceptance::default(), 15, &dear, 0.0), 0);
    }

    #[test]
    fn of_several_sequences_those_with_surer_drafts_have_longer_ones() {
        let (mut sure, mut unsure) = (Acceptance::default(), Acceptance::default());
        (0..20).for_each(|_| sure.learn(7, 7));
        (0..20).for_each(|_| unsure.learn(7, 1));
        let candidates = [unsure, sure].map(|acceptance| Candidate { acceptance, lengths: &LENGTHS, most: 15 });
        let chosen = lengths(&candidates, 2, &times(10.0, 1.0), |_| 0.0);
        assert!(chosen[1] >= 7 && chosen[0] < chosen[1], "{chosen:?}");
        // Where rows cost much, only the surer one has a draft.
        assert_eq!(lengths(&candidates, 2, &times(10.0, 4.0), |_| 0.0)[0], 0);
    }
}
