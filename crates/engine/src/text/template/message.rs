//! A conversation as APIs hand it over: messages, their parts, tool calls.

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

/// What a message says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Nothing, as in a message of tool calls alone.
    #[default]
    None,
    /// A text.
    Text(String),
    /// Parts like `{"type": "text", "text": "..."}`, as they were sent.
    Parts(Vec<Json>),
}

impl Content {
    /// The texts of all parts, one a line.
    pub fn to_text(&self) -> String {
        match self {
            Self::None => String::new(),
            Self::Text(text) => text.clone(),
            Self::Parts(parts) => {
                let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
                texts.join("\n")
            }
        }
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

/// The function of a tool call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// An object, or a text that holds one.
    pub arguments: Json,
}

/// A call of a tool in an assistant's message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// What the answer refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Always `function`.
    #[serde(rename = "type", default = "function_type")]
    pub kind: String,
    /// What is called.
    pub function: Function,
}

fn function_type() -> String {
    "function".into()
}

/// A message.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, or what else a template knows.
    pub role: String,
    /// What it says.
    #[serde(default)]
    pub content: Content,
    /// What the assistant thought before.
    #[serde(default, alias = "reasoning", alias = "thinking", skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// What the assistant called.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Which call a `tool` message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Who speaks, or which tool answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message of text.
    pub fn new(role: &str, text: impl Into<Content>) -> Self {
        Self { role: role.to_owned(), content: text.into(), ..Self::default() }
    }
}

/// What a template is asked to render.
#[derive(Clone, Debug, Default)]
pub struct ChatInput {
    /// The conversation.
    pub messages: Vec<Message>,
    /// Tools as they were sent, `{"type": "function", "function": {...}}`; their order of keys reaches the prompt.
    pub tools: Vec<Json>,
    /// Whether the prompt ends where the assistant begins to speak.
    pub add_generation_prompt: bool,
    /// The prompt ends inside the last message, which the model continues.
    pub continue_final_message: bool,
    /// Further variables, like `enable_thinking`.
    pub kwargs: serde_json::Map<String, Json>,
    /// The time that templates may print; now where it is not given.
    pub now: Option<jiff::civil::DateTime>,
}
