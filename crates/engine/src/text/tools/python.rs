//! Calls as Python writes them, in a list: `[get_weather(place='Paris', days=2), now()]`. LFM2, Llama 4, and models that
//! are asked to.

use super::driver::{Region, Sink};
use super::scan::{Status, blank};

/// One way to write them.
#[derive(Debug)]
pub(super) struct Form {
    /// What comes before.
    pub(super) opens: &'static [&'static str],
    /// What comes after.
    pub(super) close: &'static [&'static str],
    /// Calls stand only at the beginning.
    pub(super) at_start: bool,
}

pub(super) static LFM2: Form = Form { opens: &["<|tool_call_start|>"], close: &["<|tool_call_end|>"], at_start: false };
pub(super) static LLAMA4: Form = Form { opens: &["<|python_start|>", "["], close: &["<|python_end|>"], at_start: true };
pub(super) static PLAIN: Form = Form { opens: &["["], close: &[], at_start: true };

pub(super) static BARE: Form = Form { opens: &[], close: &[], at_start: false };

/// Why a literal could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stuck {
    /// It may go on.
    Unfinished,
    Broken,
}

/// Deeper literals are refused.
const MAX_DEPTH: usize = 64;

/// A Python literal at the beginning of a text, written as JSON; and its length.
pub(super) fn literal(text: &str, depth: usize) -> Result<(String, usize), Stuck> {
    if depth > MAX_DEPTH {
        return Err(Stuck::Broken);
    }
    match text.as_bytes().first().ok_or(Stuck::Unfinished)? {
        b'\'' | b'"' => string(text),
        b'[' => list(text, ']', depth),
        b'(' => list(text, ')', depth),
        b'{' => dict(text, depth),
        _ => word(text),
    }
}

fn string(text: &str) -> Result<(String, usize), Stuck> {
    let quote = &text[..1];
    let triple = quote.repeat(3);
    // Three quotation marks may be on their way.
    if triple.starts_with(text) {
        return Err(Stuck::Unfinished);
    }
    let quote = if text.starts_with(&triple) { triple.as_str() } else { quote };
    let mut value = String::new();
    let mut rest = &text[quote.len()..];
    loop {
        if rest.starts_with(quote) {
            let len = text.len() - rest.len() + quote.len();
            return Ok((serde_json::Value::String(value).to_string(), len));
        }
        let c = rest.chars().next().ok_or(Stuck::Unfinished)?;
        rest = &rest[c.len_utf8()..];
        if c != '\\' {
            value.push(c);
            continue;
        }
        let escape = rest.chars().next().ok_or(Stuck::Unfinished)?;
        rest = &rest[escape.len_utf8()..];
        let digits = match escape {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            '0' => '\0',
            'x' | 'u' | 'U' => {
                let len = match escape {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let code = rest.get(..len).ok_or(if rest.len() < len { Stuck::Unfinished } else { Stuck::Broken })?;
                let code = u32::from_str_radix(code, 16).map_err(|_| Stuck::Broken)?;
                rest = &rest[len..];
                char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
            }
            '\'' | '"' | '\\' => escape,
            '\n' => continue,
            other => {
                value.push('\\');
                other
            }
        };
        value.push(digits);
    }
}

fn list(text: &str, close: char, depth: usize) -> Result<(String, usize), Stuck> {
    let mut out = String::from("[");
    let mut at = 1;
    loop {
        at += blank(&text[at..]);
        let next = text[at..].chars().next().ok_or(Stuck::Unfinished)?;
        if next == close {
            out.push(']');
            return Ok((out, at + 1));
        }
        if out.len() > 1 {
            if next != ',' {
                return Err(Stuck::Broken);
            }
            at += 1;
            at += blank(&text[at..]);
            if text[at..].starts_with(close) {
                continue;
            }
            out.push_str(", ");
        }
        let (value, len) = literal(&text[at..], depth + 1)?;
        out.push_str(&value);
        at += len;
    }
}

fn dict(text: &str, depth: usize) -> Result<(String, usize), Stuck> {
    let mut out = String::from("{");
    let mut at = 1;
    loop {
        at += blank(&text[at..]);
        let next = text[at..].chars().next().ok_or(Stuck::Unfinished)?;
        if next == '}' {
            out.push('}');
            return Ok((out, at + 1));
        }
        if out.len() > 1 {
            if next != ',' {
                return Err(Stuck::Broken);
            }
            at += 1;
            at += blank(&text[at..]);
            if text[at..].starts_with('}') {
                continue;
            }
            out.push_str(", ");
        }
        let (key, len) = literal(&text[at..], depth + 1)?;
        at += len;
        at += blank(&text[at..]);
        match text[at..].chars().next().ok_or(Stuck::Unfinished)? {
            ':' => at += 1,
            _ => return Err(Stuck::Broken),
        }
        at += blank(&text[at..]);
        let (value, len) = literal(&text[at..], depth + 1)?;
        at += len;
        let key = if key.starts_with('"') { key } else { serde_json::Value::String(key).to_string() };
        out.push_str(&format!("{key}: {value}"));
    }
}

/// A number or a word; it ends where something else begins.
fn word(text: &str) -> Result<(String, usize), Stuck> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+' | '_');
    let len = text.find(|c| !fits(c)).ok_or(Stuck::Unfinished)?;
    let word = &text[..len];
    let json = match word {
        "True" | "true" => "true".to_owned(),
        "False" | "false" => "false".to_owned(),
        "None" | "null" => "null".to_owned(),
        _ => {
            let plain = word.replace('_', "");
            serde_json::from_str::<serde_json::Number>(plain.trim_start_matches('+'))
                .map_err(|_| Stuck::Broken)?
                .to_string()
        }
    };
    Ok((json, len))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Before the list.
    List,
    /// Before a call.
    Call,
    /// Inside a call, before an argument.
    Argument,
    /// After a call.
    After,
    /// After the list.
    Close,
}

