//! The unigram model of SentencePiece, as T5 and XLM-RoBERTa have it: the text is normalised by a table from the file, and of
//! all ways to cut it the one with the best sum of scores is taken.

use super::bytes::SPACE_MARK;
use super::error::TokenizerError;
use super::trie::Trie;
use super::vocab::{TokenType, Vocab};

/// What a character that no token covers costs more than the worst token.
const UNKNOWN_COST: f64 = 10.0;

/// The tables of a vocabulary.
pub(super) struct Ugm {
    trie: Trie<(u32, f32)>,
    user_defined: Trie<u32>,
    charsmap: Option<Charsmap>,
    unk: u32,
    unknown_score: f64,
    add_space_prefix: bool,
    merge_spaces: bool,
}

impl Ugm {
    pub(super) fn new(vocab: &Vocab) -> Result<Self, TokenizerError> {
        let (mut trie, mut user_defined) = (Trie::new(), Trie::new());
        let mut worst = f32::INFINITY;
        for ((token, (kind, score)), id) in
            vocab.tokens.iter().zip(vocab.token_types.iter().zip(&vocab.scores)).zip(0..)
        {
            match kind {
                TokenType::Normal => {
                    worst = worst.min(*score);
                    trie.insert(token, (id, *score));
                }
                TokenType::Unused => trie.insert(token, (id, *score)),
                TokenType::UserDefined => {
                    trie.insert(token, (id, 0.0));
                    user_defined.insert(token, id);
                }
                TokenType::Control | TokenType::Unknown | TokenType::Byte => {}
            }
        }
        let charsmap = match vocab.charsmap.is_empty() {
            true => None,
            false => Some(Charsmap::new(&vocab.charsmap)?),
        };
        Ok(Self {
            trie,
            user_defined,
            charsmap,
            unk: vocab.unk.unwrap_or(0),
            unknown_score: if worst.is_finite() { f64::from(worst) - UNKNOWN_COST } else { -UNKNOWN_COST },
            add_space_prefix: vocab.add_space_prefix,
            merge_spaces: vocab.merge_spaces,
        })
    }

    /// Appends the tokens of a text without special tokens.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        let text = self.normalised(text);
        if text.is_empty() {
            return;
        }
        // For each place: the best sum of scores up to it, the last token on the way, and where that began.
        let mut best: Vec<(f64, u32, usize)> = vec![(f64::NEG_INFINITY, self.unk, 0); text.len() + 1];
        best[0].0 = 0.0;
        for (at, c) in text.char_indices() {
            let so_far = best[at].0;
            let mut covered = false;
            let mut offer = |end: usize, score: f64, id: u32| {
                if so_far + score > best[end].0 {
                    best[end] = (so_far + score, id, at);
                }
            };
            self.trie.each_prefix(&text.as_bytes()[at..], |len, (id, score)| {
                covered |= len == c.len_utf8();
                offer(at + len, f64::from(score), id);
            });
            if !covered {
                offer(at + c.len_utf8(), self.unknown_score, self.unk);
            }
        }
        let from = ids.len();
        let mut end = text.len();
        let mut was_unknown = false;
        while end > 0 {
            let (_, id, start) = best[end];
            let is_unknown = id == self.unk;
            // Neighbouring unknown characters are one unknown token.
            if !(is_unknown && was_unknown) {
                ids.push(id);
            }
            was_unknown = is_unknown;
            end = start;
        }
        ids[from..].reverse();
    }

    /// The text with the table applied and its spaces marked.
    fn normalised(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len() + 3);
        let (mut in_word, mut has_prefix) = (false, false);
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            let (piece, len) = match self.user_defined.longest(rest.as_bytes(), |_, _| true) {
                Some((len, _)) => (&rest[..len], len),
                None => self
                    .charsmap
                    .as_ref()
                    .and_then(|map| map.replace(rest))
                    .unwrap_or((&rest[..c.len_utf8()], c.len_utf8())),
            };
            for c in piece.chars() {
                if c != ' ' {
                    if !in_word {
                        in_word = true;
                        if (self.add_space_prefix && !has_prefix) || self.merge_spaces {
                            out.push(SPACE_MARK);
                            has_prefix = true;
                        }
                    }
                    out.push(c);
                } else {
                    in_word = false;
                    if !self.merge_spaces {
                        out.push(SPACE_MARK);
                    }
                }
            }
            rest = &rest[len..];
        }
        out
    }
}

