//! DRY ("don't repeat yourself"): a token that would lengthen a repetition is penalised, the more the longer the
//! repetition already is. Sequence breakers end repetitions, so that names and list marks may come again.

use std::collections::HashMap;

use super::SampleError;
use super::candidates::Candidates;
use super::history::History;
use super::sampling::Sampling;
use crate::tokenizer::{AddSpecial, ParseSpecial, Tokenizer};

/// Longer breakers are cut; no one writes them.
const MAX_BREAKER_BYTES: usize = 40;
const MAX_TAIL_TOKENS: usize = 20;
/// The logarithm of the largest f32; beyond it a penalty is no number.
const MAX_LOG: f32 = 88.0;

/// Sequence breakers as tokens. A breaker may begin inside a token and end inside another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Breakers {
    /// For each token that a breaker can begin in: the tokens that must follow. An empty list is a whole breaker.
    tails: HashMap<u32, Vec<Vec<u32>>>,
}

impl Breakers {
    /// Finds the tokens that hold or begin one of the breakers.
    pub fn new(breakers: &[String], tokenizer: &Tokenizer) -> Result<Self, SampleError> {
        let mut tails: HashMap<u32, Vec<Vec<u32>>> = HashMap::new();
        for breaker in breakers.iter().filter(|breaker| !breaker.is_empty()) {
            let mut end = breaker.len().min(MAX_BREAKER_BYTES);
            while !breaker.is_char_boundary(end) {
                end -= 1;
            }
            let breaker = &breaker[..end];
            // What is left of a breaker after each of its beginnings is tokenised once, not for each token.
            let mut rests: Vec<(usize, Vec<u32>)> = Vec::new();
            for at in (1..breaker.len()).filter(|&at| breaker.is_char_boundary(at)) {
                let mut rest = tokenizer.encode(&breaker[at..], AddSpecial::No, ParseSpecial::No)?;
                rest.truncate(MAX_TAIL_TOKENS);
                rests.push((at, rest));
            }
            for id in 0..tokenizer.n_tokens() as u32 {
                let piece = tokenizer.piece(id)?;
                if contains(piece, breaker.as_bytes()) {
                    tails.entry(id).or_default().push(Vec::new());
                    continue;
                }
                for (at, rest) in &rests {
                    if piece.ends_with(&breaker.as_bytes()[..*at]) {
                        tails.entry(id).or_default().push(rest.clone());
                    }
                }
            }
        }
        Ok(Self { tails })
    }

    /// Whether this token is a breaker by itself.
    fn is_whole(&self, id: u32) -> bool {
        self.tails.get(&id).is_some_and(|tails| tails.iter().any(Vec::is_empty))
    }

