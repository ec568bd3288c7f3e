//! The tokens that may still be chosen, with their logits. Samplers drop and change them; the order is kept only where a
//! sampler asks for it.

use std::cmp::Ordering;

use super::logprobs::Logprobs;

/// A token that may be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) id: u32,
    pub(super) logit: f32,
}

impl Candidate {
    /// Best first; the lower id first among equals, so that a result never depends on how a sort moves equals.
    fn order(&self, other: &Self) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.id.cmp(&other.id))
    }
}

/// The candidates of one draw.
#[derive(Clone, Debug)]
pub(super) struct Candidates {
    items: Vec<Candidate>,
    /// How many items at the front are the best ones, in order.
    sorted: usize,
    /// What the logits are still to be divided by.
    temperature: f32,
}

impl Candidates {
    /// Takes over a list in any order.
    pub(super) fn new(items: Vec<Candidate>) -> Self {
        Self { items, sorted: 0, temperature: 1.0 }
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    pub(super) fn items(&self) -> &[Candidate] {
        &self.items
    }

    /// The best candidate.
    pub(super) fn best(&self) -> Option<Candidate> {
        match self.sorted {
            0 => self.items.iter().copied().min_by(Candidate::order),
            _ => self.items.first().copied(),
        }
    }

    /// Changes logits; the order is lost.
    pub(super) fn change(&mut self, change: impl FnMut(&mut Candidate)) {
        self.items.iter_mut().for_each(change);
        self.sorted = 0;
    }

    /// Divides all logits by a positive number, at once or when a sampler wants to see them: where nothing comes after
    /// the temperature, a draw multiplies the noise by it, which is the same bits on every device.
    pub(super) fn divide(&mut self, by: f32) {
        self.temperature *= by;
    }

    /// Does the division that is still to be done; the order stays.
    pub(super) fn settle(&mut self) {
        if self.temperature != 1.0 {
            for item in &mut self.items {
                item.logit /= self.temperature;
            }
            self.temperature = 1.0;
        }
    }

    /// What the logits are still to be divided by.
    pub(super) fn temperature(&self) -> f32 {
        self.temperature
    }

    /// Keeps what passes; the order stays.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&Candidate) -> bool) {
        let sorted = self.sorted;
        let (mut index, mut left) = (0, 0);
        self.items.retain(|item| {
            let kept = keep(item);
            left += usize::from(kept && index < sorted);
            index += 1;
            kept
        });
        self.sorted = left;
    }

    /// Brings the best `n` to the front, in order, and gives them.
    pub(super) fn sort_front(&mut self, n: usize) -> &[Candidate] {
        let n = n.min(self.items.len());
        if n > self.sorted {
            let rest = &mut self.items[self.sorted..];
            let wanted = n - self.sorted;
            if wanted < rest.len() {
                rest.select_nth_unstable_by(wanted - 1, Candidate::order);
            }
            rest[..wanted].sort_unstable_by(Candidate::order);
            self.sorted = n;
        }
        &self.items[..n]
    }

    /// Brings all into order.
    pub(super) fn sort(&mut self) {
        self.sort_front(self.items.len());
    }

    /// Keeps the first `n` of the present order.
    pub(super) fn truncate(&mut self, n: usize) {
        self.items.truncate(n);
        self.sorted = self.sorted.min(self.items.len());
    }

    /// Drops the first `n` of the present order.
    pub(super) fn drop_front(&mut self, n: usize) {
        self.items.drain(..n);
        self.sorted = self.sorted.saturating_sub(n);
    }

    /// Keeps the candidates of these places, in this order.
    pub(super) fn keep_places(&mut self, places: &[usize]) {
        self.items = places.iter().map(|&place| self.items[place]).collect();
        self.sorted = 0;
    }

    /// The largest logit and the sum of `exp(logit - largest)`.
    pub(super) fn partition(&self) -> (f32, f64) {
        let largest = self.items.iter().map(|item| item.logit).fold(f32::NEG_INFINITY, f32::max);
        let sum = self.items.iter().map(|item| f64::from(item.logit - largest).exp()).sum();
        (largest, sum)
    }

    /// Logarithms of the probabilities: of a token, and of so many best ones, as far as there are any.
    pub(super) fn logprobs(&mut self, token: u32, top: usize) -> Logprobs {
        self.settle();
        let (largest, sum) = self.partition();
        let of = |item: &Candidate| (f64::from(item.logit - largest) - sum.ln()) as f32;
        let logprob = self.items.iter().find(|item| item.id == token).map_or(f32::NEG_INFINITY, of);
        Logprobs { logprob, top: self.sort_front(top).iter().map(|item| (item.id, of(item))).collect() }
    }

    /// The probabilities, in the present order.
    pub(super) fn probabilities(&self) -> Vec<f64> {
        let (largest, sum) = self.partition();
        self.items.iter().map(|item| f64::from(item.logit - largest).exp() / sum).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Candidates with ids 0, 1, 2, ...
    pub(in super::super) fn candidates(logits: &[f32]) -> Candidates {
        Candidates::new((0..).zip(logits).map(|(id, &logit)| Candidate { id, logit }).collect())
    }

    /// Candidates with ids 0, 1, 2, ... and these probabilities.
    pub(in super::super) fn from_probabilities(probabilities: &[f32]) -> Candidates {
        candidates(&probabilities.iter().map(|p| p.ln()).collect::<Vec<_>>())
    }

    /// What is left, by id.
    pub(in super::super) fn ids(candidates: &Candidates) -> Vec<u32> {
        let mut ids: Vec<u32> = candidates.items().iter().map(|item| item.id).collect();
        ids.sort_unstable();
        ids
    }

    #[test]
    fn the_front_is_sorted_step_by_step() {
        let logits = [0.5, 2.0, -1.0, 2.0, 7.0, 3.0, -9.0];
        for steps in [vec![1, 2, 7], vec![3, 3, 100], vec![7], vec![0, 1]] {
            let mut found = candidates(&logits);
            for step in steps {
                let want = [4u32, 5, 1, 3, 0, 2, 6];
                let got: Vec<u32> = found.sort_front(step).iter().map(|item| item.id).collect();
                assert_eq!(got, want[..step.min(7)]);
            }
        }
    }

    #[test]
    fn probabilities_are_those_of_what_is_left() {
        let mut found = from_probabilities(&[0.1, 0.5, 0.3, 0.1]);
        found.sort_front(2);
        found.truncate(2);
        found.divide(0.5);
        let Logprobs { logprob, top } = found.logprobs(2, 9);
        let close = |got: f32, want: f32| (got.exp() - want).abs() < 1e-5;
        assert!(close(logprob, 9.0 / 34.0), "{logprob}");
        assert_eq!(top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 2]);
        assert!(close(top[0].1, 25.0 / 34.0) && found.logprobs(0, 1).logprob == f32::NEG_INFINITY);
    }

    #[test]
    fn dropping_keeps_the_order_that_is_there() {
        let mut found = candidates(&[1.0, 5.0, 3.0, 4.0, 2.0]);
        found.sort_front(3);
        found.retain(|item| item.id != 3);
        assert_eq!(found.best().map(|item| item.id), Some(1));
        let front: Vec<u32> = found.sort_front(4).iter().map(|item| item.id).collect();
        assert_eq!(front, [1, 2, 4, 0]);
        found.drop_front(1);
        assert_eq!(found.best().map(|item| item.id), Some(2));
    }
}
