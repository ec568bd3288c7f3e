//! The tokens so far, as far as samplers look back.

/// How often a token occurred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// The token.
    pub id: u32,
    /// Times in the window, prompt included.
    pub all: u32,
    /// Times in the window that the model wrote.
    pub generated: u32,
}

/// The prompt and what was generated after it.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    tokens: Vec<u32>,
    /// Where the generated tokens begin.
    generated_from: usize,
}

impl History {
    /// Adds tokens that the model did not write.
    pub(super) fn prompt(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        self.generated_from = self.tokens.len();
    }

    /// Adds a token that the model wrote.
    pub(super) fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// Goes back to a length.
    pub(super) fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.generated_from = self.generated_from.min(self.tokens.len());
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The last `window` tokens; all of them where it is negative.
    pub(super) fn recent(&self, window: i32) -> &[u32] {
        &self.tokens[self.start(window)..]
    }

    fn start(&self, window: i32) -> usize {
        usize::try_from(window).map_or(0, |window| self.tokens.len().saturating_sub(window))
    }

    /// How often each token occurs in the last `window`, by id.
    pub(super) fn counts(&self, window: i32) -> Vec<Count> {
        let start = self.start(window);
        let mut seen: Vec<(u32, bool)> =
            (start..).zip(&self.tokens[start..]).map(|(at, &id)| (id, at >= self.generated_from)).collect();
        seen.sort_unstable();
        let mut counts: Vec<Count> = Vec::new();
        for (id, generated) in seen {
            match counts.last_mut().filter(|count| count.id == id) {
                Some(count) => {
                    count.all += 1;
                    count.generated += u32::from(generated);
                }
                None => counts.push(Count { id, all: 1, generated: u32::from(generated) }),
            }
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_tell_the_prompt_from_the_answer() {
        let mut history = History::default();
        history.prompt(&[5, 1, 5]);
        history.push(5);
        history.push(2);
        let count = |id, all, generated| Count { id, all, generated };
        assert_eq!(history.counts(-1), [count(1, 1, 0), count(2, 1, 1), count(5, 3, 1)]);
        assert_eq!(history.counts(2), [count(2, 1, 1), count(5, 1, 1)]);
        assert_eq!(history.counts(0), []);
        history.truncate(2);
        assert_eq!(history.counts(99), [count(1, 1, 0), count(5, 1, 0)]);
    }
}
