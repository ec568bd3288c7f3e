//! A conversation as any API hands it over, made into one request to the engine: rendered, tokenised, checked.

use std::sync::Arc;

use kiln_engine::media::{Arranged, Joined};
use kiln_engine::run::Request;
use kiln_engine::text::{ConstraintError, Content, Function, Message, Rendered, TemplateError};
pub(crate) use kiln_llm::chat::ToolChoice;
use kiln_llm::chat::{ChatError, Conversation, Format, NoTemplate};
use serde_json::{Map, Value};

use crate::api_error::{ApiError, Kind};
use crate::encode::{Purpose, check_messages, encode_rendered, most_rows};
use crate::generate::{Form, Job};
use crate::guard::Caller;
use crate::media::{self, Taken};
use crate::params::Params;
use crate::registry::Loaded;

/// How long a model may think.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThinkingBudget {
    /// As long as it likes.
    Free,
    /// This many tokens; then the reasoning is closed.
    Tokens(usize),
}

impl ThinkingBudget {
    /// As clients write it: a negative number is no bound.
    pub fn from_number(tokens: i64) -> ThinkingBudget {
        usize::try_from(tokens).map_or(ThinkingBudget::Free, ThinkingBudget::Tokens)
    }

    fn tokens(self) -> Option<usize> {
        match self {
            ThinkingBudget::Free => None,
            ThinkingBudget::Tokens(most) => Some(most),
        }
    }
}

/// A conversation to be continued.
#[derive(Clone, Debug)]
pub(crate) struct Chat {
    pub(crate) messages: Vec<Message>,
    /// Tools as `{"type": "function", "function": {...}}`.
    pub(crate) tools: Vec<Value>,
    pub(crate) tool_choice: ToolChoice,
    /// Whether several calls may come in one answer.
    pub(crate) parallel_calls: bool,
    /// What the answer must look like.
    pub(crate) shape: Option<Format>,
    /// Further variables of the template.
    pub(crate) kwargs: Map<String, Value>,
    /// The last message is the beginning of the answer.
    pub(crate) continues: bool,
    /// The prompt does not end where the assistant begins.
    pub(crate) no_generation_prompt: bool,
    /// Whether reasoning stays in the content, where the request says so.
    pub(crate) keep_reasoning: Option<bool>,
    /// Tokens that the model may think at most, where the request says so.
    pub(crate) thinking_budget: Option<ThinkingBudget>,
    /// Report logarithms of probability.
    pub(crate) logprobs: Option<usize>,
}

impl Default for Chat {
    fn default() -> Chat {
        Chat {
            messages: Vec::new(),
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            parallel_calls: true,
            shape: None,
            kwargs: Map::new(),
            continues: false,
            no_generation_prompt: false,
            keep_reasoning: None,
            thinking_budget: None,
            logprobs: None,
        }
    }
}

impl Chat {
    /// The prompt as text for people: pictures and sounds are named.
    pub(crate) fn shown(&self, loaded: &Loaded) -> Result<String, ApiError> {
        let taken = Taken::from(&self.messages);
        Ok(self.render(loaded, &taken)?.plain().replace(taken.marker.text(), "<__media__>"))
    }

    /// The conversation as the library has it.
    fn conversation(&self, loaded: &Loaded, messages: Vec<Message>) -> Conversation {
        let budget = self.thinking_budget.or(loaded.thinking_budget);
        Conversation {
            messages,
            tools: self.tools.clone(),
            tool_choice: self.tool_choice.clone(),
            parallel_calls: self.parallel_calls,
            format: self.shape.clone(),
            kwargs: self.kwargs.clone(),
            continues: self.continues,
            no_generation_prompt: self.no_generation_prompt,
            keep_reasoning: self.keep_reasoning.unwrap_or(loaded.keep_reasoning),
            thinking_budget: budget.and_then(ThinkingBudget::tokens),
        }
    }

