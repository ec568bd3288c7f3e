//! How vocabularies spell bytes: the printable alphabet of byte-level BPE, the `<0x0A>` tokens of byte fallback and the
//! U+2581 that stands for a space.

/// Stands for a space in SentencePiece vocabularies.
pub(super) const SPACE_MARK: char = '\u{2581}';
/// The same in UTF-8.
const MARK_BYTES: &[u8] = "\u{2581}".as_bytes();

/// The character that stands for a byte in a byte-level vocabulary: printable Latin-1 stands for itself, the other 68
/// bytes take the characters from U+0100 on, in order.
fn char_of_byte(byte: u8) -> char {
    let code = u32::from(byte);
    let hidden = match byte {
        0..=0x20 => 0x100 + code,
        0x7F..=0xA0 => 0x121 + code - 0x7F,
        0xAD => 0x143,
        _ => code,
    };
    char::from_u32(hidden).expect("up to U+0143 all numbers should be characters")
}

fn is_printable(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The byte that a character of a byte-level vocabulary stands for.
fn byte_of_char(c: char) -> Option<u8> {
    let code = u32::from(c);
    match code {
        0..=0xFF => Some(code as u8).filter(|&byte| is_printable(byte)),
        // 0x00 to 0x20, then 0x7F to 0xA0, then 0xAD.
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// The bytes that a byte-level token stands for, or `None` where it is not written in that alphabet.
pub(super) fn decode_byte_level(token: &[u8]) -> Option<Vec<u8>> {
    std::str::from_utf8(token).ok()?.chars().map(byte_of_char).collect()
}

/// How a byte-level vocabulary spells bytes.
pub(super) fn encode_byte_level(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char_of_byte(*byte)).collect()
}

/// The byte of a token like `<0x0A>`.
pub(super) fn parse_byte_token(token: &[u8]) -> Option<u8> {
    match token {
        [b'<', b'0', b'x', high, low, b'>'] => {
            let digit = |c: u8| char::from(c).to_digit(16);
            Some((digit(*high)? * 16 + digit(*low)?) as u8)
        }
        _ => None,
    }
}

/// Replaces spaces by the mark that stands for them.
pub(super) fn mark_spaces(text: &str, out: &mut String) {
    for c in text.chars() {
        out.push(if c == ' ' { SPACE_MARK } else { c });
    }
}

/// The same in bytes that need not be valid UTF-8.
pub(super) fn mark_spaces_in(piece: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(piece.len() + MARK_BYTES.len());
    for &byte in piece {
        out.extend_from_slice(if byte == b' ' { MARK_BYTES } else { std::slice::from_ref(&byte) });
    }
    out
}

/// Whether a text in which spaces are marked is this one in which they are not.
pub(super) fn is_marked(text: &[u8], piece: &[u8]) -> bool {
    let (mut text, mut piece) = (text, piece);
    loop {
        // Most tokens have a space in front or none at all.
        if text.len() == piece.len() {
            return text == piece && !text.contains(&b' ');
        }
        let Some((&byte, after)) = piece.split_first() else { return false };
        let expected = if byte == b' ' { MARK_BYTES } else { std::slice::from_ref(&byte) };
        let Some(rest) = text.strip_prefix(expected) else { return false };
        (text, piece) = (rest, after);
    }
}

/// Replaces the mark by the space it stands for, in bytes that need not be valid UTF-8.
pub(super) fn unmark_spaces(token: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(token.len());
    let mut rest = token;
    while let Some((&first, tail)) = rest.split_first() {
        if let Some(after) = rest.strip_prefix(MARK_BYTES) {
            out.push(b' ');
            rest = after;
        } else {
            out.push(first);
            rest = tail;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character_and_comes_back() {
        for byte in 0..=255 {
            assert_eq!(byte_of_char(char_of_byte(byte)), Some(byte));
        }
        assert_eq!(char_of_byte(b' '), 'Ġ');
        assert_eq!(char_of_byte(b'\n'), 'Ċ');
        assert_eq!(byte_of_char(' '), None);
        assert_eq!(byte_of_char('\u{144}'), None);
        assert_eq!(byte_of_char('\u{AD}'), None);
    }

    #[test]
    fn byte_tokens_are_read_strictly() {
        assert_eq!(parse_byte_token(b"<0x0A>"), Some(10));
        assert_eq!(parse_byte_token(b"<0xff>"), Some(255));
        for bad in [&b"<0x-1>"[..], b"<0x+1>", b"<0x1>", b"<0x100>", b"<0xGG>", b"<0X0A>", b"", b"<0x \xFF>"] {
            assert_eq!(parse_byte_token(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn marks_become_spaces_in_any_bytes() {
        assert_eq!(unmark_spaces("▁a▁▁b".as_bytes()), b" a  b");
        assert_eq!(unmark_spaces(b"\xE2\x96\x81\xE2\x96"), b" \xE2\x96");
        assert_eq!(mark_spaces_in(b" a \xE2"), b"\xE2\x96\x81a\xE2\x96\x81\xE2");
    }

    #[test]
    fn a_text_is_compared_as_if_its_marks_were_spaces() {
        assert!(
            is_marked("▁a▁".as_bytes(), b" a ") && is_marked(b"", b"") && is_marked("▁".as_bytes(), "▁".as_bytes())
        );
        for (text, piece) in [("▁a", "a"), ("▁a", " "), (" a", " a"), ("a▁", "a "), ("▁", "")] {
            assert_eq!(is_marked(text.as_bytes(), piece.as_bytes()), text == "a▁", "{text:?} {piece:?}");
        }
    }
}