/// The table of replacements: a double-array trie over bytes, and the texts that it points to, each ended by a zero byte.
struct Charsmap {
    units: Vec<u32>,
    texts: Vec<u8>,
}

impl Charsmap {
    fn new(blob: &[u8]) -> Result<Self, TokenizerError> {
        let broken = |what: &str| TokenizerError::BadCharsmap { what: what.to_owned() };
        let (size, rest) = blob.split_first_chunk::<4>().ok_or_else(|| broken("it is shorter than its header"))?;
        let size = u32::from_le_bytes(*size) as usize;
        if size > rest.len() || !size.is_multiple_of(4) {
            return Err(broken("its trie is larger than it is itself"));
        }
        let (units, texts) = rest.split_at(size);
        let units = units.chunks_exact(4).map(|unit| u32::from_le_bytes([unit[0], unit[1], unit[2], unit[3]]));
        if std::str::from_utf8(texts).is_err() {
            return Err(broken("its replacements are not UTF-8"));
        }
        Ok(Self { units: units.collect(), texts: texts.to_vec() })
    }

    fn unit(&self, at: u32) -> Option<u32> {
        self.units.get(at as usize).copied()
    }

    /// What the longest known beginning of `text` is replaced by, and its length.
    fn replace(&self, text: &str) -> Option<(&str, usize)> {
        let base = |unit: u32| (unit >> 10) << ((unit & (1 << 9)) >> 6);
        let mut node = base(self.unit(0)?);
        let mut found = None;
        for (at, byte) in text.bytes().enumerate() {
            if byte == 0 {
                break;
            }
            node ^= u32::from(byte);
            let Some(unit) = self.unit(node) else { break };
            // The label stands in the low byte; a set high bit means a value and no node.
            if unit & (1 << 31 | 0xFF) != u32::from(byte) {
                break;
            }
            node ^= base(unit);
            if unit >> 8 & 1 == 1
                && let Some(value) = self.unit(node)
            {
                found = Some(((value & 0x7FFF_FFFF) as usize, at + 1));
            }
        }
        let (at, len) = found.filter(|&(_, len)| text.is_char_boundary(len))?;
        let rest = self.texts.get(at..)?;
        let end = rest.iter().position(|byte| *byte == 0)?;
        Some((std::str::from_utf8(&rest[..end]).ok()?, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocab(tokens: &[(&str, f32)]) -> Vocab {
        let mut vocab =
            Vocab { model: "t5".into(), unk: Some(0), add_space_prefix: true, merge_spaces: true, ..Vocab::default() };
        vocab.tokens = tokens.iter().map(|(token, _)| *token).collect();
        vocab.scores = tokens.iter().map(|(_, score)| *score).collect();
        vocab.token_types = vec![TokenType::Normal; tokens.len()];
        vocab.token_types[0] = TokenType::Unknown;
        vocab
    }

    #[test]
    fn the_best_sum_wins() {
        let ugm = Ugm::new(&vocab(&[
            ("?", 0.0),
            ("▁", -2.0),
            ("a", -2.0),
            ("ab", -3.0),
            ("b", -2.5),
            ("▁ab", -6.0),
            ("▁a", -3.5),
        ]))
        .expect("it is sound");
        let encode = |text: &str| {
            let mut ids = Vec::new();
            ugm.encode(text, &mut ids);
            ids
        };
        // ▁ + ab = -5, ▁ab = -6, ▁a + b = -6.
        assert_eq!(encode("ab"), [1, 3]);
        assert_eq!(encode("  ab   a "), [1, 3, 6]);
        assert_eq!(encode("a??b"), [6, 0, 4]);
        assert!(encode("").is_empty());
        assert!(encode("   ").is_empty());
    }

    #[test]
    fn broken_tables_are_refused() {
        let mut broken = vocab(&[("?", 0.0), ("a", -1.0)]);
        for blob in [vec![1], vec![255, 0, 0, 0, 1], vec![3, 0, 0, 0, 1, 1, 1], vec![0, 0, 0, 0, 0xFF]] {
            broken.charsmap = blob;
            assert!(Ugm::new(&broken).is_err());
        }
        // A trie that points outside of itself finds nothing.
        broken.charsmap = [vec![4, 0, 0, 0], vec![0xFF; 4], b"x\0".to_vec()].concat();
        let mut ids = Vec::new();
        Ugm::new(&broken).expect("the sizes fit").encode("a", &mut ids);
        assert!(!ids.is_empty());
    }
}
