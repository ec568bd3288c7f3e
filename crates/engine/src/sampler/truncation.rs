//! Samplers that leave out unlikely tokens, and one that leaves out likely ones. Each keeps at least `min_keep`.

use super::candidates::Candidates;

/// Keeps the `k` best; all where `k` is not positive.
pub(super) fn top_k(candidates: &mut Candidates, k: i32, min_keep: usize) {
    let Some(k) = usize::try_from(k).ok().filter(|&k| k > 0) else { return };
    let k = k.max(min_keep);
    candidates.sort_front(k);
    candidates.truncate(k);
}

/// Keeps the best until their probabilities reach `p`.
pub(super) fn top_p(candidates: &mut Candidates, p: f32, min_keep: usize) {
    if p >= 1.0 {
        return;
    }
    let (largest, sum) = candidates.partition();
    // Few candidates usually hold most of the probability, so that not all need to be sorted.
    let (mut reached, mut done, mut window) = (0.0, 0, 64);
    while done < candidates.len() {
        for item in &candidates.sort_front(window)[done..] {
            reached += f64::from(item.logit - largest).exp() / sum;
            done += 1;
            if reached >= f64::from(p) && done >= min_keep {
                candidates.truncate(done);
                return;
            }
        }
        window *= 4;
    }
}

/// Keeps what is at least `p` times as likely as the best.
pub(super) fn min_p(candidates: &mut Candidates, p: f32, min_keep: usize) {
    let Some(best) = candidates.best().filter(|_| p > 0.0) else { return };
    let least = best.logit + p.ln();
    let kept = candidates.items().iter().filter(|item| item.logit >= least).count();
    if kept >= min_keep {
        candidates.retain(|item| item.logit >= least);
    } else {
        candidates.sort_front(min_keep);
        candidates.truncate(min_keep);
    }
}

/// Keeps what is about as surprising as the distribution is on average, until its probabilities exceed `p`.
pub(super) fn typical(candidates: &mut Candidates, p: f32, min_keep: usize) {
    if p >= 1.0 {
        return;
    }
    candidates.sort();
    let probabilities = candidates.probabilities();
    let entropy: f64 = probabilities.iter().filter(|p| **p > 0.0).map(|p| -p * p.ln()).sum();
    let distance = |place: usize| (-probabilities[place].ln() - entropy).abs();
    let mut places: Vec<usize> = (0..probabilities.len()).collect();
    places.sort_by(|&a, &b| distance(a).total_cmp(&distance(b)));
    let mut reached = 0.0;
    let enough = places.iter().zip(1..).find_map(|(&place, count)| {
        reached += probabilities[place];
        (reached > f64::from(p) && count >= min_keep).then_some(count)
    });
    places.truncate(enough.unwrap_or(places.len()));
    candidates.keep_places(&places);
}

/// Keeps what is within `n` standard deviations of the best logit; all where `n` is not positive.
pub(super) fn top_n_sigma(candidates: &mut Candidates, n: f32) {
    let Some(best) = candidates.best().filter(|_| n > 0.0 && candidates.len() > 1) else { return };
    let count = candidates.len() as f64;
    let mean = candidates.items().iter().map(|item| f64::from(item.logit)).sum::<f64>() / count;
    let squares: f64 = candidates.items().iter().map(|item| (f64::from(item.logit) - mean).powi(2)).sum();
    let least = f64::from(best.logit) - f64::from(n) * (squares / count).sqrt();
    candidates.retain(|item| f64::from(item.logit) >= least || item.id == best.id);
}

