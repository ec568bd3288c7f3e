//! Jinja as `transformers` sets it up: what templates of models are written against. Nothing here reads a file, and a
//! template that runs away meets a limit.

use std::io::{self, Write};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Serde, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, UndefinedBehavior, Value};

use super::json::Dumps;

/// Instructions a render may take. The longest known template takes some thousand for a message.
const FUEL: u64 = 2_000_000;
const RECURSION: usize = 200;
/// Bytes a render may give.
pub(super) const MAX_OUTPUT: usize = 64 << 20;
/// Set by `raise_exception`, so that its message is told from errors of the template itself.
pub(super) const RAISED: &str = "\u{1}raised\u{1}";

/// An environment with one template, `chat`.
pub(super) fn environment(source: &str) -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    env.set_syntax(syntax);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(RECURSION);
    env.set_debug(false);
    env.set_unknown_method_callback(method);
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    env.add_filter("tojson", |value: &Value, indent: Option<Value>, kwargs: Kwargs| {
        Dumps::from_kwargs(indent, &kwargs)?.write(value)
    });
    env.add_filter("from_json", |text: &str| from_json(text));
    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    // As Python: what has a length and can be indexed.
    env.add_test("sequence", |value: &Value| {
        value.is_undefined() || matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
    });
    env.add_template_owned("chat", without_generation_tags(source))?;
    Ok(env)
}

fn from_json(text: &str) -> Result<Value, Error> {
    let parsed: serde_json::Value = serde_json::from_str(text)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("from_json: {error}")))?;
    Ok(Value::from(Serde(parsed)))
}

/// Methods of Python's types: those that `minijinja-contrib` knows, and `rsplit`.
fn method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match (value.as_str(), method) {
        (Some(text), "rsplit") => {
            let (separator, most): (Option<&str>, Option<i64>) = from_args(args)?;
            let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX - 1);
            let mut parts: Vec<&str> = match separator {
                Some(separator) => text.rsplitn(most + 1, separator).collect(),
                None => text.split_whitespace().rev().collect(),
            };
            parts.reverse();
            Ok(parts.into_iter().map(Value::from).collect())
        }
        (Some(text), "removeprefix") => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        (Some(text), "removesuffix") => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// `{% generation %}` marks what a training loss counts and renders its body; it becomes `{% if true %}`.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let Some(end) = rest[at..].find("%}").map(|end| at + end + 2) else { break };
        let inner = rest[at + 2..end - 2].trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        let replaced = match inner {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        match replaced {
            Some(tag) => {
                out.push_str(&rest[..at]);
                out.push_str(&rest[at..end].replace(inner, tag));
                rest = &rest[end..];
            }
            // Only the opening is passed: a string inside the tag may hold the closing one.
            None => {
                out.push_str(&rest[..at + 2]);
                rest = &rest[at + 2..];
            }
        }
    }
    out.push_str(rest);
    out
}

/// The function `strftime_now(format)` for a time of day.
pub(super) fn strftime_now(now: jiff::civil::DateTime) -> Value {
    Value::from_function(move |format: &str, _rest: Rest<Value>| -> Result<String, Error> { strftime(now, format) })
}

pub(super) fn strftime(now: jiff::civil::DateTime, format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, now)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {error}")))
}

/// Takes what a render writes, up to the limit.
#[derive(Default)]
pub(super) struct Capped {
    pub(super) bytes: Vec<u8>,
}

impl Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_OUTPUT {
            return Err(io::Error::other(format!("the template wrote more than {} MiB", MAX_OUTPUT >> 20)));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_keep_their_whitespace_marks() {
        assert_eq!(
            without_generation_tags("a {%- generation -%} b {% endgeneration %}"),
            "a {%- if true -%} b {% endif %}"
        );
        assert_eq!(without_generation_tags("{% if x %}{% generation"), "{% if x %}{% generation");
        assert_eq!(without_generation_tags("{{ '{%' }}{% generation %}"), "{{ '{%' }}{% if true %}");
    }
}
