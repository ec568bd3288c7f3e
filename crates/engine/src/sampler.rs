//! From logits to a token.

/// The token with the largest logit; the lowest id among equals. `None` where a logit is not a number.
pub fn greedy(logits: &[f32]) -> Option<u32> {
    let mut best = 0;
    for (i, &value) in logits.iter().enumerate() {
        if value.is_nan() {
            return None;
        }
        if value > logits[best] {
            best = i;
        }
    }
    (!logits.is_empty()).then(|| u32::try_from(best).expect("vocabularies are smaller than 2^32"))
}

#[cfg(test)]
mod tests {
    use super::greedy;

    #[test]
    fn the_largest_wins_and_the_first_of_equals() {
        assert_eq!(greedy(&[-3.0, -1.0, -2.0, -1.0]), Some(1));
        assert_eq!(greedy(&[f32::NEG_INFINITY, f32::NEG_INFINITY]), Some(0));
        assert_eq!(greedy(&[0.0, f32::NAN]), None);
        assert_eq!(greedy(&[]), None);
    }
}
