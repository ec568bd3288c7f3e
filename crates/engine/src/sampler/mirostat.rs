//! Mirostat 2: tokens that surprise more than `mu` bits are left out, and `mu` is steered so that the surprise of what is
//! drawn is `tau` on average.

use super::candidates::Candidates;

/// The state between draws.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mirostat {
    tau: f32,
    eta: f32,
    mu: f32,
}

impl Mirostat {
    pub(super) fn new(tau: f32, eta: f32) -> Self {
        Self { tau, eta, mu: 2.0 * tau }
    }

    /// Leaves out what surprises too much; the best always stays.
    pub(super) fn truncate(&self, candidates: &mut Candidates) {
        candidates.sort();
        let kept = candidates.probabilities().iter().take_while(|p| -p.log2() <= f64::from(self.mu)).count();
        candidates.truncate(kept.max(1));
    }

    /// Learns from a draw: `probability` is that of the token among those that were left.
    pub(super) fn observe(&mut self, probability: f64) {
        self.mu -= self.eta * (-probability.log2() as f32 - self.tau);
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidates::tests::{from_probabilities, ids};
    use super::*;

    #[test]
    fn hand_computed() {
        let mut mirostat = Mirostat::new(1.0, 0.5);
        mirostat.mu = 2.1;
        // mu is a little more than 2 bits: 1/2 has one bit, 1/4 two, 1/8 three.
        let mut found = from_probabilities(&[0.125, 0.5, 0.125, 0.25]);
        mirostat.truncate(&mut found);
        assert_eq!(ids(&found), [1, 3]);
        // A draw of 3 bits is 2 more than wanted: mu falls by half of that.
        mirostat.mu = 2.0;
        mirostat.observe(0.125);
        assert_eq!(mirostat.mu, 1.0);
        mirostat.observe(1.0);
        assert_eq!(mirostat.mu, 1.5);
        mirostat.mu = -3.0;
        mirostat.truncate(&mut found);
        assert_eq!(ids(&found), [1]);
    }
}
