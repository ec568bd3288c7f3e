//! Calls of Gemma 4 and FunctionGemma: `call:NAME{key:VALUE,...}` with bare keys, and strings between marks of their own.

use super::driver::{Region, Sink};
use super::named::name;
use super::python::Stuck;
use super::scan::{Status, blank};

/// One way to write them.
#[derive(Debug)]
pub(super) struct Form {
    /// What comes before.
    pub(super) opens: &'static [&'static str],
    pub(super) close: &'static str,
    /// What stands around a string.
    pub(super) quote: &'static str,
}

pub(super) static GEMMA: Form = Form { opens: &["<|tool_call>"], close: "<tool_call|>", quote: "<|\"|>" };
pub(super) static FUNCTION_GEMMA: Form =
    Form { opens: &["<start_function_call>"], close: "<end_function_call>", quote: "<escape>" };

const MAX_DEPTH: usize = 64;
const MAX_HEAD: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Head,
    Argument,
    Close,
}

/// Reads a region.
pub(super) struct Reader {
    form: &'static Form,
    stage: Stage,
    arguments: usize,
}

impl Reader {
    pub(super) fn new(form: &'static Form) -> Self {
        Self { form, stage: Stage::Head, arguments: 0 }
    }

    /// A value at the beginning of a text, as JSON, and its length.
    fn value(&self, text: &str, depth: usize) -> Result<(String, usize), Stuck> {
        if depth > MAX_DEPTH {
            return Err(Stuck::Broken);
        }
        let quote = self.form.quote;
        if let Some(inner) = text.strip_prefix(quote) {
            let end = inner.find(quote).ok_or(Stuck::Unfinished)?;
            return Ok((serde_json::Value::from(&inner[..end]).to_string(), end + 2 * quote.len()));
        }
        if quote.starts_with(text) {
            return Err(Stuck::Unfinished);
        }
        match text.as_bytes()[0] {
            b'[' => self.items(text, ']', depth),
            b'{' => self.items(text, '}', depth),
            _ => {
                let end = text.find([',', '}', ']']).ok_or(Stuck::Unfinished)?;
                let word = text[..end].trim();
                let json = serde_json::from_str::<serde_json::Value>(word).unwrap_or_else(|_| word.into());
                Ok((json.to_string(), end))
            }
        }
    }

    /// The items of a list or an object.
    fn items(&self, text: &str, close: char, depth: usize) -> Result<(String, usize), Stuck> {
        let mut out = String::from(if close == ']' { "[" } else { "{" });
        let mut at = 1;
        loop {
            at += blank(&text[at..]);
            let next = text[at..].chars().next().ok_or(Stuck::Unfinished)?;
            if next == close {
                out.push(close);
                return Ok((out, at + 1));
            }
            if out.len() > 1 {
                if next != ',' {
                    return Err(Stuck::Broken);
                }
                at += 1;
                out.push_str(", ");
            }
            if close == '}' {
                let (key, len) = self.key(&text[at..])?;
                out.push_str(&format!("{key}: "));
                at += len;
            }
            if text[at..].is_empty() {
                return Err(Stuck::Unfinished);
            }
            let (value, len) = self.value(&text[at..], depth + 1)?;
            out.push_str(&value);
            at += len;
        }
    }

    /// A bare or marked key and its colon.
    fn key(&self, text: &str) -> Result<(String, usize), Stuck> {
        let end = text.find(':').ok_or(if text.len() > MAX_HEAD { Stuck::Broken } else { Stuck::Unfinished })?;
        let key = text[..end].trim().trim_start_matches(self.form.quote).trim_end_matches(self.form.quote);
        Ok((serde_json::Value::from(key).to_string(), end + 1))
    }

    fn argument(&mut self, rest: &str, sink: &mut Sink) -> Result<usize, Stuck> {
        if rest.starts_with('}') {
            sink.arguments("}");
            sink.end();
            self.stage = Stage::Close;
            return Ok(1);
        }
        let mut at = 0;
        if self.arguments > 0 {
            if !rest.starts_with(',') {
                return Err(Stuck::Broken);
            }
            at = 1;
        }
        let (key, len) = self.key(&rest[at..])?;
        at += len;
        if rest[at..].is_empty() {
            return Err(Stuck::Unfinished);
        }
        let (value, len) = self.value(&rest[at..], 0)?;
        let comma = if self.arguments > 0 { ", " } else { "" };
        sink.arguments(&format!("{comma}{key}: {value}"));
        self.arguments += 1;
        Ok(at + len)
    }

    fn advance(&mut self, text: &str, last: bool, sink: &mut Sink) -> Option<(usize, Status)> {
        let skipped = blank(text);
        let rest = &text[skipped..];
        let go = |len: usize| Some((skipped + len, Status::More));
        let broken = Some((0, Status::Broken));
        match self.stage {
            Stage::Head => {
                let Some(end) = rest.find('{') else {
                    return (last || rest.len() > MAX_HEAD).then_some((0, Status::Broken));
                };
                let Some(found) = rest[..end].strip_prefix("call:").and_then(name) else { return broken };
                if !sink.start(&found, None) {
                    return broken;
                }
                sink.arguments("{");
                self.stage = Stage::Argument;
                go(end + 1)
            }
            Stage::Argument if rest.is_empty() => None,
            Stage::Argument => match self.argument(rest, sink) {
                Ok(len) => go(len),
                Err(Stuck::Unfinished) => None,
                Err(Stuck::Broken) => {
                    sink.arguments("}");
                    broken
                }
            },
            Stage::Close => match rest.starts_with(self.form.close) {
                true => Some((skipped + self.form.close.len(), Status::Done)),
                false if self.form.close.starts_with(rest) && !last => None,
                false => Some((0, Status::Done)),
            },
        }
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
