//! JSON that arrives in pieces: where a value ends, and strings that must be whole.

/// How far a reader came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// It took what it could and wants more text.
    More,
    /// It is through.
    Done,
    /// This is not what it reads.
    Broken,
}

/// Deeper values are no arguments.
const MAX_DEPTH: usize = 128;

/// Follows one JSON value to its end, without keeping it.
#[derive(Clone, Debug, Default)]
pub(super) struct ValueScan {
    stack: Vec<u8>,
    in_string: bool,
    escaped: bool,
    scalar: bool,
}

impl ValueScan {
    /// How many bytes of `text` belong to the value. White space before it must be gone.
    pub(super) fn feed(&mut self, text: &str) -> (usize, Status) {
        for (at, byte) in text.bytes().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => {
                        self.in_string = false;
                        if self.stack.is_empty() {
                            return (at + 1, Status::Done);
                        }
                    }
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' if self.scalar => return (at, Status::Broken),
                b'"' => self.in_string = true,
                b'{' | b'[' => {
                    if self.scalar || self.stack.len() == MAX_DEPTH {
                        return (at, Status::Broken);
                    }
                    self.stack.push(byte);
                }
                b'}' | b']' => match self.stack.pop() {
                    None => return (at, if self.scalar { Status::Done } else { Status::Broken }),
                    Some(open) if (open == b'{') != (byte == b'}') => return (at, Status::Broken),
                    Some(_) if self.stack.is_empty() => return (at + 1, Status::Done),
                    Some(_) => {}
                },
                b',' | b' ' | b'\n' | b'\r' | b'\t' if self.stack.is_empty() => {
                    return (at, if self.scalar { Status::Done } else { Status::Broken });
                }
                b'0'..=b'9' | b'-' | b'+' | b'.' | b'a'..=b'z' | b'A'..=b'Z' if self.stack.is_empty() => {
                    self.scalar = true
                }
                _ if self.stack.is_empty() => return (at, Status::Broken),
                _ => {}
            }
        }
        (text.len(), Status::More)
    }
}

/// A JSON string at the beginning of `text`, and how long it is written; `None` where it is not whole yet.
pub(super) fn whole_string(text: &str) -> Option<Result<(String, usize), ()>> {
    let mut scan = ValueScan::default();
    if !text.starts_with('"') {
        return Some(Err(()));
    }
    match scan.feed(text) {
        (end, Status::Done) => Some(serde_json::from_str(&text[..end]).map(|string| (string, end)).map_err(|_| ())),
        (_, Status::More) => None,
        (_, Status::Broken) => Some(Err(())),
    }
}

/// How many bytes of white space a text begins with.
pub(super) fn blank(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_end_where_they_end() {
        for (text, end, status) in [
            (r#"{"a": "}"} x"#, 10, Status::Done),
            (r#"{"a": [1, {"b": "\"]"}]},"#, 24, Status::Done),
            ("12.5, 3", 4, Status::Done),
            ("true}", 4, Status::Done),
            ("null", 4, Status::More),
            (r#""a\"b" c"#, 6, Status::Done),
            (r#"{"a": 1"#, 7, Status::More),
            ("[1}", 2, Status::Broken),
            ("}", 0, Status::Broken),
            ("<x>", 0, Status::Broken),
        ] {
            assert_eq!(ValueScan::default().feed(text), (end, status), "{text}");
        }
    }
}
