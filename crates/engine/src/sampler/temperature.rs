//! Temperature: how flat the distribution is made. The dynamic one is hotter where the model is less sure.

use super::candidates::Candidates;
use super::sampling::Sampling;

/// Divides the logits by the temperature; keeps only the best where it is not positive.
pub(super) fn apply(candidates: &mut Candidates, sampling: &Sampling) {
    let temperature = match sampling.dynatemp_range > 0.0 && candidates.len() > 1 {
        true => dynamic(candidates, sampling),
        false => sampling.temperature,
    };
    if temperature > 0.0 {
        candidates.divide(temperature);
    } else {
        candidates.sort_front(1);
        candidates.truncate(1);
    }
}

/// Between `temperature - range` and `temperature + range`, by the entropy's share of the largest possible one.
fn dynamic(candidates: &Candidates, sampling: &Sampling) -> f32 {
    let coldest = (sampling.temperature - sampling.dynatemp_range).max(0.0);
    let hottest = sampling.temperature + sampling.dynatemp_range;
    let entropy: f64 = candidates.probabilities().into_iter().filter(|p| *p > 0.0).map(|p| -p * p.ln()).sum();
    let share = entropy / (candidates.len() as f64).ln();
    coldest + (hottest - coldest) * share.powf(f64::from(sampling.dynatemp_exponent)) as f32
}

#[cfg(test)]
mod tests {
    use super::super::candidates::tests::{candidates, ids};
    use super::*;

    #[test]
    fn hand_computed() {
        let mut found = candidates(&[1.0, 2.0]);
        apply(&mut found, &Sampling { temperature: 0.5, ..Sampling::default() });
        found.settle();
        assert_eq!(found.items().iter().map(|item| item.logit).collect::<Vec<_>>(), [2.0, 4.0]);
        for zero in [0.0, -1.0] {
            let mut found = candidates(&[1.0, 2.0]);
            apply(&mut found, &Sampling { temperature: zero, ..Sampling::default() });
            assert_eq!(ids(&found), [1]);
        }
    }

    #[test]
    fn dynamic_follows_the_entropy() {
        let sampling =
            Sampling { temperature: 1.0, dynatemp_range: 0.5, dynatemp_exponent: 1.0, ..Sampling::default() };
        // Nothing is known: as hot as it gets. All is known: as cold as it gets.
        assert!((dynamic(&candidates(&[3.0; 4]), &sampling) - 1.5).abs() < 1e-6);
        assert!((dynamic(&candidates(&[90.0, 0.0, 0.0]), &sampling) - 0.5).abs() < 1e-6);
        // Probabilities 1/2, 1/4, 1/4: entropy 1.5 ln 2 of at most ln 3.
        let logits = [0.5f32.ln(), 0.25f32.ln(), 0.25f32.ln()];
        let share = 1.5 * 2f32.ln() / 3f32.ln();
        assert!((dynamic(&candidates(&logits), &sampling) - (0.5 + share)).abs() < 1e-6);
        let squared = Sampling { dynatemp_exponent: 2.0, ..sampling };
        assert!((dynamic(&candidates(&logits), &squared) - (0.5 + share * share)).abs() < 1e-6);
    }
}