/// Reads a region.
pub(super) struct Reader {
    form: &'static Form,
    stage: Stage,
    in_list: bool,
    arguments: usize,
    calls: usize,
}

impl Reader {
    pub(super) fn new(form: &'static Form, open: &str) -> Self {
        let in_list = open == "[";
        Self { form, stage: if in_list { Stage::Call } else { Stage::List }, in_list, arguments: 0, calls: 0 }
    }

    fn advance(&mut self, text: &str, last: bool, sink: &mut Sink) -> Option<(usize, Status)> {
        let skipped = blank(text);
        let rest = &text[skipped..];
        let go = |len: usize| Some((skipped + len, Status::More));
        let broken = Some((0, Status::Broken));
        let Some(first) = rest.chars().next() else {
            let over = matches!(self.stage, Stage::After | Stage::Close) && last;
            return over.then_some((skipped, Status::Done));
        };
        match self.stage {
            Stage::List => {
                self.in_list = first == '[';
                self.stage = Stage::Call;
                go(usize::from(self.in_list))
            }
            Stage::Call => {
                if first == ']' && self.in_list && self.calls > 0 {
                    self.stage = Stage::Close;
                    return go(1);
                }
                let fits = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-');
                let Some(end) = rest.find(|c| !fits(c)) else {
                    return (last || rest.len() > 256).then_some((0, Status::Broken));
                };
                let name = rest[..end].strip_suffix(".call").unwrap_or(&rest[..end]);
                if !rest[end..].starts_with('(') || name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
                    return broken;
                }
                if !sink.start(name, None) {
                    return broken;
                }
                sink.arguments("{");
                (self.stage, self.arguments) = (Stage::Argument, 0);
                go(end + 1)
            }
            Stage::Argument => match self.argument(rest, first, sink) {
                Ok(len) => go(len),
                Err(Stuck::Unfinished) => None,
                Err(Stuck::Broken) => {
                    sink.arguments("}");
                    broken
                }
            },
            Stage::After => {
                self.stage = match first {
                    ',' | ';' => Stage::Call,
                    ']' if self.in_list => Stage::Close,
                    _ => {
                        self.stage = Stage::Close;
                        return go(0);
                    }
                };
                go(1)
            }
            Stage::Close => match self.form.close.iter().find(|close| rest.starts_with(**close)) {
                Some(close) => Some((skipped + close.len(), Status::Done)),
                None if !last && self.form.close.iter().any(|close| close.starts_with(rest)) => None,
                None => Some((0, Status::Done)),
            },
        }
    }

    /// One argument, or the end of the call.
    fn argument(&mut self, rest: &str, first: char, sink: &mut Sink) -> Result<usize, Stuck> {
        if first == ')' {
            sink.arguments("}");
            sink.end();
            self.calls += 1;
            self.stage = Stage::After;
            return Ok(1);
        }
        let mut at = 0;
        if self.arguments > 0 {
            if first != ',' {
                return Err(Stuck::Broken);
            }
            at = 1 + blank(&rest[1..]);
            if rest[at..].starts_with(')') {
                return Ok(at);
            }
        }
        let fits = |c: char| c.is_alphanumeric() || c == '_';
        let end = at + rest[at..].find(|c| !fits(c)).ok_or(Stuck::Unfinished)?;
        let key = &rest[at..end];
        let equals = end + blank(&rest[end..]);
        match rest[equals..].chars().next().ok_or(Stuck::Unfinished)? {
            '=' if !key.is_empty() => {}
            _ => return Err(Stuck::Broken),
        }
        let from = equals + 1 + blank(&rest[equals + 1..]);
        let (value, len) = literal(&rest[from..], 0)?;
        let comma = if self.arguments > 0 { ", " } else { "" };
        sink.arguments(&format!("{comma}\"{key}\": {value}"));
        self.arguments += 1;
        Ok(from + len)
    }
}

impl Region for Reader {
    fn step(&mut self, text: &str, last: bool, sink: &mut Sink) -> (usize, Status) {
        let mut taken = 0;
        loop {
            match self.advance(&text[taken..], last, sink) {
                None => return (taken, Status::More),
                Some((len, Status::More)) => taken += len,
                Some((len, status)) => return (taken + len, status),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_become_json() {
        for (python, json) in [
            ("'a\\'b' ", r#""a'b""#),
            ("\"\"\"x\"y\"\"\" ", r#""x\"y""#),
            ("'\\n\\x41\\u00e9\\q' ", r#""\nAé\\q""#),
            ("[1, -2.5, True, None,] ", "[1, -2.5, true, null]"),
            ("(1,) ", "[1]"),
            ("{'a': {'b': []}, 2: 'x'} ", r#"{"a": {"b": []}, "2": "x"}"#),
            ("1_000 ", "1000"),
        ] {
            let (got, len) = literal(python, 0).expect("it is a literal");
            assert_eq!((got.as_str(), len), (json, python.len() - 1), "{python}");
            for cut in 0..python.len() - 1 {
                if python.is_char_boundary(cut) && !python[..cut].ends_with('\'') {
                    assert!(literal(&python[..cut], 0) != Err(Stuck::Broken), "{:?}", &python[..cut]);
                }
            }
        }
        assert_eq!(literal("name ", 0), Err(Stuck::Broken));
        assert_eq!(literal(&"[".repeat(100), 0), Err(Stuck::Broken));
    }
}