    /// The prompt as text.
    fn render(&self, loaded: &Loaded, taken: &Taken) -> Result<Rendered, ApiError> {
        Ok(loaded.setup.render(&self.conversation(loaded, taken.messages.clone()))?)
    }

    /// How many tokens the prompt is, rows of pictures and sounds among them.
    pub(crate) fn count(&self, loaded: &Loaded) -> Result<usize, ApiError> {
        Ok(self.tokens(loaded)?.len())
    }

    /// The tokens of the prompt; numbers above the vocabulary stand for rows of pictures and sounds.
    pub(crate) fn tokens(&self, loaded: &Loaded) -> Result<Vec<u32>, ApiError> {
        Ok(self.prompt(loaded, Purpose::Count)?.0.tokens)
    }

    /// The prompt: its tokens, and the pictures and sounds that are to be encoded.
    fn prompt(&self, loaded: &Loaded, purpose: Purpose) -> Result<(Arranged, Rendered), ApiError> {
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "`messages` must hold at least one message"));
        }
        check_messages(loaded, purpose, &self.messages)?;
        let taken = Taken::from(&self.messages);
        let shown = taken.shown(loaded, most_rows(loaded, purpose))?;
        let rendered = self.render(loaded, &taken)?;
        let parts = encode_rendered(loaded, purpose, &rendered, &taken)?;
        let arranged = Arranged::new(&loaded.scheduler.model().tokenizer, parts, shown).map_err(|why| match why {
            kiln_engine::Error::LostMedia { .. } => ApiError::new(Kind::Template, why.to_string()),
            other => other.into(),
        })?;
        Ok((arranged, rendered))
    }

    /// The request to the engine. It takes time: templates and grammars are compiled here, off the async threads.
    pub(crate) fn job(self, loaded: &Arc<Loaded>, params: &Params, caller: &Caller) -> Result<Job, ApiError> {
        let (arranged, rendered) = self.prompt(loaded, Purpose::Prompt)?;
        check_length(loaded, arranged.tokens.len())?;
        let allowed = params.allowed(loaded)?;
        if allowed.is_some() && self.shape.is_some() {
            return Err(ApiError::invalid("allowed_token_ids", "allowed_token_ids and a schema exclude each other"));
        }
        // The messages are in the prompt already.
        let mut form = loaded.setup.form(&self.conversation(loaded, Vec::new()), &rendered, allowed)?;
        // What can be refused was: encoding takes the longest.
        let Joined { tokens, spans } = media::join(loaded, arranged)?;
        let request = Request {
            spans,
            limit: params.limit()?.or(loaded.limit),
            sampling: params.sampling(loaded)?,
            stop: params.stop_rule(loaded)?,
            logprobs: self.logprobs,
            constraint: form.constraint.take(),
            choices: params.choices(loaded)?,
            owner: params.owner(caller),
            reuse: params.reuse(),
            most_drafted: params.most_drafted(),
            scales: params.scales(loaded)?,
            show_special: form.show_special,
            ..Request::new(tokens)
        };
        let (loaded, caller) = (Arc::clone(loaded), caller.clone());
        let (ends, form) = (loaded.setup.ends.clone(), Form::Chat(Box::new(form)));
        Ok(Job { ends, slot: params.slot(), loaded, caller, request, form })
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> ApiError {
        match error {
            ChatError::NoTemplate(why) => ApiError::new(Kind::Template, no_template(&why)),
            ChatError::Template(TemplateError::Arguments { index, call, .. }) => {
                let param = format!("messages[{index}].tool_calls[{call}].function.arguments");
                ApiError::invalid(param, error.to_string())
            }
            ChatError::Template(TemplateError::Reserved { ref name }) => {
                ApiError::invalid(format!("chat_template_kwargs.{name}"), error.to_string())
            }
            ChatError::Template(TemplateError::Tokenizer(why)) => kiln_engine::Error::from(why).into(),
            ChatError::Template(other) => ApiError::new(Kind::Template, other.to_string()),
            ChatError::NoSuchTool(_) => ApiError::invalid("tool_choice", error.to_string()),
            ChatError::Constraint(why) => match &why {
                ConstraintError::Schema { .. } => ApiError::new(Kind::Schema, why.to_string()),
                ConstraintError::Vocabulary(_) => ApiError::new(Kind::CannotDo, why.to_string()),
                ConstraintError::Broken(_) | ConstraintError::Tokenizer(_) => ApiError::internal(&why),
                _ => ApiError::new(Kind::Grammar, why.to_string()),
            },
            ChatError::Vocabulary(why) => ApiError::new(Kind::CannotDo, why),
            ChatError::GrammarAndTools => {
                let message = "tools and a grammar of the client's own exclude each other, unless tool_choice is none";
                ApiError::new(Kind::Invalid, message).with_param("grammar")
            }
            ChatError::Engine(why) => why.into(),
            other => ApiError::internal(&other),
        }
    }
}

