//! A conversation to be continued, whichever way it came.

use kiln_engine::text::{Content, Message};
use serde_json::{Map, Value};

use super::Format;

/// Which tools an answer may or must call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As the model likes.
    #[default]
    Auto,
    /// None; calls are not looked for.
    None,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// A conversation to be continued.
#[derive(Clone, Debug)]
pub struct Conversation {
    /// The messages, the oldest first.
    pub messages: Vec<Message>,
    /// Tools as `{"type": "function", "function": {...}}`.
    pub tools: Vec<Value>,
    /// Which of them may or must be called.
    pub tool_choice: ToolChoice,
    /// Whether several calls may come in one answer.
    pub parallel_calls: bool,
    /// What the answer must look like.
    pub format: Option<Format>,
    /// Further variables of the template, like `enable_thinking`.
    pub kwargs: Map<String, Value>,
    /// The last message is the beginning of the answer.
    pub continues: bool,
    /// The prompt does not end where the assistant begins.
    pub no_generation_prompt: bool,
    /// Reasoning stays in the text, marks and all.
    pub keep_reasoning: bool,
    /// Tokens that the model may think at most; then its thought is closed.
    pub thinking_budget: Option<usize>,
}

impl Default for Conversation {
    fn default() -> Conversation {
        Conversation {
            messages: Vec::new(),
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            parallel_calls: true,
            format: None,
            kwargs: Map::new(),
            continues: false,
            no_generation_prompt: false,
            keep_reasoning: false,
            thinking_budget: None,
        }
    }
}

/// Where a template does not show tools, the system message does.
pub(super) fn describe_tools(messages: &mut Vec<Message>, tools: &[Value]) {
    let list: Vec<String> = tools.iter().map(Value::to_string).collect();
    let text = format!(
        "You may call these tools. To call one, write only a block like this, and nothing after it:\n<tool_call>\n\
         {{\"name\": \"TOOL\", \"arguments\": {{\"ARGUMENT\": \"VALUE\"}}}}\n</tool_call>\n\nThe tools:\n{}",
        list.join("\n")
    );
    match messages.first_mut().filter(|m| m.role == "system" || m.role == "developer") {
        Some(system) => system.content = Content::Text(format!("{}\n\n{text}", system.content.to_text())),
        None => messages.insert(0, Message::new("system", text)),
    }
}
