//! Penalties on tokens that were there before: `repeat_penalty` on all of them, `frequency_penalty` for each time and
//! `presence_penalty` once for what the model itself has written. A prompt that names a word does not make it rarer by
//! the last two; their users expect what the OpenAI API does.

use super::candidates::Candidates;
use super::history::History;
use super::sampling::Sampling;

/// `logit / repeat` where it is positive, `logit * repeat` where not; then `- count * frequency - presence`.
pub(super) fn penalised(logit: f32, generated: u32, sampling: &Sampling) -> f32 {
    let repeat = sampling.repeat_penalty;
    let scaled = if logit > 0.0 { logit / repeat } else { logit * repeat };
    let present = if generated > 0 { sampling.presence_penalty } else { 0.0 };
    scaled - generated as f32 * sampling.frequency_penalty - present
}

/// Lowers what occurred among the last `repeat_last_n` tokens.
pub(super) fn apply(candidates: &mut Candidates, history: &History, sampling: &Sampling) {
    if !sampling.has_penalties() {
        return;
    }
    let counts = history.counts(sampling.repeat_last_n);
    if counts.is_empty() {
        return;
    }
    candidates.change(|item| {
        if let Ok(at) = counts.binary_search_by_key(&item.id, |count| count.id) {
            item.logit = penalised(item.logit, counts[at].generated, sampling);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::candidates::tests::candidates;
    use super::*;

    #[test]
    fn hand_computed() {
        let sampling = Sampling {
            repeat_penalty: 2.0,
            frequency_penalty: 0.25,
            presence_penalty: 0.5,
            repeat_last_n: 4,
            ..Sampling::default()
        };
        let mut history = History::default();
        history.prompt(&[4, 0, 1]);
        for token in [1, 2, 2] {
            history.push(token);
        }
        // The window holds 1 (prompt), 1, 2, 2. Token 0 and token 4 are out of it.
        let mut found = candidates(&[1.0, 4.0, -1.0, 0.5, 3.0]);
        apply(&mut found, &history, &sampling);
        let logits: Vec<f32> = found.items().iter().map(|item| item.logit).collect();
        assert_eq!(logits, [1.0, 4.0 / 2.0 - 0.25 - 0.5, -2.0 - 0.5 - 0.5, 0.5, 3.0]);
    }

    #[test]
    fn a_window_of_minus_one_is_everything_and_of_zero_nothing() {
        let mut history = History::default();
        history.prompt(&[0; 300]);
        for (window, want) in [(-1, 0.5), (0, 1.0), (1, 0.5)] {
            let sampling = Sampling { repeat_penalty: 2.0, repeat_last_n: window, ..Sampling::default() };
            let mut found = candidates(&[1.0]);
            apply(&mut found, &history, &sampling);
            assert_eq!(found.items()[0].logit, want);
        }
    }
}
