//! WordPiece, as encoders of the BERT kind have it: the text is folded to plain small letters, cut into words at white
//! space and punctuation, and each word is covered by the longest tokens from its beginning on.

use fancy_regex::Regex;
use unicode_normalization::UnicodeNormalization;

use super::bytes::SPACE_MARK;
use super::error::TokenizerError;
use super::limit::EncodeLimit;
use super::trie::Trie;
use super::vocab::Vocab;

/// A word that cannot be covered becomes one unknown token.
pub(super) struct Wpm {
    trie: Trie<u32>,
    separators: Regex,
    unk: Option<u32>,
}

/// Characters of the longest word that is looked up: longer ones are unknown, as Hugging Face has it (`max_input_chars_per_word`).
const LONGEST_WORD: usize = 100;

/// White space, what is dropped, and what is a word of its own: punctuation, ASCII symbols, Chinese characters. The ranges of
/// the last are those that BERT's own tokenizers use.
const SEPARATORS: &str = concat!(
    r"(?<space>\s+)|(?<drop>[\p{C}\p{Mn}\x{FFFD}])|(?<alone>[\p{P}$+<=>^`|~]",
    r"|[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}",
    r"\x{2B920}-\x{2CEAF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}])"
);

impl Wpm {
    /// Builds the tables of a vocabulary. Tokens that begin a word are spelled with a space mark in front.
    pub(super) fn new(vocab: &Vocab) -> Result<Self, TokenizerError> {
        let mut trie = Trie::new();
        for (token, id) in vocab.tokens.iter().zip(0..) {
            trie.insert(token, id);
        }
        let separators = Regex::new(SEPARATORS)
            .map_err(|e| TokenizerError::Pattern { name: "bert".into(), reason: e.to_string() })?;
        Ok(Self { trie, separators, unk: vocab.unk })
    }

    /// Appends the tokens of a text without special tokens.
    pub(super) fn encode(&self, text: &str, limit: &EncodeLimit, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        // Letters with marks become letters and marks; the marks are dropped.
        let plain: String = text.nfd().collect();
        let mut word = String::new();
        let mut done = 0;
        for found in self.separators.captures_iter(&plain) {
            limit.check(ids.len())?;
            let found = found.map_err(|e| TokenizerError::Split { reason: e.to_string() })?;
            let Some(whole) = found.get(0) else { continue };
            word.extend(plain[done..whole.start()].chars().map(lower));
            done = whole.end();
            if found.name("drop").is_some() {
                continue;
            }
            self.encode_word(&word, ids);
            word.clear();
            if found.name("alone").is_some() {
                let alone: String = whole.as_str().chars().map(lower).collect();
                self.encode_word(&alone, ids);
            }
        }
        word.extend(plain[done..].chars().map(lower));
        self.encode_word(&word, ids);
        Ok(())
    }

    fn encode_word(&self, word: &str, ids: &mut Vec<u32>) {
        if word.is_empty() {
            return;
        }
        if word.chars().nth(LONGEST_WORD).is_some() {
            ids.extend(self.unk);
            return;
        }
        let before = ids.len();
        let marked = format!("{SPACE_MARK}{word}");
        let mut rest = marked.as_bytes();
        while !rest.is_empty() {
            let Some((len, id)) = self.trie.longest(rest, |_, _| true) else {
                ids.truncate(before);
                ids.extend(self.unk);
                return;
            };
            ids.push(id);
            rest = &rest[len..];
        }
    }
}

/// The small letter, where it is one character.
fn lower(c: char) -> char {
    let mut small = c.to_lowercase();
    match (small.next(), small.next()) {
        (Some(only), None) => only,
        _ => c,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_folded_cut_and_covered() {
        let mut vocab = Vocab { model: "bert".into(), unk: Some(0), ..Vocab::default() };
        // A Korean syllable is the letters it is made of.
        vocab.tokens = ["[UNK]", "▁cafe", "s", "▁!", "▁你", "▁\u{1112}", "\u{1161}", "\u{11ab}"].into_iter().collect();
        let wpm = Wpm::new(&vocab).expect("it is sound");
        let encode = |text: &str| {
            let mut ids = Vec::new();
            wpm.encode(text, &EncodeLimit::default(), &mut ids).expect("it encodes");
            ids
        };
        assert_eq!(encode("Café CAFÉS"), [1, 1, 2]);
        assert_eq!(encode("ca\u{200b}fe!你你 x"), [1, 3, 4, 4, 0]);
        assert_eq!(encode("한"), [5, 6, 7]);
        assert!(encode(" \n").is_empty());
        // The longest word, and one letter more.
        let (longest, longer) = (format!("cafe{}", "s".repeat(96)), format!("cafe{}", "s".repeat(97)));
        assert_eq!(encode(&longest).len(), 97);
        assert_eq!(encode(&format!("{longer} cafe")), [0, 1]);
    }
}
