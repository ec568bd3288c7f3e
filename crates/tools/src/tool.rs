//! A tool, and what came of a call.

use std::fmt::Write as _;

use kiln_system::text::{beginning, shown};
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// Whether a person is asked before a tool is called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Approval {
    /// Each call waits for a person.
    #[default]
    Ask,
    /// Calls are made when the model wants them.
    Always,
}

/// A tool that a model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// The name that the model knows it by; no other tool of the toolbox has it.
    pub name: String,
    /// The MCP server that has it; empty for those of Kiln itself.
    pub server: String,
    /// What the server calls it.
    pub own_name: String,
    /// What it does, in the words of the server.
    pub description: String,
    /// The JSON schema of its arguments.
    pub parameters: Value,
    /// Whether somebody is asked before it is called.
    pub approval: Approval,
}

impl Tool {
    /// As templates and APIs have tools.
    pub fn schema(&self) -> Value {
        let function = json!({"name": self.name, "description": self.description, "parameters": self.parameters});
        json!({"type": "function", "function": function})
    }

    /// Stands for everything that a person saw who allowed it: a server that changes a tool has to ask again.
    pub fn fingerprint(&self) -> String {
        let all = json!([self.server, self.own_name, self.description, self.parameters]).to_string();
        Sha256::digest(all.as_bytes()).iter().take(16).fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

/// A piece of a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputPart {
    /// A text.
    Text {
        /// It.
        text: String,
    },
    /// A picture: PNG, JPEG, GIF or WebP.
    Picture {
        /// Its media type.
        mime: String,
        /// Its bytes as base64.
        data: String,
    },
    /// An address.
    Link {
        /// It; `http:` or `https:`.
        url: String,
        /// What it is called.
        name: String,
    },
}

/// What came of a call. All of it is data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Output {
    /// What the tool gave.
    pub parts: Vec<OutputPart>,
    /// Whether the call failed; the text says why.
    pub is_error: bool,
    /// What was cut off, in words.
    pub cut: Option<String>,
}

impl Output {
    /// A text.
    pub fn text(text: impl Into<String>) -> Output {
        Output { parts: vec![OutputPart::Text { text: text.into() }], ..Output::default() }
    }

    /// A call that failed.
    pub fn error(why: impl Into<String>) -> Output {
        Output { is_error: true, ..Output::text(why) }
    }

    /// The same with no more than `most` bytes of text, and a word where there were more.
    pub(crate) fn within(mut self, most: usize) -> Output {
        let length = |part: &OutputPart| match part {
            OutputPart::Text { text } => text.len(),
            OutputPart::Link { url, name } => url.len() + name.len(),
            OutputPart::Picture { .. } => 0,
        };
        let all: usize = self.parts.iter().map(length).sum();
        if all <= most {
            return self;
        }
        let mut left = most;
        self.parts.retain_mut(|part| {
            let before = left;
            left = left.saturating_sub(length(part));
            match part {
                OutputPart::Text { text } => {
                    text.truncate(beginning(text, before).len());
                    !text.is_empty()
                }
                OutputPart::Link { .. } => length(part) <= before,
                OutputPart::Picture { .. } => true,
            }
        });
        self.cut = Some(format!("the result has {all} bytes of text, the first {most} are given"));
        self
    }

    /// The result as the model reads it: pictures and links are named.
    pub fn for_model(&self) -> String {
        let mut lines: Vec<String> = Vec::new();
        if self.is_error {
            lines.push("Error:".to_owned());
        }
        for part in &self.parts {
            lines.push(match part {
                OutputPart::Text { text } => text.clone(),
                OutputPart::Picture { mime, data } => format!("[a picture, {mime}, {} bytes]", data.len() / 4 * 3),
                OutputPart::Link { url, name } if name.is_empty() => url.clone(),
                OutputPart::Link { url, name } => format!("{name}: {url}"),
            });
        }
        lines.extend(self.cut.iter().map(|cut| format!("[cut: {cut}]")));
        match lines.is_empty() {
            true => "(no result)".to_owned(),
            false => lines.join("\n"),
        }
    }

    /// Bytes of everything in it.
    pub(crate) fn bytes(&self) -> usize {
        let length = |part: &OutputPart| match part {
            OutputPart::Text { text } => text.len(),
            OutputPart::Picture { data, .. } => data.len(),
            OutputPart::Link { url, name } => url.len() + name.len(),
        };
        self.parts.iter().map(length).sum()
    }
}

/// The arguments of a call, which a model wrote: an object, or nothing for an empty one.
pub(crate) fn arguments(text: &str) -> Result<Value, String> {
    if text.trim().is_empty() {
        return Ok(json!({}));
    }
    match serde_json::from_str::<Value>(text) {
        Ok(value) if value.is_object() => Ok(value),
        Ok(Value::Null) => Ok(json!({})),
        Ok(other) => Err(format!("the arguments must be a JSON object, they are {}", shown(&other.to_string()))),
        Err(why) => Err(format!("the arguments are no JSON: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_results_are_cut_between_letters_and_say_so() {
        let long = Output::text("é".repeat(100)).within(33);
        let OutputPart::Text { text } = &long.parts[0] else { panic!("a text") };
        assert_eq!(text.len(), 32);
        assert!(long.for_model().ends_with("[cut: the result has 200 bytes of text, the first 33 are given]"));
        let link = OutputPart::Link { url: "https://a.example/".into(), name: String::new() };
        let picture = OutputPart::Picture { mime: "image/png".into(), data: "AAAA".into() };
        let mixed = Output { parts: vec![OutputPart::Text { text: "abc".into() }, link, picture], ..Output::default() };
        assert_eq!(mixed.clone().within(100), mixed);
        let cut = mixed.within(5);
        assert_eq!(cut.parts.len(), 2, "half a link leads elsewhere");
        assert_eq!(Output::default().for_model(), "(no result)");
    }

    #[test]
    fn arguments_are_objects() {
        assert_eq!(arguments(" ").unwrap(), json!({}));
        assert_eq!(arguments("{\"a\": 1}").unwrap(), json!({"a": 1}));
        assert!(arguments("[1]").unwrap_err().contains("must be a JSON object"));
        assert!(arguments("{\"a\"").unwrap_err().contains("no JSON"));
    }

    #[test]
    fn a_changed_tool_is_another_one_for_those_who_allowed_it() {
        let tool = |description: &str| Tool {
            name: "s__t".into(),
            server: "s".into(),
            own_name: "t".into(),
            description: description.into(),
            parameters: json!({"type": "object"}),
            approval: Approval::Ask,
        };
        assert_eq!(tool("a").fingerprint(), tool("a").fingerprint());
        assert_ne!(tool("a").fingerprint(), tool("b").fingerprint());
        assert_eq!(tool("a").fingerprint().len(), 32);
    }
}
