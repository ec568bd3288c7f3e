//! How one row is sampled: what a request asks for, and the words that the kernels read.

/// Words of a row in [`super::Call::settings`].
pub const WORDS: usize = 16;

/// Shares of a whole are counted in units of 2^-24.
pub(super) const WHOLE: u32 = 1 << 24;

/// How one row is sampled. The steps act in this order: bias, mask, penalties, top_k, typical_p, top_p, min_p, temperature.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    /// 0 takes the largest logit after bias, mask and penalties: the cuts do not act then.
    pub temperature: f32,
    /// Only this many largest logits stay; 0 is off.
    pub top_k: u32,
    /// Only the most likely tokens that together reach this share stay; 1 is off.
    pub top_p: f32,
    /// Only tokens of at least this share of the most likely one's probability stay; 0 is off.
    pub min_p: f32,
    /// Only the tokens nearest to the mean surprise that together exceed this share stay; 1 is off.
    pub typical_p: f32,
    /// Logits of recent tokens are divided by it where positive, else multiplied; 1 is off.
    pub repetition: f32,
    /// Taken off a token's logit for each time it is among the recent ones; 0 is off.
    pub frequency: f32,
    /// Taken off a token's logit once if it is among the recent ones; 0 is off.
    pub presence: f32,
    /// How many of the last tokens count as recent; at most the window of [`super::Call::recent`].
    pub last_n: u32,
    /// The draw depends on it, the position and the logits alone.
    pub seed: u64,
    /// How many entries of [`super::Bias`] count.
    pub biases: u32,
    /// Whether the row's mask counts.
    pub masked: bool,
}

impl Default for Row {
    fn default() -> Row {
        Row {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            repetition: 1.0,
            frequency: 0.0,
            presence: 0.0,
            last_n: 0,
            seed: 0,
            biases: 0,
            masked: false,
        }
    }
}

impl Row {
    /// What is wrong with the numbers, if anything: name, value, what is wanted.
    pub fn check(&self) -> Result<(), String> {
        let share = 0.0..=1.0;
        let rules = [
            ("temperature", self.temperature, self.temperature >= 0.0, "0 or more"),
            ("top_p", self.top_p, share.contains(&self.top_p), "0 to 1"),
            ("min_p", self.min_p, share.contains(&self.min_p), "0 to 1"),
            ("typical_p", self.typical_p, share.contains(&self.typical_p), "0 to 1"),
            ("repetition", self.repetition, self.repetition > 0.0, "more than 0"),
            ("frequency", self.frequency, true, ""),
            ("presence", self.presence, true, ""),
        ];
        match rules.iter().find(|(_, value, fits, _)| !fits || !value.is_finite()) {
            None => Ok(()),
            Some((name, value, _, "")) => Err(format!("{name} is {value}, want a finite number")),
            Some((name, value, _, want)) => Err(format!("{name} is {value}, want a finite number of {want}")),
        }
    }

    /// Whether tokens must be ranked before one is drawn. Rows for which this is false need no more than
    /// [`super::Call::cuts`] == false offers.
    pub fn cuts(&self) -> bool {
        Words::of(&self.encode()).cuts()
    }

    /// The row's words, floats as their bits: temperature, top_k, top_p and typical_p in units of 2^-24, ln(min_p), repetition
    /// and its inverse, frequency, presence, last_n, seed (low, high), biases, masked; the rest is 0.
    pub fn encode(&self) -> [i32; WORDS] {
        let float = |x: f32| x.to_bits() as i32;
        let share = |x: f32| (f64::from(x) * f64::from(WHOLE)).round().clamp(0.0, f64::from(WHOLE)) as i32;
        let mut words = [0; WORDS];
        words[..14].copy_from_slice(&[
            float(self.temperature),
            self.top_k.min(i32::MAX as u32) as i32,
            share(self.top_p),
            share(self.typical_p),
            float(if self.min_p > 0.0 { f64::from(self.min_p).ln() as f32 } else { f32::NEG_INFINITY }),
            float(self.repetition),
            float(1.0 / self.repetition),
            float(self.frequency),
            float(self.presence),
            self.last_n.min(i32::MAX as u32) as i32,
            self.seed as i32,
            (self.seed >> 32) as i32,
            self.biases as i32,
            i32::from(self.masked),
        ]);
        words
    }
}

