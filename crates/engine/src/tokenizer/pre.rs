//! Splitting text into words before byte-level BPE: finds the patterns of a `tokenizer.ggml.pre` name and applies them.

use std::ops::Range;

use fancy_regex::Regex;

use super::error::TokenizerError;
use super::limit::EncodeLimit;
use super::patterns::{FAMILIES, Family, Pass, Tail, WholeWords};

/// The known names, for an error message.
pub(super) fn known_names() -> String {
    let names: Vec<&str> = FAMILIES.iter().flat_map(|family| family.names).copied().collect();
    names.join(", ")
}

fn find(name: &str) -> Result<&'static Family, TokenizerError> {
    if name.is_empty() {
        return Err(TokenizerError::MissingPre);
    }
    let found = FAMILIES.iter().find(|family| family.names.contains(&name));
    found.ok_or_else(|| TokenizerError::UnknownPre { name: name.to_owned() })
}

/// Whether vocabularies with this pre-tokeniser begin a text with BOS where the file does not say.
pub(super) fn default_add_bos(name: &str) -> bool {
    find(name).is_ok_and(|family| family.add_bos)
}

enum CompiledPass {
    Match(Regex, Tail),
    Triples { digits: Regex, word_char: Option<Regex> },
}

/// The compiled passes of one family.
pub(super) struct PreTokenizer {
    passes: Vec<CompiledPass>,
    /// Whether words that are tokens skip the merges.
    pub(super) whole_words: WholeWords,
}

impl PreTokenizer {
    /// Compiles the passes of a name.
    pub(super) fn new(name: &str) -> Result<Self, TokenizerError> {
        let family = find(name)?;
        let compile = |pattern: &str| {
            Regex::new(pattern).map_err(|e| TokenizerError::Pattern { name: name.to_owned(), reason: e.to_string() })
        };
        let triples = |digits: &str, word_char: Option<&str>| {
            Ok::<_, TokenizerError>(CompiledPass::Triples {
                digits: compile(digits)?,
                word_char: word_char.map(compile).transpose()?,
            })
        };
        let passes = family.passes.iter().map(|pass| match *pass {
            Pass::Match(pattern, tail) => Ok(CompiledPass::Match(compile(pattern)?, tail)),
            Pass::NumberTriples => triples(r"\p{N}+", None),
            Pass::DigitTriples => triples(r"\d+", None),
            Pass::DigitTriplesAtWordEnd => triples(r"\d+", Some(r"\A\w")),
        });
        Ok(Self { passes: passes.collect::<Result<_, TokenizerError>>()?, whole_words: family.whole_words })
    }

    /// The words of a text, in order and without gaps.
    pub(super) fn split(&self, text: &str, limit: &EncodeLimit) -> Result<Vec<Range<usize>>, TokenizerError> {
        let mut words = Vec::new();
        if text.is_empty() {
            return Ok(words);
        }
        words.push(0..text.len());
        for pass in &self.passes {
            let mut cut = Cutter { base: 0, done: 0, words: Vec::with_capacity(words.len() + text.len() / 5) };
            for word in words {
                limit.check(0)?;
                cut.base = word.start;
                cut.done = 0;
                let piece = &text[word];
                match pass {
                    CompiledPass::Match(regex, tail) => cut_matches(piece, regex, *tail, limit, &mut cut)?,
                    CompiledPass::Triples { digits, word_char } => {
                        cut_triples(piece, digits, word_char.as_ref(), &mut cut)?;
                    }
                }
                cut.to(piece.len());
            }
            words = cut.words;
        }
        Ok(words)
    }
}

/// Collects the pieces of one pass.
struct Cutter {
    base: usize,
    done: usize,
    words: Vec<Range<usize>>,
}

impl Cutter {
    /// Ends a piece here, unless it would be empty.
    fn to(&mut self, end: usize) {
        if end > self.done {
            self.words.push(self.base + self.done..self.base + end);
            self.done = end;
        }
    }
}

fn find_from(regex: &Regex, piece: &str, at: usize) -> Result<Option<Range<usize>>, TokenizerError> {
    let found = regex.find_from_pos(piece, at).map_err(|e| TokenizerError::Split { reason: e.to_string() })?;
    Ok(found.map(|m| m.range()))
}

fn cut_matches(
    piece: &str,
    regex: &Regex,
    tail: Tail,
    limit: &EncodeLimit,
    cut: &mut Cutter,
) -> Result<(), TokenizerError> {
    while cut.done < piece.len() {
        limit.check(0)?;
        let Some(found) = find_from(regex, piece, cut.done)? else { break };
        cut.to(found.start);
        let last = piece[..found.end].chars().next_back().unwrap_or_default();
        // With these tail rules only `\s+`, the last alternative, gives a match that ends so.
        let is_space = match tail {
            Tail::Keep => false,
            Tail::LeaveOne => last.is_whitespace(),
            Tail::LeaveOneInLine | Tail::Cascade => last.is_whitespace() && !matches!(last, '\r' | '\n'),
        };
        let mut end = found.end;
        if is_space && end < piece.len() && found.len() > last.len_utf8() {
            end -= last.len_utf8();
        }
        if is_space && tail == Tail::Cascade {
            cut_cascade(&piece[found.start..end], found.start, cut);
        }
        cut.to(end);
    }
    Ok(())
}

