//! A bound on how long a model thinks: when it is reached, the marker that closes the thought is forced, token by token.

use std::sync::Arc;

use super::reasoning::{Markers, Reasoning};
use crate::run::Constraint;
use crate::tokenizer::{AddSpecial, ParseSpecial, Tokenizer, TokenizerError};

/// Lets a model think for so many tokens and no longer; what comes behind is free, or bound by another rule.
pub struct ThoughtBudget {
    tokenizer: Arc<Tokenizer>,
    vocab: usize,
    /// The tokens of the closing marker.
    close: Arc<[u32]>,
    /// Tokens that the model may still think.
    left: usize,
    /// Tells when a thought is open; none once the first one was closed or there is none.
    reasoning: Option<Reasoning>,
    /// Tokens of the marker that the text ends with: the model may be closing the thought itself.
    written: usize,
    /// Tokens of the marker that are there, while the rest is forced.
    forced: Option<usize>,
    then: Option<Box<dyn Constraint>>,
}

impl ThoughtBudget {
    /// For a model with these markers and so many tokens in its vocabulary. `generation_prompt` is the end of the prompt, which may have
    /// opened a thought; `then` is what the whole text has to keep to, thoughts included.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        vocab: usize,
        markers: &'static Markers,
        generation_prompt: &str,
        tokens: usize,
        then: Option<Box<dyn Constraint>>,
    ) -> Result<ThoughtBudget, TokenizerError> {
        let close = tokenizer.encode(markers.close, AddSpecial::No, ParseSpecial::Yes)?;
        let reasoning = Reasoning::new(markers, generation_prompt, &[]);
        let forced = (tokens == 0 && reasoning.is_open()).then_some(0);
        let (close, reasoning) = (close.into(), Some(reasoning));
        Ok(ThoughtBudget { tokenizer, vocab, close, left: tokens, reasoning, written: 0, forced, then })
    }

    /// Follows the text as far as the end of its first thought.
    fn follow(&mut self, token: u32) {
        let Some(reasoning) = &mut self.reasoning else { return };
        let was_open = reasoning.is_open();
        let goes_on = self.close.get(self.written) == Some(&token);
        let begins = self.close.first() == Some(&token);
        self.written = if goes_on { self.written + 1 } else { usize::from(begins) };
        let piece = self.tokenizer.piece(token).unwrap_or_default();
        reasoning.push(&String::from_utf8_lossy(piece));
        match (was_open, reasoning.is_open()) {
            (true, false) => self.reasoning = None,
            (_, true) => {
                self.left = self.left.saturating_sub(usize::from(was_open));
                self.forced = (self.left == 0).then_some(if was_open { self.written } else { 0 });
            }
            (false, false) => {}
        }
    }
}

impl Constraint for ThoughtBudget {
    fn mask(&mut self) -> Result<Vec<u32>, String> {
        let words = self.vocab.div_ceil(32);
        if let Some(&token) = self.forced.and_then(|at| self.close.get(at)) {
            let mut mask = vec![0; words];
            mask[token as usize / 32] = 1 << (token % 32);
            return Ok(mask);
        }
        self.then.as_mut().map_or(Ok(vec![u32::MAX; words]), |then| then.mask())
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        match self.forced {
            Some(at) if at + 1 < self.close.len() => self.forced = Some(at + 1),
            Some(_) => (self.forced, self.reasoning) = (None, None),
            None => self.follow(token),
        }
        self.then.as_mut().map_or(Ok(()), |then| then.accept(token))
    }

    fn forced(&mut self) -> Vec<u32> {
        match (self.forced, &mut self.then) {
            (Some(at), _) => self.close[at..].to_vec(),
            (None, Some(then)) if self.reasoning.is_none() => then.forced(),
            (None, _) => Vec::new(),
        }
    }

    fn is_complete(&mut self) -> bool {
        self.forced.is_none() && self.then.as_mut().is_some_and(|then| then.is_complete())
    }

    fn binds(&self) -> bool {
        let thinks = self.reasoning.is_some() || self.forced.is_some();
        thinks || self.then.as_ref().is_some_and(|then| then.binds())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(ThoughtBudget {
            tokenizer: Arc::clone(&self.tokenizer),
            vocab: self.vocab,
            close: Arc::clone(&self.close),
            left: self.left,
            reasoning: self.reasoning.clone(),
            written: self.written,
            forced: self.forced,
            then: self.then.as_ref().map(|then| then.fork()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Arc<Tokenizer> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tokenizer/smollm2.gguf");
        let file = kiln_gguf::Gguf::open(path).expect("the vocabulary should open");
        Arc::new(Tokenizer::from_gguf(file.metadata()).expect("the vocabulary should be sound"))
    }

    /// What a model that would write `text` writes with so many tokens to think; forced tokens come between.
    fn written(prompt: &str, budget: usize, text: &str) -> String {
        let tokenizer = tokenizer();
        let vocab = tokenizer.n_tokens();
        let markers = Markers::by_name("think").expect("the family exists");
        let bound = ThoughtBudget::new(Arc::clone(&tokenizer), vocab, markers, prompt, budget, None);
        let mut bound = bound.expect("the marker should encode").fork();
        let wanted = tokenizer.encode(text, AddSpecial::No, ParseSpecial::Yes).expect("it encodes");
        let (mut wanted, mut written) = (wanted.into_iter().peekable(), Vec::new());
        loop {
            let mask = bound.mask().expect("a mask should come");
            let forced = mask.iter().map(|word| word.count_ones()).sum::<u32>() == 1;
            let only = (0u32..).find(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1);
            let Some(token) = (if forced { only } else { wanted.next() }) else { break };
            written.push(token);
            bound.accept(token).expect("the mask allowed it");
            assert!(!bound.is_complete());
        }
        let piece = |id: &u32| String::from_utf8_lossy(tokenizer.piece(*id).unwrap_or_default()).into_owned();
        let written: String = written.iter().map(piece).collect();
        assert_eq!(bound.binds(), !written.contains("</think>"), "{written}");
        written
    }

    /// Tokens of a text.
    fn count(text: &str) -> usize {
        tokenizer().encode(text, AddSpecial::No, ParseSpecial::Yes).expect("it encodes").len()
    }

    #[test]
    fn a_thought_is_closed_when_its_tokens_are_used_up() {
        let long = "<think>one two three four five";
        assert_eq!(written("", count("one two three"), long), "<think>one two three</think> four five");
        assert_eq!(written("<think>\n", count("one two"), "one two three"), "one two</think> three");
        assert_eq!(written("<think>", 0, "one two"), "</think>one two");
        assert_eq!(written("", 0, "<think>one"), "<think></think>one");
        // The last token of the budget is the marker's first: only the rest of the marker is forced, before what the model goes on with.
        let closing = written("", count("one") + 1, "<think>one</ two");
        assert_eq!(closing, "<think>one</think> two");
    }

    #[test]
    fn what_needs_no_closing_is_left_alone() {
        let two = "<think>one</think> two three four <think>five six seven";
        for (prompt, budget, text) in [
            ("", 3, "one two three four"),
            ("", count("one</think>"), two),
            ("<think>\n\n</think>\n\n", 3, "one two three four"),
        ] {
            assert_eq!(written(prompt, budget, text), text);
        }
    }
}
