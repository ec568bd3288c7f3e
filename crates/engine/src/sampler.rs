//! From logits to a token.

/// The token with the largest logit that is not `banned`; the lowest id among equals. `None` where a logit is not a
/// number, or nothing is left to choose from.
pub fn greedy(logits: &[f32], banned: &[u32]) -> Option<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (id, &value) in (0u32..).zip(logits) {
        if value.is_nan() {
            return None;
        }
        if best.is_none_or(|(_, largest)| value > largest) && !banned.contains(&id) {
            best = Some((id, value));
        }
    }
    best.map(|(id, _)| id)
}

#[cfg(test)]
mod tests {
    use super::greedy;

    #[test]
    fn the_largest_wins_and_the_first_of_equals() {
        assert_eq!(greedy(&[-3.0, -1.0, -2.0, -1.0], &[]), Some(1));
        assert_eq!(greedy(&[-3.0, -1.0, -2.0, -1.0], &[1, 3]), Some(2));
        assert_eq!(greedy(&[1.0], &[0]), None);
        assert_eq!(greedy(&[f32::NEG_INFINITY, f32::NEG_INFINITY], &[]), Some(0));
        assert_eq!(greedy(&[0.0, f32::NAN], &[]), None);
        assert_eq!(greedy(&[], &[]), None);
    }
}