/// A row's words, named.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words {
    pub(super) temperature: f32,
    pub(super) top_k: usize,
    pub(super) top_p: u32,
    pub(super) typical_p: u32,
    pub(super) ln_min_p: f32,
    pub(super) repetition: f32,
    pub(super) inverse_repetition: f32,
    pub(super) frequency: f32,
    pub(super) presence: f32,
    pub(super) last_n: usize,
    pub(super) seed: u64,
    pub(super) biases: usize,
    pub(super) masked: bool,
}

impl Words {
    pub(super) fn of(words: &[i32]) -> Words {
        let float = |i: usize| f32::from_bits(words[i] as u32);
        let count = |i: usize| usize::try_from(words[i]).unwrap_or(0);
        Words {
            temperature: float(0),
            top_k: count(1),
            top_p: words[2] as u32,
            typical_p: words[3] as u32,
            ln_min_p: float(4),
            repetition: float(5),
            inverse_repetition: float(6),
            frequency: float(7),
            presence: float(8),
            last_n: count(9),
            seed: u64::from(words[10] as u32) | u64::from(words[11] as u32) << 32,
            biases: count(12),
            masked: words[13] != 0,
        }
    }

    pub(super) fn cuts(&self) -> bool {
        let shares = self.top_p < WHOLE || self.typical_p < WHOLE;
        self.temperature > 0.0 && (self.top_k > 0 || shares || self.ln_min_p > f32::NEG_INFINITY)
    }

    /// The weight that the most likely tokens must reach together.
    pub(super) fn top_p_of(&self, total: u64) -> u64 {
        (u128::from(total) * u128::from(self.top_p)).div_ceil(WHOLE.into()).max(1) as u64
    }

    /// The weight that the most typical tokens must reach together: more than the share.
    pub(super) fn typical_p_of(&self, total: u64) -> u64 {
        (u128::from(total) * u128::from(self.typical_p) / u128::from(WHOLE)) as u64 + 1
    }
}

/// The mean distance, a whole number of units of 2^-19: 24 bits, so it is the same float everywhere.
pub(super) fn mean_distance(spreads: u64, weights: u64) -> f32 {
    const UNITS: u32 = 1 << 19;
    (u128::from(spreads) * u128::from(UNITS) / u128::from(weights.max(1))) as f32 / UNITS as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_say_what_is_wrong_and_when_they_cut() {
        assert_eq!(Row::default().check(), Ok(()));
        let row = Row { temperature: 0.8, ..Row::default() };
        assert!(!row.cuts() && Row { top_k: 40, ..row }.cuts() && Row { top_p: 0.9, ..row }.cuts());
        assert!(Row { min_p: 0.05, ..row }.cuts() && Row { typical_p: 0.9, ..row }.cuts());
        assert!(!Row { temperature: 0.0, top_k: 40, ..row }.cuts());
        for wrong in [
            Row { temperature: f32::NAN, ..row },
            Row { top_p: 1.5, ..row },
            Row { min_p: -0.1, ..row },
            Row { repetition: 0.0, ..row },
            Row { presence: f32::INFINITY, ..row },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
        assert!(Row { top_p: 1.5, ..row }.check().unwrap_err().contains("top_p is 1.5"));
    }

    #[test]
    fn words_hold_what_the_row_says() {
        let row =
            Row { temperature: 0.5, top_k: 7, top_p: 0.5, min_p: 1.0, seed: 0x1234_5678_9abc_def0, ..Row::default() };
        let words = Words::of(&row.encode());
        assert_eq!((words.temperature, words.top_k, words.top_p, words.ln_min_p), (0.5, 7, WHOLE / 2, 0.0));
        assert_eq!((words.seed, words.masked, words.typical_p), (row.seed, false, WHOLE));
        assert_eq!((words.top_p_of(7), words.top_p_of(0), words.top_p_of(8), words.typical_p_of(7)), (4, 1, 4, 8));
        assert_eq!(mean_distance(3 << 40, 2 << 40), 1.5);
    }
}
