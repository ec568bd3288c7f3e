//! What an answer must look like.

use kiln_engine::text::Rule;
use serde_json::{Value, json};

/// What an answer must look like.
#[derive(Clone, Debug, PartialEq)]
pub enum Format {
    /// JSON that fits a schema; an empty one means any object.
    Schema(Value),
    /// Text that a regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in GBNF or Lark.
    Grammar(String),
}

/// Any object.
pub(super) fn object() -> Value {
    json!({"type": "object"})
}

impl Format {
    /// Any JSON object.
    pub fn json() -> Format {
        Format::Schema(object())
    }

    /// The rule for all of a text.
    pub(super) fn rule(&self) -> Rule {
        match self {
            // Many clients mean an object by an empty schema.
            Format::Schema(schema) if *schema == object() || *schema == json!({}) => Rule::JsonObject,
            Format::Schema(schema) => Rule::JsonSchema(schema.clone()),
            Format::Regex(regex) => Rule::Regex(regex.clone()),
            Format::Choice(texts) => Rule::Choice(texts.clone()),
            Format::Grammar(grammar) if grammar.contains("::=") => Rule::Gbnf(grammar.clone()),
            Format::Grammar(grammar) => Rule::Lark(grammar.clone()),
        }
    }
}
