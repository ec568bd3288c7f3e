//! SentencePiece BPE (`llama`): neighbours merge to the token with the best score; what has no token becomes byte tokens.

use super::bytes::{self, SPACE_MARK};
use super::error::TokenizerError;
use super::hash::FastMap;
use super::limit::EncodeLimit;
use super::merge::{MAX_CACHE_ENTRIES, MAX_CACHED_WORD, Merged, Merger, NONE, Span, WordCache};
use super::pieces::{Index, Pieces};
use super::vocab::{TokenType, Vocab};

/// The tables of a SentencePiece vocabulary.
pub(super) struct Spm {
    tokens: Index,
    /// By token.
    priorities: Box<[u32]>,
    /// The characters that some token has directly before a marked space. No merge crosses from any other character into
    /// a marked space, so the text can be cut there without changing a single token.
    before_mark: FastMap<char, ()>,
    longest: u32,
    byte_tokens: [u32; 256],
    unk: Option<u32>,
}

/// A number that sorts the better score first. A score that is no number is the worst.
fn priority_of_score(score: f32) -> u32 {
    if score.is_nan() {
        return u32::MAX;
    }
    // Adding zero turns -0 into 0, which must sort equal.
    let bits = (score + 0.0).to_bits();
    let rising = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    !rising
}

impl Spm {
    /// Builds the tables of a vocabulary.
    pub(super) fn new(vocab: &Vocab, pieces: &Pieces) -> Self {
        let mut texts: Vec<(u32, &[u8])> = Vec::with_capacity(vocab.tokens.len());
        let mut spm = Self {
            tokens: Index::default(),
            priorities: vocab.scores.iter().map(|score| priority_of_score(*score)).collect(),
            before_mark: FastMap::default(),
            longest: 0,
            byte_tokens: [NONE; 256],
            unk: vocab.unk,
        };
        for ((token, kind), id) in vocab.tokens.iter().zip(&vocab.token_types).zip(0..) {
            if let Some(byte) = bytes::parse_byte_token(token) {
                spm.byte_tokens[usize::from(byte)] = id;
            }
            // Control and byte tokens must never come from text that happens to be spelled like them.
            if matches!(kind, TokenType::Normal | TokenType::UserDefined | TokenType::Unused) && !token.is_empty() {
                let text = String::from_utf8_lossy(token);
                let pairs = text.chars().zip(text.chars().skip(1));
                spm.before_mark.extend(pairs.filter(|&(_, next)| next == SPACE_MARK).map(|(c, _)| (c, ())));
                texts.push((id, token));
                spm.longest = spm.longest.max(token.len() as u32);
            }
        }
        spm.tokens = Index::new(pieces, texts.into_iter());
        spm
    }

    /// Appends the tokens of a text in which spaces are already marked.
    pub(super) fn encode(
        &self,
        text: &str,
        pieces: &Pieces,
        limit: &EncodeLimit,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let mut merger = Merger::default();
        let mut seen: WordCache = FastMap::default();
        let mut rest = text;
        while !rest.is_empty() {
            limit.check(ids.len())?;
            let (word, after) = rest.split_at(self.word_end(rest));
            rest = after;
            if let Some(&(start, end)) = seen.get(word) {
                ids.extend_from_within(start as usize..end as usize);
                continue;
            }
            let start = ids.len();
            self.encode_word(word, pieces, limit, &mut merger, ids);
            if word.len() < MAX_CACHED_WORD && seen.len() < MAX_CACHE_ENTRIES {
                seen.insert(word, (start as u32, ids.len() as u32));
            }
        }
        Ok(())
    }

    /// Whether every byte of a text becomes a part of some token: no text vanishes, however long it is.
    pub(super) fn keeps_every_byte(&self) -> bool {
        self.unk.is_some() || self.byte_tokens.iter().all(|token| *token != NONE)
    }

    /// Where the first part of a text ends that merges on its own.
    fn word_end(&self, text: &str) -> usize {
        let mut last = SPACE_MARK;
        for (at, c) in text.char_indices() {
            if c == SPACE_MARK && last != SPACE_MARK && !self.before_mark.contains_key(&last) {
                return at;
            }
            last = c;
        }
        text.len()
    }

    fn encode_word(&self, text: &str, pieces: &Pieces, limit: &EncodeLimit, merger: &mut Merger, ids: &mut Vec<u32>) {
        let bytes = text.as_bytes();
        let lookup = |start: u32, len: u32| {
            let symbol = self.tokens.get(pieces, &bytes[start as usize..(start + len) as usize])?;
            Some(Merged { priority: self.priorities[symbol as usize], symbol })
        };
        merger.spans.clear();
        merger.spans.extend(text.char_indices().map(|(start, c)| {
            let (start, len) = (start as u32, c.len_utf8() as u32);
            Span { symbol: lookup(start, len).map_or(NONE, |token| token.symbol), start, len }
        }));
        merger.run(limit, |left, right| {
            let len = left.len + right.len;
            // Nothing longer than the longest token is worth a look, which also bounds the cost of a look.
            if len <= self.longest { lookup(left.start, len) } else { None }
        });
        for span in &merger.spans {
            if span.symbol != NONE {
                ids.push(span.symbol);
                continue;
            }
            for &byte in &bytes[span.start as usize..(span.start + span.len) as usize] {
                let token = self.byte_tokens[usize::from(byte)];
                ids.extend(if token == NONE { self.unk } else { Some(token) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn better_scores_come_first() {
        let scores = [f32::INFINITY, 3.5, 0.0, -0.0, -1e-30, -2.0, -1e30, f32::NEG_INFINITY, f32::NAN];
        let order: Vec<u32> = scores.iter().map(|&score| priority_of_score(score)).collect();
        assert!(order.is_sorted(), "{order:?}");
        assert_eq!(order[2], order[3]);
        assert!(order[4] < order[5]);
    }
}