/// Why a model holds no conversations, for clients and for the log.
pub(crate) fn no_template(why: &NoTemplate) -> String {
    match why {
        NoTemplate::Fills => {
            "this model fills in texts as a whole, which this server does not do\nhint: `kiln run` does".to_owned()
        }
        NoTemplate::Encoder => "this model gives vectors of texts and writes none; /v1/embeddings serves it".to_owned(),
        NoTemplate::Missing => "this model has no chat template, so it can only continue text\n\
             hint: use /v1/completions, a model that was trained to chat, or `kiln serve --chat-template chatml`"
            .to_owned(),
        other => other.to_string(),
    }
}

/// Whether a prompt fits.
pub(crate) fn check_length(loaded: &Loaded, prompt: usize) -> Result<(), ApiError> {
    let context = loaded.scheduler.context();
    if prompt > context {
        return Err(ApiError::new(Kind::TooLong { prompt, context }, String::new()));
    }
    Ok(())
}

/// Messages as OpenAI's chat API has them.
pub(crate) fn messages(values: &[Value]) -> Result<Vec<Message>, ApiError> {
    if values.len() > 100_000 {
        return Err(ApiError::invalid("messages", format!("{} messages are too many", values.len())));
    }
    let messages: Result<Vec<Message>, ApiError> = values.iter().enumerate().map(|(i, v)| message(i, v)).collect();
    let messages = messages?;
    let two = messages.len() >= 2 && messages[messages.len() - 2..].iter().all(|m| m.role == "assistant");
    if two {
        let last = messages.len() - 1;
        return Err(ApiError::invalid(
            format!("messages[{last}]"),
            "two assistant messages at the end follow each other",
        ));
    }
    Ok(messages)
}

fn message(index: usize, value: &Value) -> Result<Message, ApiError> {
    let at = |field: &str| format!("messages[{index}]{field}");
    let wrong = |field: &str, what: &str| ApiError::invalid(at(field), format!("`{}` {what}", at(field)));
    let object = value.as_object().ok_or_else(|| wrong("", "must be an object"))?;
    let role = object.get("role").and_then(Value::as_str).ok_or_else(|| wrong(".role", "must be a string"))?;
    const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];
    if !ROLES.contains(&role) {
        return Err(wrong(".role", &format!("is {role:?}; it must be one of {}", ROLES.join(", "))));
    }
    let text = |name: &str| object.get(name).and_then(Value::as_str).map(str::to_owned);
    let calls = match object.get("tool_calls") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(calls)) => {
            let call = |(n, call): (usize, &Value)| {
                tool_call(call).ok_or_else(|| {
                    wrong(&format!(".tool_calls[{n}]"), "must have function.name and function.arguments")
                })
            };
            calls.iter().enumerate().map(call).collect::<Result<_, _>>()?
        }
        Some(_) => return Err(wrong(".tool_calls", "must be a list")),
    };
    let content = content(&at(".content"), object.get("content"))?;
    if content == Content::None && role != "assistant" && role != "tool" {
        return Err(wrong(".content", "is missing"));
    }
    Ok(Message {
        role: role.to_owned(),
        content,
        reasoning_content: text("reasoning_content").or_else(|| text("reasoning")).or_else(|| text("thinking")),
        tool_calls: calls,
        tool_call_id: text("tool_call_id"),
        name: text("name"),
    })
}

