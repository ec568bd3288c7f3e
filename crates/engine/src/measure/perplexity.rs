//! Perplexity: the exponential of the mean negative logarithm of the probability that a model gave to the tokens that came.

/// The mean of values that come one by one, and how sure it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mean {
    count: u64,
    sum: f64,
    squares: f64,
}

impl Mean {
    /// One value more.
    pub fn add(&mut self, value: f64) {
        self.count += 1;
        self.sum += value;
        self.squares += value * value;
    }

    /// Number of values.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The mean.
    pub fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }

    /// The standard error of the mean; zero where there is too little to tell.
    pub fn error(&self) -> f64 {
        if self.count < 2 {
            return 0.0;
        }
        let mean = self.mean();
        let variance = self.squares / self.count as f64 - mean * mean;
        (variance.max(0.0) / (self.count - 1) as f64).sqrt()
    }
}

/// A perplexity with its uncertainty.
#[derive(Clone, Copy, Debug, Default)]
pub struct Estimate {
    /// Of the negative logarithms of probability.
    pub losses: Mean,
}

impl Estimate {
    /// The perplexity.
    pub fn perplexity(&self) -> f64 {
        self.losses.mean().exp()
    }

    /// Its standard error.
    pub fn error(&self) -> f64 {
        self.losses.error() * self.perplexity()
    }
}

/// The logits of one place, ready to be asked for logarithms of probability.
#[derive(Clone, Copy, Debug)]
pub struct LogProbs<'a> {
    logits: &'a [f32],
    /// The largest of them.
    largest: f64,
    /// What is taken from a logit, once the largest is, to make it a logarithm of probability. The two are kept apart: in their
    /// sum a large logit would swallow it.
    rest: f64,
    /// The likeliest token.
    pub likeliest: usize,
}

impl<'a> LogProbs<'a> {
    /// Sums up the logits of one place; `None` where one of them is no number.
    pub fn new(logits: &'a [f32]) -> Option<LogProbs<'a>> {
        let (mut likeliest, mut largest) = (0, f32::NEG_INFINITY);
        for (id, &logit) in logits.iter().enumerate() {
            if logit.is_nan() {
                return None;
            }
            if logit > largest {
                (likeliest, largest) = (id, logit);
            }
        }
        if !largest.is_finite() {
            return None;
        }
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
        Some(LogProbs { logits, largest: f64::from(largest), rest: sum.ln(), likeliest })
    }

    /// The logarithm of the probability of a token.
    pub fn of(&self, token: usize) -> f64 {
        f64::from(self.logits[token]) - self.largest - self.rest
    }

    /// The logits themselves.
    pub fn logits(&self) -> &'a [f32] {
        self.logits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_knows_nothing_has_the_size_of_its_vocabulary() {
        let mut estimate = Estimate::default();
        let even = [3.0; 50];
        for token in 0..20 {
            estimate.losses.add(-LogProbs::new(&even).unwrap().of(token));
        }
        assert!((estimate.perplexity() - 50.0).abs() < 1e-9 && estimate.error() < 1e-6);
    }

    #[test]
    fn probabilities_sum_to_one_however_large_the_logits() {
        let logits = [1e30, 1e30, -1e30, 0.0];
        let probs = LogProbs::new(&logits).unwrap();
        let sum: f64 = (0..4).map(|token| probs.of(token).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-9 && probs.likeliest == 0);
        assert!(LogProbs::new(&[0.0, f32::NAN]).is_none());
        assert!(LogProbs::new(&[f32::NEG_INFINITY; 2]).is_none());
    }

    #[test]
    fn the_error_is_that_of_the_mean() {
        let mut mean = Mean::default();
        [1.0, 2.0, 3.0, 4.0].iter().for_each(|&value| mean.add(value));
        // The variance is 1.25, over three degrees of freedom.
        assert!((mean.mean() - 2.5).abs() < 1e-12 && (mean.error() - (1.25f64 / 3.0).sqrt()).abs() < 1e-12);
    }
}
