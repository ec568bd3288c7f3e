//! Text that Kiln did not write: names and values of files, variables of the environment, words of a model. A terminal
//! takes some of its characters for commands (clear the screen, set the title, pretend to be another line), so they are
//! made visible before they are shown.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Characters of a foreign text that are shown where nothing else is said.
pub const MOST: usize = 200;

/// A text of a file, a header or the environment, fit for one line of a message: what a terminal would obey is escaped,
/// and long text is truncated with its length.
pub fn shown(text: &str) -> String {
    shown_within(text, MOST)
}

/// As [`shown`], with at most `most` characters of the text.
pub fn shown_within(text: &str, most: usize) -> String {
    let mut out = String::new();
    for (count, c) in text.chars().enumerate() {
        if count == most {
            let _ = write!(out, "... ({} bytes)", text.len());
            break;
        }
        if is_command(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// As [`shown`], for bytes that should be text.
pub fn shown_bytes(bytes: &[u8]) -> String {
    // No character has more than four bytes: the rest of megabytes need not be looked at.
    let most = bytes.len().min(4 * (MOST + 1));
    let text = String::from_utf8_lossy(&bytes[..most]);
    if most == bytes.len() {
        return shown(&text);
    }
    let start: String = text.chars().take(MOST).collect();
    format!("{}... ({} bytes)", shown(&start), bytes.len())
}

/// The first bytes of a text, at most this many; no character is cut in two. (`str::floor_char_boundary` needs Rust 1.91.)
pub fn beginning(text: &str, most: usize) -> &str {
    let mut end = most.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Whether a terminal would not show this character but do something: controls of ASCII and of Latin-1, and those that
/// turn the direction of writing or end a line.
fn is_command(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

/// Words of a model for a terminal: lines and tabs stay, other commands become pictures of themselves (`␛`).
pub fn for_terminal(text: &str) -> Cow<'_, str> {
    if !text.chars().any(|c| is_command(c) && !matches!(c, '\n' | '\t')) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\n' | '\t' => out.push(c),
            // Lines of some systems end with both.
            '\r' if chars.peek() == Some(&'\n') => {}
            '\u{7f}' => out.push('\u{2421}'),
            c if c < ' ' => out.push(char::from_u32(0x2400 + c as u32).unwrap_or(char::REPLACEMENT_CHARACTER)),
            c if is_command(c) => out.push(char::REPLACEMENT_CHARACTER),
            c => out.push(c),
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_made_visible() {
        for (text, want) in [
            ("plain words, ünïcödé 漢字", "plain words, ünïcödé 漢字"),
            ("\x1b]0;title\x07", "\\u{1b}]0;title\\u{7}"),
            ("two\nlines\tand\r", "two\\nlines\\tand\\r"),
            ("\u{9b}2J", "\\u{9b}2J"),
            ("\u{202e}gnp.exe", "\\u{202e}gnp.exe"),
            ("", ""),
        ] {
            assert_eq!(shown(text), want);
        }
    }

    #[test]
    fn long_texts_are_cut_and_tell_their_length() {
        let long = "é".repeat(5_000_000);
        assert_eq!(shown_within(&long, 3), "ééé... (10000000 bytes)");
        assert_eq!(shown_bytes(long.as_bytes()).chars().filter(|c| *c == 'é').count(), MOST);
        assert!(shown_bytes(long.as_bytes()).ends_with("... (10000000 bytes)"));
        assert_eq!(shown_bytes(b"a\xff\x1b"), "a\u{fffd}\\u{1b}");
        assert_eq!(shown_within("abc", 3), "abc");
    }

    #[test]
    fn a_beginning_ends_between_two_characters() {
        for (most, want) in [(0, ""), (1, "a"), (2, "a"), (3, "aé"), (4, "aé"), (5, "aé"), (6, "aé漢"), (99, "aé漢")]
        {
            assert_eq!(beginning("aé漢", most), want, "{most} bytes");
        }
    }

    #[test]
    fn generated_text_keeps_its_lines_and_loses_its_commands() {
        assert_eq!(for_terminal("one\n\ttwo"), "one\n\ttwo");
        assert_eq!(for_terminal("a\x1b[2Jb\x07\x7f\u{9b}c"), "a␛[2Jb␇␡\u{fffd}c");
        assert_eq!(for_terminal("a\r\nb\rc"), "a\nb␍c");
    }
}