    /// How many tokens at the end lie after the last breaker.
    fn tokens_since(&self, tokens: &[u32]) -> usize {
        for (after, id) in tokens.iter().rev().enumerate() {
            let following = &tokens[tokens.len() - after..];
            let matching = self.tails.get(id).into_iter().flatten().filter(|tail| following.starts_with(tail));
            if let Some(longest) = matching.map(Vec::len).max() {
                return after - longest;
            }
        }
        tokens.len()
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// Lowers the tokens that would lengthen a repetition of at least `dry_allowed_length` tokens.
pub(super) fn apply(candidates: &mut Candidates, history: &History, breakers: &Breakers, sampling: &Sampling) {
    if !sampling.has_dry() {
        return;
    }
    let lengths = repetitions(history.recent(sampling.dry_penalty_last_n), breakers, sampling.dry_allowed_length);
    if lengths.is_empty() {
        return;
    }
    candidates.change(|item| {
        if let Some(&length) = lengths.get(&item.id) {
            item.logit -= penalty(length, sampling);
        }
    });
}

/// `multiplier * base ^ (length - allowed_length)`.
fn penalty(length: usize, sampling: &Sampling) -> f32 {
    let mut exponent = length as f32 - sampling.dry_allowed_length as f32;
    if sampling.dry_base > 1.000_001 {
        exponent = exponent.min(MAX_LOG / sampling.dry_base.ln());
    }
    (sampling.dry_multiplier * sampling.dry_base.powf(exponent)).min(f32::MAX)
}

/// For each token that would lengthen a repetition: how long the longest one is.
fn repetitions(tokens: &[u32], breakers: &Breakers, allowed: u32) -> HashMap<u32, usize> {
    let mut lengths = HashMap::new();
    let allowed = (allowed as usize).max(1);
    let limit = breakers.tokens_since(tokens);
    if tokens.len() <= allowed || limit < allowed {
        return lengths;
    }
    let backwards: Vec<u32> = tokens.iter().rev().copied().collect();
    for (at, matched) in prefix_matches(&backwards).into_iter().enumerate().skip(1) {
        let length = matched.min(limit);
        // Read backwards, the token after the earlier occurrence stands before it.
        let next = backwards[at - 1];
        if length >= allowed && !breakers.is_whole(next) {
            let longest = lengths.entry(next).or_insert(0);
            *longest = length.max(*longest);
        }
    }
    lengths
}

/// For each place, how many tokens from there on are as those at the beginning: the Z function, in linear time.
fn prefix_matches(tokens: &[u32]) -> Vec<usize> {
    let mut matches = vec![0; tokens.len()];
    // The match that reaches furthest so far.
    let (mut left, mut right) = (0, 0);
    for at in 1..tokens.len() {
        let mut length = if at < right { matches[at - left].min(right - at) } else { 0 };
        while at + length < tokens.len() && tokens[length] == tokens[at + length] {
            length += 1;
        }
        if at + length > right {
            (left, right) = (at, at + length);
        }
        matches[at] = length;
    }
    matches
}

#[cfg(test)]
mod tests {
    use super::super::candidates::tests::candidates;
    use super::*;

    fn breakers(tails: &[(u32, &[u32])]) -> Breakers {
        let mut breakers = Breakers::default();
        for (id, tail) in tails {
            breakers.tails.entry(*id).or_default().push(tail.to_vec());
        }
        breakers
    }

    fn found(tokens: &[u32], tails: &[(u32, &[u32])], allowed: u32) -> Vec<(u32, usize)> {
        let mut found: Vec<_> = repetitions(tokens, &breakers(tails), allowed).into_iter().collect();
        found.sort_unstable();
        found
    }

    #[test]
    fn the_longest_repetition_counts() {
        // "1 2 3 4 ... 1 2 3": 4 would make it four long. Another "3" was followed by 9.
        assert_eq!(found(&[1, 2, 3, 4, 3, 9, 1, 2, 3], &[], 1), [(4, 3), (9, 1)]);
        assert_eq!(found(&[1, 2, 3, 4, 3, 9, 1, 2, 3], &[], 2), [(4, 3)]);
        assert_eq!(found(&[1, 2, 3, 4, 3, 9, 1, 2, 3], &[], 4), []);
        assert_eq!(found(&[7; 5], &[], 2), [(7, 4)]);
        assert_eq!(found(&[], &[], 2), []);
    }

    #[test]
    fn breakers_end_repetitions() {
        let text = [1, 2, 3, 4, 1, 2, 3];
        assert_eq!(found(&text, &[(1, &[])], 2), [(4, 2)]);
        assert_eq!(found(&text, &[(2, &[])], 2), []);
        // The breaker is "1 2": its tail must match.
        assert_eq!(found(&text, &[(1, &[2])], 1), [(4, 1)]);
        assert_eq!(found(&text, &[(1, &[3])], 1), [(4, 3)]);
        // A breaker itself is never penalised.
        assert_eq!(found(&text, &[(4, &[])], 1), []);
    }

    #[test]
    fn the_penalty_grows_by_the_base() {
        let sampling = Sampling { dry_multiplier: 0.8, ..Sampling::default() };
        let mut history = History::default();
        history.prompt(&[1, 2, 3, 4, 1, 2, 3]);
        let mut logits = candidates(&[0.0; 6]);
        apply(&mut logits, &history, &Breakers::default(), &sampling);
        let logits: Vec<f32> = logits.items().iter().map(|item| item.logit).collect();
        assert_eq!(logits, [0.0, 0.0, 0.0, 0.0, -0.8 * 1.75, 0.0]);
        assert!(penalty(100_000, &sampling).is_finite());
    }

    #[test]
    fn breakers_are_found_inside_the_tokens_of_a_vocabulary() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tokenizer/smollm2.gguf");
        let file = kiln_gguf::Gguf::open(path).expect("the vocabulary should open");
        let tokenizer = Tokenizer::from_gguf(file.metadata()).expect("the vocabulary should be sound");
        let id = |text: &str| tokenizer.encode(text, AddSpecial::No, ParseSpecial::No).expect("it encodes")[0];
        let found = Breakers::new(&["\n".into(), "ab cd".into()], &tokenizer).expect("breakers are text");
        assert!(found.is_whole(id("\n")) && found.is_whole(id("\n\n")));
        assert!(!found.is_whole(id(" the")));
        // "ab cd" comes in several tokens; the first ones hold its beginning.
        for text in ["xx ab cd", "ab cd", " tab cd"] {
            let ids = tokenizer.encode(text, AddSpecial::No, ParseSpecial::No).expect("it encodes");
            assert_eq!(found.tokens_since(&ids), 0, "{text}");
        }
        let ids = tokenizer.encode("ab ce", AddSpecial::No, ParseSpecial::No).expect("it encodes");
        assert_eq!(found.tokens_since(&ids), ids.len());
    }

    #[test]
    fn matches_are_those_of_the_plain_loop() {
        let mut state = 1u32;
        for len in 0..60 {
            let tokens: Vec<u32> = (0..len)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) % 3
                })
                .collect();
            let fast = prefix_matches(&tokens);
            for at in 1..len {
                let plain = tokens[at..].iter().zip(&tokens).take_while(|(a, b)| a == b).count();
                assert_eq!(fast[at], plain, "{tokens:?} at {at}");
            }
        }
    }
}
