//! How far the probabilities of one model are from another's: the Kullback-Leibler divergence of every place, and how often
//! both would say the same.

use super::perplexity::{Estimate, LogProbs, Mean};

/// What is compared with: the logarithms of probability that the other model gave, by token.
pub trait Base {
    /// The logarithm of the probability of a token.
    fn of(&self, token: usize) -> f64;
    /// The likeliest token.
    fn likeliest(&self) -> usize;
}

impl Base for LogProbs<'_> {
    fn of(&self, token: usize) -> f64 {
        LogProbs::of(self, token)
    }

    fn likeliest(&self) -> usize {
        self.likeliest
    }
}

/// Below this a probability of the base counts as nothing: a file keeps no more of it.
const LEAST: f64 = -16.0;

/// What one place shows: the divergence, whether both would say the same, and the base's loss on the token that came.
pub fn compare(base: &dyn Base, probs: &LogProbs<'_>, token: usize) -> (f64, bool, f64) {
    let term = |id: usize| {
        let log = base.of(id);
        if log > LEAST { log.exp() * (log - probs.of(id)) } else { 0.0 }
    };
    let divergence = (0..probs.logits().len()).map(term).sum::<f64>().max(0.0);
    (divergence, base.likeliest() == probs.likeliest, -base.of(token))
}

/// Divergences of many places.
#[derive(Clone, Debug, Default)]
pub struct Divergence {
    all: Vec<f64>,
    /// Of the divergences.
    pub mean: Mean,
    /// Of one where both say the same, and zero elsewhere.
    pub same: Mean,
    /// The perplexity of the base on the same text.
    pub base: Estimate,
    /// Of the differences of the losses.
    pub loss: Mean,
}

/// Where the divergences lie.
#[derive(Clone, Copy, Debug)]
pub struct Quantiles {
    /// Half are below.
    pub median: f64,
    /// 90 of a hundred are below.
    pub p90: f64,
    /// 99 of a hundred are below.
    pub p99: f64,
    /// 999 of a thousand are below.
    pub p999: f64,
    /// The largest.
    pub largest: f64,
}

impl Divergence {
    /// One place more; `loss` is the model's own on the token that came.
    pub fn add(&mut self, (divergence, same, base_loss): (f64, bool, f64), loss: f64) {
        self.all.push(divergence);
        self.mean.add(divergence);
        self.same.add(f64::from(u8::from(same)));
        self.base.losses.add(base_loss);
        self.loss.add(loss - base_loss);
    }

    /// Where the divergences lie; `None` where there are none.
    pub fn quantiles(&self) -> Option<Quantiles> {
        let mut sorted = self.all.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        let at = |share: f64| sorted[((last as f64) * share).round() as usize];
        Some(Quantiles { median: at(0.5), p90: at(0.9), p99: at(0.99), p999: at(0.999), largest: sorted[last] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_does_not_differ_from_itself_and_two_do() {
        let (a, b) = ([1.0, 2.0, 0.5, -1.0], [2.0, 1.0, 0.5, -1.0]);
        let (pa, pb) = (LogProbs::new(&a).unwrap(), LogProbs::new(&b).unwrap());
        let (zero, same, loss) = compare(&pa, &pa, 1);
        assert!(zero < 1e-12 && same && (loss + pa.of(1)).abs() < 1e-12);
        let (divergence, same, _) = compare(&pa, &pb, 1);
        let want: f64 = (0..4).map(|id| pa.of(id).exp() * (pa.of(id) - pb.of(id))).sum();
        assert!(!same && (divergence - want).abs() < 1e-12 && divergence > 0.1);
        let mut all = Divergence::default();
        for i in 0..=1000 {
            all.add((f64::from(i), i % 4 == 0, 1.0), 2.0);
        }
        let q = all.quantiles().unwrap();
        assert_eq!((q.median, q.p90, q.p99, q.p999, q.largest), (500.0, 900.0, 990.0, 999.0, 1000.0));
        assert!((all.same.mean() - 0.25).abs() < 1e-3 && (all.loss.mean() - 1.0).abs() < 1e-12);
        assert!(Divergence::default().quantiles().is_none());
    }
}
