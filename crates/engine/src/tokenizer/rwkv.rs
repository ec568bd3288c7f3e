//! The RWKV World tokenizer: at every place the longest token. Its tokens are byte strings, written in the file with the
//! escapes of a Python literal.

use super::error::TokenizerError;
use super::trie::Trie;
use super::vocab::{TokenType, Vocab};

/// A trie of the whole vocabulary.
pub(super) struct Rwkv {
    trie: Trie<u32>,
    unk: Option<u32>,
}

impl Rwkv {
    /// Builds the trie from the pieces of a vocabulary, which are its tokens without escapes.
    pub(super) fn new<'p>(vocab: &Vocab, pieces: impl Iterator<Item = &'p [u8]>) -> Self {
        let mut trie = Trie::new();
        for ((piece, kind), id) in pieces.zip(&vocab.token_types).zip(0..) {
            if !matches!(kind, TokenType::Control | TokenType::Unknown) {
                trie.insert(piece, id);
            }
        }
        Self { trie, unk: vocab.unk }
    }

    /// Appends the tokens of a text without special tokens.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let len = match self.trie.longest(rest, |_, _| true) {
                Some((len, id)) => {
                    ids.push(id);
                    len
                }
                None => {
                    ids.extend(self.unk);
                    1
                }
            };
            rest = &rest[len..];
        }
    }
}

/// The bytes of a token written with escapes: `\t`, `\n`, `\r`, `\xFF`, `\u2581`, `\U0001F600`; any other escaped
/// character stands for itself.
pub(super) fn unescape(id: usize, token: &[u8]) -> Result<Vec<u8>, TokenizerError> {
    let mut out = Vec::with_capacity(token.len());
    let mut at = 0;
    while at < token.len() {
        if token[at] != b'\\' {
            out.push(token[at]);
            at += 1;
            continue;
        }
        let broken = || TokenizerError::BadEscape { id, offset: at, text: String::from_utf8_lossy(token).into_owned() };
        let kind = *token.get(at + 1).ok_or_else(broken)?;
        let digits = match kind {
            b'x' => 2,
            b'u' => 4,
            b'U' => 8,
            _ => 0,
        };
        let mut code = 0;
        for digit in 0..digits {
            let digit = token.get(at + 2 + digit).and_then(|&c| char::from(c).to_digit(16)).ok_or_else(broken)?;
            code = code << 4 | digit;
        }
        match kind {
            b'x' => out.push(code as u8),
            b'u' | b'U' => {
                let c = char::from_u32(code).ok_or_else(broken)?;
                out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
            }
            b't' => out.push(b'\t'),
            b'n' => out.push(b'\n'),
            b'r' => out.push(b'\r'),
            other => out.push(other),
        }
        at += 2 + digits;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_those_of_python() {
        let cases: [(&str, &[u8]); 8] = [
            (r"\x00", b"\0"),
            (r"a\tb\n\r", b"a\tb\n\r"),
            (r"\\x41", br"\x41"),
            (r"\'\x22", b"'\""),
            (r"\xe4\xbd\xa0", "你".as_bytes()),
            (r"\xFF", b"\xFF"),
            (r"\u4f60\U0001F600", "你😀".as_bytes()),
            ("plain ü", "plain ü".as_bytes()),
        ];
        for (escaped, expected) in cases {
            assert_eq!(unescape(7, escaped.as_bytes()).unwrap(), expected, "{escaped}");
        }
    }

    #[test]
    fn broken_escapes_are_errors() {
        for bad in ["\\", r"ab\x", r"\x1", r"\xg0", r"\x-1", r"\ud800", r"\U00110000", r"\UFFFFFFFF"] {
            let error = unescape(7, bad.as_bytes()).unwrap_err();
            assert!(matches!(error, TokenizerError::BadEscape { id: 7, .. }), "{bad}");
        }
    }
}
