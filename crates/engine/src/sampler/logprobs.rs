//! Logarithmic probabilities of the raw logits: what the model thinks, before any sampler.

/// How likely the chosen token and the best ones were.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the chosen token.
    pub logprob: f32,
    /// The best tokens, the likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// The log-softmax of the logits: of `token`, and of the `top` best tokens.
pub fn logprobs(logits: &[f32], token: u32, top: usize) -> Logprobs {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
    let of = |logit: f32| (f64::from(logit - largest) - sum.ln()) as f32;
    // A list of the best so far, the worst of them last; `top` is small.
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(top + 1);
    for (id, &logit) in (0..).zip(logits) {
        if best.len() < top || best.last().is_some_and(|&(_, worst)| logit > worst) {
            let at = best.partition_point(|&(_, better)| better >= logit);
            best.insert(at, (id, logit));
            best.truncate(top);
        }
    }
    let logprob = logits.get(token as usize).map_or(f32::NEG_INFINITY, |&logit| of(logit));
    Logprobs { logprob, top: best.into_iter().map(|(id, logit)| (id, of(logit))).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hand_computed() {
        let logits = [0.25f32.ln() + 3.0, 0.5f32.ln() + 3.0, 0.125f32.ln() + 3.0, 0.125f32.ln() + 3.0];
        let found = logprobs(&logits, 2, 3);
        assert!((found.logprob - 0.125f32.ln()).abs() < 1e-6);
        assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 0, 2]);
        assert!((found.top[0].1 - 0.5f32.ln()).abs() < 1e-6);
        assert_eq!(logprobs(&logits, 0, 0).top, []);
        assert_eq!(logprobs(&logits, 0, 9).top.len(), 4);
    }
}
