//! JSON as Python's `json.dumps` writes it: templates were trained on its spaces, and on the order of keys.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::marks::is_mark;

/// How `tojson` was called.
pub(super) struct Dumps {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    separators: (String, String),
}

/// Deeper values are refused; the recursion is on the stack.
const MAX_DEPTH: usize = 128;

impl Dumps {
    /// As `json.dumps(x, ensure_ascii=False)`.
    pub(super) fn plain() -> Self {
        Self { ensure_ascii: false, sort_keys: false, indent: None, separators: (", ".into(), ": ".into()) }
    }

    pub(super) fn from_kwargs(indent: Option<Value>, kwargs: &Kwargs) -> Result<Self, Error> {
        let mut dumps = Self::plain();
        if let Some(yes) = kwargs.get::<Option<Value>>("ensure_ascii")? {
            dumps.ensure_ascii = yes.is_true();
        }
        if let Some(yes) = kwargs.get::<Option<Value>>("sort_keys")? {
            dumps.sort_keys = yes.is_true();
        }
        let indent = match kwargs.get::<Option<Value>>("indent")? {
            Some(indent) => Some(indent),
            None => indent,
        };
        if let Some(indent) = indent.filter(|indent| !indent.is_none() && !indent.is_undefined()) {
            dumps.indent = Some(match indent.as_str() {
                Some(text) => text.to_owned(),
                None => " ".repeat(indent.as_usize().unwrap_or(0).min(64)),
            });
            dumps.separators.0 = ",".into();
        }
        if let Some(pair) = kwargs.get::<Option<Value>>("separators")?.filter(|pair| !pair.is_none()) {
            let part = |at| Ok::<_, Error>(pair.get_item_by_index(at)?.to_string());
            dumps.separators = (part(0)?, part(1)?);
        }
        kwargs.assert_all_used()?;
        Ok(dumps)
    }

    pub(super) fn write(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.value(value, 0, &mut out)?;
        Ok(out)
    }

    fn value(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::BadSerialization, "a value is nested too deeply for tojson"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => match value.is_integer() {
                true => write!(out, "{value}").unwrap_or_default(),
                false => out.push_str(&float(f64::try_from(value.clone())?)),
            },
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Map => {
                let mut keys = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
                if self.sort_keys {
                    keys.sort_by_key(Value::to_string);
                }
                self.list('{', '}', keys.len(), depth, out, |at, out| {
                    self.key(&keys[at], out)?;
                    out.push_str(&self.separators.1);
                    self.value(&value.get_item(&keys[at])?, depth + 1, out)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
                self.list('[', ']', items.len(), depth, out, |at, out| self.value(&items[at], depth + 1, out))?;
            }
            kind => {
                let what = format!("a value of type {kind} cannot be written as JSON");
                return Err(Error::new(ErrorKind::BadSerialization, what));
            }
        }
        Ok(())
    }

    fn list(
        &self,
        open: char,
        close: char,
        len: usize,
        depth: usize,
        out: &mut String,
        mut item: impl FnMut(usize, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let new_line = |depth: usize, out: &mut String| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                (0..depth).for_each(|_| out.push_str(indent));
            }
        };
        out.push(open);
        for at in 0..len {
            if at > 0 {
                out.push_str(&self.separators.0);
            }
            new_line(depth + 1, out);
            item(at, out)?;
        }
        if len > 0 {
            new_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn key(&self, key: &Value, out: &mut String) -> Result<(), Error> {
        match key.as_str() {
            Some(text) => self.string(text, out),
            None => {
                let mut text = String::new();
                self.value(key, MAX_DEPTH, &mut text)?;
                self.string(&text, out);
            }
        }
        Ok(())
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\0'..='\u{1f}' => write!(out, "\\u{:04x}", u32::from(c)).unwrap_or_default(),
                // A mark that is spelled out would be none.
                _ if self.ensure_ascii && !c.is_ascii() && !is_mark(c) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(out, "\\u{unit:04x}").unwrap_or_default();
                    }
                }
                _ => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A float as Python's `repr` writes it.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity".into() } else { "-Infinity".into() };
    }
    // Rust changes to exponents where Python does, but writes them without sign and padding.
    let text = format!("{value:?}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
            format!("{}e{sign}{exponent:0>2}", digits.strip_suffix(".0").unwrap_or(digits))
        }
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::value::Serde;

    fn value(json: &str) -> Value {
        Value::from(Serde(serde_json::from_str::<serde_json::Value>(json).expect("valid JSON")))
    }

    #[test]
    fn written_as_python_writes_it() {
        let json = r#"{"b": [1, 2.0, true, null], "a": {"text": "<é\n\u0001\">"}, "e": [], "f": {}}"#;
        let plain = r#"{"b": [1, 2.0, true, null], "a": {"text": "<é\n\u0001\">"}, "e": [], "f": {}}"#;
        assert_eq!(Dumps::plain().write(&value(json)).expect("it is plain"), plain);
        let sorted = Dumps { sort_keys: true, ensure_ascii: true, ..Dumps::plain() };
        assert_eq!(
            sorted.write(&value(r#"{"b": "é😀", "a": 1}"#)).expect("plain"),
            r#"{"a": 1, "b": "\u00e9\ud83d\ude00"}"#
        );
        let indented = Dumps { indent: Some("  ".into()), separators: (",".into(), ": ".into()), ..Dumps::plain() };
        assert_eq!(
            indented.write(&value(r#"{"a": [1, {}]}"#)).expect("plain"),
            "{\n  \"a\": [\n    1,\n    {}\n  ]\n}"
        );
    }

    #[test]
    fn floats_are_pythons() {
        for (number, want) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (1.5e-7, "1.5e-07"),
            (1e22, "1e+22"),
            (123_456.789, "123456.789"),
            (-0.0, "-0.0"),
            (1e100, "1e+100"),
            (0.0001, "0.0001"),
        ] {
            assert_eq!(float(number), want);
        }
    }

    #[test]
    fn what_is_not_json_is_refused() {
        assert!(Dumps::plain().write(&Value::UNDEFINED).is_err());
        let deep = "[".repeat(120) + &"]".repeat(120);
        assert!(Dumps::plain().write(&value(&deep)).is_ok());
        let mut nested = Value::from(1);
        for _ in 0..200 {
            nested = Value::from(vec![nested]);
        }
        assert!(Dumps::plain().write(&nested).is_err());
    }
}