/// Cuts white space into pieces of falling powers of two.
fn cut_cascade(space: &str, base: usize, cut: &mut Cutter) {
    let ends: Vec<usize> = space.char_indices().map(|(at, c)| base + at + c.len_utf8()).collect();
    let mut at = 0;
    for size in [512, 256, 128, 64, 32, 16, 8, 4, 2, 1] {
        while ends.len() - at >= size {
            at += size;
            cut.to(ends[at - 1]);
        }
    }
}

/// Cuts every run of digits into threes, counted from its end; a run before a word character stays whole where
/// `word_char` is given.
fn cut_triples(piece: &str, digits: &Regex, word_char: Option<&Regex>, cut: &mut Cutter) -> Result<(), TokenizerError> {
    let mut at = 0;
    while let Some(found) = find_from(digits, piece, at)? {
        at = found.end;
        if let Some(regex) = word_char
            && find_from(regex, &piece[at..], 0)?.is_some()
        {
            continue;
        }
        cut.to(found.start);
        let run = &piece[found.clone()];
        let count = run.chars().count();
        for (index, (offset, _)) in run.char_indices().enumerate() {
            if (count - index).is_multiple_of(3) {
                cut.to(found.start + offset);
            }
        }
        cut.to(found.end);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        let pre = PreTokenizer::new(name).unwrap();
        let words: Vec<&str> =
            pre.split(text, &EncodeLimit::default()).unwrap().into_iter().map(|range| &text[range]).collect();
        assert_eq!(words.concat(), text, "{name}");
        words
    }

    /// The rule of the tail against the look-ahead it replaces.
    #[test]
    fn tail_rules_equal_the_look_ahead() {
        let texts = [
            "a  b",
            " \t\n x",
            "\n\nfoo",
            "x \n \n  y",
            "  ",
            " ",
            "\r\n\r\n",
            "a\u{3000}\u{3000}b",
            "1 \u{A0} 2  ",
            "   \n   ",
            "!! \n\n ??",
            "\u{2028}\u{2028}z",
            "a\u{B}\u{C}b \r c",
        ];
        for (name, pattern) in [
            ("gpt-2", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
            ("qwen2", r"(?:'[sS])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
            (
                "bailingmoe",
                r"'(?:[sS])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            ),
            (
                "jais-2",
                concat!(
                    r"(?:'[sS])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)",
                    r"|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)",
                    r"|\s{1,2}(?!\S)|\s{1}"
                ),
            ),
        ] {
            let regex = Regex::new(pattern).unwrap();
            let long = format!("x{}y{}", " ".repeat(1500), "\t".repeat(7));
            for text in texts.iter().copied().chain([long.as_str()]) {
                let expected: Vec<&str> = regex.find_iter(text).map(|m| m.unwrap().as_str()).collect();
                assert_eq!(words(name, text), expected, "{name} {text:?}");
            }
        }
    }

    #[test]
    fn every_family_compiles_and_keeps_every_byte() {
        let text = "Hello, World's 12345 cafés!\r\n\t  def f(x): return x+1 // 你好，世界 😀\u{200D} ｶﾅ ०१२३ <sentinel:7>  \n ";
        for name in FAMILIES.iter().flat_map(|family| family.names) {
            assert!(words(name, text).len() > 1, "{name}");
            assert!(words(name, "").is_empty());
        }
    }

    #[test]
    fn numbers_are_cut_as_the_families_say() {
        assert_eq!(words("llama-bpe", "1234567"), ["123", "456", "7"]);
        assert_eq!(words("qwen2", "123"), ["1", "2", "3"]);
        assert_eq!(words("afmoe", "1234567"), ["1", "234", "567"]);
        assert_eq!(words("superbpe", "a b 1234567 c"), ["a b ", "1", "234", "567", " c"]);
        assert_eq!(words("tiny_aya", "1234 1234x"), ["1", "234", " ", "123", "4", "x"]);
        assert_eq!(words("falcon", "1234567"), ["123", "456", "7"]);
        assert_eq!(words("smollm", "ab 12"), ["ab", " ", "1", "2"]);
    }

    #[test]
    fn cased_words_break_before_upper_case() {
        assert_eq!(words("gpt-4o", "fooBar can't XMLFile"), ["foo", "Bar", " can't", " XMLFile"]);
        assert_eq!(words("tekken", "fooBar can't"), ["foo", "Bar", " can", "'t"]);
        assert_eq!(words("kimi-k2", "abc你好def's"), ["abc", "你好", "def's"]);
    }

    #[test]
    fn unknown_and_missing_names_are_errors_that_say_so() {
        let message = PreTokenizer::new("gpt-9").err().unwrap().to_string();
        assert!(message.contains("`gpt-9`") && message.contains("tokenizer.ggml.pre") && message.contains("qwen2"));
        assert!(matches!(PreTokenizer::new(""), Err(TokenizerError::MissingPre)));
    }

    #[test]
    fn every_name_is_listed_once() {
        let mut names: Vec<&str> = FAMILIES.iter().flat_map(|family| family.names).copied().collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
