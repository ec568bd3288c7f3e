//! Tokens to text while they are generated: never half a character.

use std::sync::Arc;

use super::error::TokenizerError;
use super::{LeadingSpace, ShowSpecial, Tokenizer};

/// Turns tokens into text one by one. Bytes of an unfinished character wait for the next token.
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    show: ShowSpecial,
    leading: LeadingSpace,
    pending: Vec<u8>,
}

impl TextStream {
    /// A stream at the beginning of a text.
    pub fn new(tokenizer: Arc<Tokenizer>, show: ShowSpecial, leading: LeadingSpace) -> Self {
        Self { tokenizer, show, leading, pending: Vec::new() }
    }

    /// The text that is complete with this token; empty while a character is unfinished.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.tokenizer.push_piece(id, self.show, &mut self.leading, &mut self.pending)?;
        let mut text = String::with_capacity(self.pending.len());
        let unfinished = take_text(&self.pending, &mut text);
        self.pending.drain(..self.pending.len() - unfinished);
        Ok(text)
    }

    /// What is still held back, at the end of the generation: U+FFFD for an unfinished character.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

/// Appends the text of some bytes, with U+FFFD for what is not UTF-8, and returns how many bytes at the end begin a
/// character that more bytes may finish.
fn take_text(mut bytes: &[u8], text: &mut String) -> usize {
    loop {
        match std::str::from_utf8(bytes) {
            Ok(valid) => {
                text.push_str(valid);
                return 0;
            }
            Err(error) => {
                let (valid, rest) = bytes.split_at(error.valid_up_to());
                text.push_str(std::str::from_utf8(valid).expect("the prefix should be valid, the error says"));
                let Some(invalid) = error.error_len() else { return rest.len() };
                text.push(char::REPLACEMENT_CHARACTER);
                bytes = &rest[invalid..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unfinished_characters_wait_and_broken_ones_are_replaced() {
        for (bytes, expected, waiting) in [
            (&b"abc"[..], "abc", 0),
            (b"a\xF0\x9F\x98", "a", 3),
            (b"a\xF0\x9F\x98\x80", "a😀", 0),
            (b"\xFFa\x80b\xE4\xBD", "\u{FFFD}a\u{FFFD}b", 2),
            (b"\xE4a\xC3", "\u{FFFD}a", 1),
            (b"\xC0\x80", "\u{FFFD}\u{FFFD}", 0),
        ] {
            let mut text = String::new();
            assert_eq!(take_text(bytes, &mut text), waiting, "{bytes:?}");
            assert_eq!(text, expected, "{bytes:?}");
        }
    }
}
