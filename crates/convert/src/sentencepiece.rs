//! `tokenizer.model`: a vocabulary of SentencePiece, a message of protocol buffers of which the pieces alone are read: field 1,
//! with the text in field 1, the score in field 2 and the kind in field 3.

/// A piece: text, score, kind (1 normal, 2 unknown, 3 control, 4 user's, 5 unused, 6 byte; GGUF has the same numbers).
pub(crate) struct Piece {
    pub(crate) text: Vec<u8>,
    pub(crate) score: f32,
    pub(crate) kind: i32,
}

/// The pieces of a file; `None` where it is damaged.
pub(crate) fn pieces(bytes: &[u8]) -> Option<Vec<Piece>> {
    let mut found = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        if let (1, Field::Bytes(inside)) = field(&mut rest)? {
            found.push(piece(inside)?);
        }
    }
    (!found.is_empty()).then_some(found)
}

fn piece(mut rest: &[u8]) -> Option<Piece> {
    let mut piece = Piece { text: Vec::new(), score: 0.0, kind: 1 };
    while !rest.is_empty() {
        match field(&mut rest)? {
            (1, Field::Bytes(text)) => piece.text = text.to_vec(),
            (2, Field::Four(bits)) => piece.score = f32::from_bits(bits),
            (3, Field::Number(kind)) => piece.kind = i32::try_from(kind).ok()?,
            _ => {}
        }
    }
    Some(piece)
}

enum Field<'a> {
    Number(u64),
    Four(u32),
    Eight,
    Bytes(&'a [u8]),
}

/// The next field with its number.
fn field<'a>(rest: &mut &'a [u8]) -> Option<(u64, Field<'a>)> {
    let tag = number(rest)?;
    let value = match tag & 7 {
        0 => Field::Number(number(rest)?),
        1 => {
            take(rest, 8)?;
            Field::Eight
        }
        2 => {
            let length = usize::try_from(number(rest)?).ok()?;
            Field::Bytes(take(rest, length)?)
        }
        5 => Field::Four(u32::from_le_bytes(take(rest, 4)?.try_into().ok()?)),
        _ => return None,
    };
    Some((tag >> 3, value))
}

fn take<'a>(rest: &mut &'a [u8], n: usize) -> Option<&'a [u8]> {
    let (piece, behind) = rest.split_at_checked(n)?;
    *rest = behind;
    Some(piece)
}

/// A number of seven bits a byte, lowest first.
fn number(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(rest, 1)?[0];
        value |= u64::from(byte & 127) << shift;
        if byte < 128 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_read_and_what_is_cut_is_refused() {
        let one = [0x0a, 3, b'<', b's', b'>', 0x15, 0, 0, 0x80, 0xbf, 0x18, 3];
        let mut bytes = vec![0x0a, one.len() as u8];
        bytes.extend_from_slice(&one);
        // Another field, which is skipped.
        bytes.extend_from_slice(&[0x12, 2, 1, 2]);
        let found = pieces(&bytes).unwrap();
        assert_eq!((found[0].text.as_slice(), found[0].score, found[0].kind), (&b"<s>"[..], -1.0, 3));
        for cut in 1..bytes.len() - 4 {
            assert!(pieces(&bytes[..cut]).is_none(), "{cut}");
        }
        assert!(pieces(&[]).is_none() && pieces(&[0xff; 40]).is_none());
    }
}