/// Leaves out all but the least likely of the tokens whose probability reaches `threshold`. The caller has already
/// drawn whether it happens this time.
pub(super) fn xtc(candidates: &mut Candidates, threshold: f32, min_keep: usize) {
    if threshold > 0.5 || candidates.len() < 2 {
        return;
    }
    candidates.sort();
    let reaching = candidates.probabilities().iter().take_while(|p| **p >= f64::from(threshold)).count();
    let dropped = reaching.saturating_sub(1);
    if dropped > 0 && candidates.len() - dropped >= min_keep {
        candidates.drop_front(dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::super::candidates::tests::{candidates, from_probabilities, ids};
    use super::*;

    fn after(probabilities: &[f32], apply: impl Fn(&mut Candidates)) -> Vec<u32> {
        let mut found = from_probabilities(probabilities);
        apply(&mut found);
        ids(&found)
    }

    #[test]
    fn top_k_keeps_the_best() {
        let p = [0.1, 0.2, 0.3, 0.4];
        assert_eq!(after(&p, |c| top_k(c, 1, 1)), [3]);
        assert_eq!(after(&p, |c| top_k(c, 3, 1)), [1, 2, 3]);
        assert_eq!(after(&p, |c| top_k(c, 1, 2)), [2, 3]);
        assert_eq!(after(&p, |c| top_k(c, 0, 1)), [0, 1, 2, 3]);
        assert_eq!(after(&p, |c| top_k(c, -1, 1)), [0, 1, 2, 3]);
        assert_eq!(after(&p, |c| top_k(c, 9, 1)), [0, 1, 2, 3]);
    }

    #[test]
    fn top_p_keeps_until_the_sum_is_reached() {
        let p = [0.1, 0.2, 0.3, 0.4];
        assert_eq!(after(&p, |c| top_p(c, 0.0, 1)), [3]);
        assert_eq!(after(&p, |c| top_p(c, 0.69, 1)), [2, 3]);
        assert_eq!(after(&p, |c| top_p(c, 0.75, 1)), [1, 2, 3]);
        assert_eq!(after(&p, |c| top_p(c, 0.0, 3)), [1, 2, 3]);
        assert_eq!(after(&p, |c| top_p(c, 1.0, 1)), [0, 1, 2, 3]);
        // More than one window of candidates.
        let even = vec![0.001; 1000];
        assert_eq!(after(&even, |c| top_p(c, 0.4995, 1)), (0..500).collect::<Vec<_>>());
    }

    #[test]
    fn min_p_is_relative_to_the_best() {
        let p = [0.1, 0.2, 0.3, 0.4];
        assert_eq!(after(&p, |c| min_p(c, 0.0, 1)), [0, 1, 2, 3]);
        assert_eq!(after(&p, |c| min_p(c, 0.24, 1)), [0, 1, 2, 3]);
        assert_eq!(after(&p, |c| min_p(c, 0.26, 1)), [1, 2, 3]);
        assert_eq!(after(&p, |c| min_p(c, 0.76, 1)), [3]);
        assert_eq!(after(&p, |c| min_p(c, 0.76, 3)), [1, 2, 3]);
        assert_eq!(after(&p, |c| min_p(c, 1.0, 1)), [3]);
    }

    #[test]
    fn typical_keeps_what_is_near_the_entropy() {
        // H = 0.4*0.9163 + 0.3*1.2040 + 0.2*1.6094 + 0.1*2.3026 = 1.2799: the distances are 0.3636, 0.0759, 0.3296,
        // 1.0227, so the order is 1, 2, 0, 3.
        let p = [0.4, 0.3, 0.2, 0.1];
        assert_eq!(after(&p, |c| typical(c, 0.2, 1)), [1]);
        assert_eq!(after(&p, |c| typical(c, 0.4, 1)), [1, 2]);
        assert_eq!(after(&p, |c| typical(c, 0.6, 1)), [0, 1, 2]);
        assert_eq!(after(&p, |c| typical(c, 0.2, 2)), [1, 2]);
        assert_eq!(after(&p, |c| typical(c, 1.0, 1)), [0, 1, 2, 3]);
    }

    #[test]
    fn top_n_sigma_counts_deviations() {
        // Mean 2, variance (4 + 4 + 0 + 16 + 8*0) / 12: kept is what is within n times 1.414 of 6.
        let logits = [0.0, 4.0, 2.0, 6.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 0.0, 0.0];
        let count = logits.len() as f32;
        let mean = logits.iter().sum::<f32>() / count;
        assert_eq!(mean, 2.0);
        let deviation = ((4.0 * 3.0 + 4.0 + 16.0) / count).sqrt();
        assert!((deviation - 1.632_993).abs() < 1e-5);
        for (n, want) in [(1.0, vec![3]), (1.3, vec![1, 3]), (2.4, vec![1, 3]), (-1.0, (0..12).collect())] {
            let mut found = candidates(&logits);
            top_n_sigma(&mut found, n);
            assert_eq!(ids(&found), want, "{n}");
        }
        let mut found = candidates(&logits);
        top_n_sigma(&mut found, 3.0);
        assert_eq!(found.len(), 9);
    }

    #[test]
    fn xtc_leaves_the_least_likely_of_the_likely() {
        let p = [0.4, 0.3, 0.2, 0.1];
        assert_eq!(after(&p, |c| xtc(c, 0.1, 1)), [3]);
        assert_eq!(after(&p, |c| xtc(c, 0.15, 1)), [2, 3]);
        assert_eq!(after(&p, |c| xtc(c, 0.35, 1)), [0, 1, 2, 3]);
        assert_eq!(after(&p, |c| xtc(c, 0.51, 1)), [0, 1, 2, 3]);
        assert_eq!(after(&p, |c| xtc(c, 0.15, 3)), [0, 1, 2, 3]);
    }
}