fn tool_call(call: &Value) -> Option<kiln_engine::text::ToolCall> {
    let function = call.get("function")?;
    Some(kiln_engine::text::ToolCall {
        id: call.get("id").and_then(Value::as_str).map(str::to_owned),
        kind: "function".into(),
        function: Function {
            name: function.get("name")?.as_str()?.to_owned(),
            arguments: function.get("arguments").cloned().unwrap_or(Value::Null),
        },
    })
}

/// What a message says: a text, or parts of text, pictures and sounds.
pub(crate) fn content(param: &str, value: Option<&Value>) -> Result<Content, ApiError> {
    match value {
        None | Some(Value::Null) => Ok(Content::None),
        Some(Value::String(text)) => Ok(Content::Text(text.clone())),
        Some(Value::Array(parts)) => {
            let part = |(i, part): (usize, &Value)| {
                let param = format!("{param}[{i}]");
                let text = |field: &str| {
                    let text = part.get(field).and_then(Value::as_str);
                    text.ok_or_else(|| ApiError::invalid(format!("{param}.{field}"), format!("`{param}` has no text")))
                };
                if let Some(medium) = media::part(&param, part) {
                    return medium;
                }
                let text = match part.get("type").and_then(Value::as_str) {
                    Some("text" | "input_text" | "output_text") => text("text")?,
                    Some("refusal") => text("refusal")?,
                    Some(kind) => {
                        let message =
                            format!("`{param}` is of type {kind:?}; only text, pictures and sounds are taken");
                        return Err(ApiError { kind: Kind::UnsupportedValue, message, param: Some(param) });
                    }
                    None => return Err(ApiError::invalid(param.clone(), format!("`{param}` has no type"))),
                };
                Ok(serde_json::json!({"type": "text", "text": text}))
            };
            Ok(Content::Parts(parts.iter().enumerate().map(part).collect::<Result<_, _>>()?))
        }
        Some(_) => Err(ApiError::invalid(param, format!("`{param}` must be a string or a list of parts"))),
    }
}

/// Whether a tool may be called so: letters, digits, `_` and `-`, as OpenAI and Anthropic have it.
pub(crate) fn check_tool_name(param: &str, name: &str, longest: usize) -> Result<(), ApiError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if (1..=longest).contains(&name.len()) && name.chars().all(fits) {
        return Ok(());
    }
    let message = format!("`{param}` must be 1 to {longest} letters, digits, `_` and `-`");
    Err(ApiError::invalid(param, message))
}

/// Sets what templates know about thinking, where a request says something about it.
pub(crate) fn thinking(kwargs: &mut Map<String, Value>, on: Option<bool>, effort: Option<&str>) {
    if let Some(on) = on {
        kwargs.entry("enable_thinking").or_insert(Value::Bool(on));
        kwargs.entry("thinking").or_insert(Value::Bool(on));
    }
    if let Some(effort) = effort {
        kwargs.entry("reasoning_effort").or_insert(Value::String(effort.to_owned()));
    }
}

/// What OpenAI calls effort: whether to think, and how hard.
pub(crate) fn effort(kwargs: &mut Map<String, Value>, param: &str, effort: Option<&str>) -> Result<(), ApiError> {
    match effort {
        None => {}
        Some("none") => thinking(kwargs, Some(false), None),
        Some(known @ ("minimal" | "low" | "medium" | "high" | "xhigh" | "max")) => {
            thinking(kwargs, Some(true), Some(known));
        }
        Some(other) => {
            let message = format!("{other:?} is no effort: none, minimal, low, medium, high, xhigh or max");
            return Err(ApiError::invalid(param, message));
        }
    }
    Ok(())
}
