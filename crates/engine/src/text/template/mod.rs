//! Chat templates: from messages to the text that a model was trained to continue. The template comes in the model file,
//! as Jinja; it is rendered as `transformers` would.
//!
//! ```
//! use kiln_engine::text::{ChatInput, Message, Template};
//!
//! let template = Template::new("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")?;
//! let input = ChatInput { messages: vec![Message::new("user", "Hi")], ..ChatInput::default() };
//! assert_eq!(template.render(&input)?.text, "<user>Hi");
//! # Ok::<(), kiln_engine::text::TemplateError>(())
//! ```

mod capabilities;
mod environment;
mod forms;
mod json;
mod marks;
mod mended;
mod message;
mod prepare;

pub use capabilities::Capabilities;
pub use message::{ChatInput, Content, Function, Message, ToolCall};

use kiln_gguf::Metadata;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::Value as Json;

use environment::{Capped, RAISED};

use crate::tokenizer::{AddSpecial, EncodeLimit, ParseSpecial, TokenType, Tokenizer, TokenizerError};

/// What can go wrong with a template.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum TemplateError {
    #[error("the chat template is not valid, line {line}: {what}\nhint: complete without it, or give another template")]
    Syntax { line: usize, what: String },
    #[error("the chat template failed at line {line}: {what}")]
    Render { line: usize, what: String },
    #[error("the chat template refuses this conversation (line {line}): {message}")]
    Raised { line: usize, message: String },
    #[error(
        "the chat template ran too long and was stopped at line {line}\nhint: the template loops, or the conversation has very many messages"
    )]
    OutOfFuel { line: usize },
    #[error("messages[{index}].tool_calls[{call}].function.arguments is not a JSON object: {why}")]
    Arguments { index: usize, call: usize, why: String },
    #[error("`{name}` is set by the conversation or the model's vocabulary, and cannot be a variable of a request")]
    Reserved { name: String },
    #[error("{what}")]
    Input { what: String },
    #[error("the chat template is {bytes} bytes long, more than the limit of {limit}")]
    TooLong { bytes: usize, limit: usize },
    #[error(transparent)]
    Metadata(#[from] kiln_gguf::Error),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

const MAX_SOURCE: usize = 4 << 20;

/// A special token of the vocabulary that templates know by name, like `bos_token`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NamedToken {
    name: &'static str,
    text: String,
}

/// The chat template of a model, and those it has under further names.
pub struct Template {
    source: String,
    env: Environment<'static>,
    /// Used where tools are given: some models have a template of its own for that.
    with_tools: Option<Box<Template>>,
    tokens: Vec<NamedToken>,
    capabilities: Capabilities,
    told: mended::Told,
}

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// What the model is to continue. What a request spelled like control tokens stands between marks; see
    /// [`Rendered::plain`] and [`Rendered::encode`].
    pub text: String,
    /// The end of the text that opens the assistant's turn.
    pub generation_prompt: String,
}

impl Template {
    /// Compiles a template.
    pub fn new(source: &str) -> Result<Self, TemplateError> {
        Self::with_tokens(source, Vec::new())
    }

    fn with_tokens(source: &str, tokens: Vec<NamedToken>) -> Result<Self, TemplateError> {
        if source.len() > MAX_SOURCE {
            return Err(TemplateError::TooLong { bytes: source.len(), limit: MAX_SOURCE });
        }
        let env = environment::environment(source)
            .map_err(|error| TemplateError::Syntax { line: error.line().unwrap_or(0), what: describe(&error) })?;
        let (source, capabilities, told) = (source.to_owned(), Capabilities::default(), mended::Told::default());
        let mut template = Self { source, env, with_tools: None, tokens, capabilities, told };
        template.capabilities = capabilities::probe(&template);
        Ok(template)
    }

    /// The template of a model file; `None` where it has none, and the model completes text only.
    pub fn from_gguf(metadata: &Metadata, tokenizer: &Tokenizer) -> Result<Option<Self>, TemplateError> {
        let Some(source) = metadata.get_str_opt("tokenizer.chat_template")? else { return Ok(None) };
        let tokens = named_tokens(metadata, tokenizer)?;
        let mut template = Self::with_tokens(source, tokens.clone())?;
        if let Some(source) = metadata.get_str_opt("tokenizer.chat_template.tool_use")? {
            template.with_tools = Some(Box::new(Self::with_tokens(source, tokens)?));
        }
        Ok(Some(template))
    }

    /// A template of a model file under another name, like `rag`.
    pub fn named(metadata: &Metadata, tokenizer: &Tokenizer, name: &str) -> Result<Option<Self>, TemplateError> {
        match metadata.get_str_opt(&format!("tokenizer.chat_template.{name}"))? {
            Some(source) => Self::with_tokens(source, named_tokens(metadata, tokenizer)?).map(Some),
            None => Ok(None),
        }
    }

    /// Sets `bos_token` and `eos_token`, for a template that does not come with a vocabulary.
    pub fn set_tokens(&mut self, bos: Option<&str>, eos: Option<&str>) {
        self.tokens.retain(|token| !matches!(token.name, "bos_token" | "eos_token"));
        let named = [("bos_token", bos), ("eos_token", eos)];
        let named = named.into_iter().filter_map(|(name, text)| Some(NamedToken { name, text: text?.to_owned() }));
        self.tokens.extend(named);
        self.capabilities = capabilities::probe(self);
    }

    /// The Jinja text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The Jinja text that is used where tools are given.
    pub fn tools_source(&self) -> &str {
        self.with_tools.as_ref().map_or(&self.source, |template| &template.source)
    }

    /// Whether a variable of templates is set by the conversation or the vocabulary alone, and by no [`ChatInput::kwargs`].
    pub fn is_reserved(name: &str) -> bool {
        prepare::is_reserved(name)
    }

    /// What the template does with tools, systems and parts, found by trying.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Renders a conversation: brings it into the form that this template takes, and marks whatever a request brought that is
    /// spelled like control tokens of `tokenizer`. Roles in an order that the template refuses are brought into one that it takes.
    pub fn render_for(&self, input: &ChatInput, tokenizer: Option<&Tokenizer>) -> Result<Rendered, TemplateError> {
        if let (Some(template), false) = (&self.with_tools, input.tools.is_empty()) {
            return template.render_for(input, tokenizer);
        }
        if input.add_generation_prompt && input.continue_final_message {
            let what = "add_generation_prompt and continue_final_message exclude each other".into();
            return Err(TemplateError::Input { what });
        }
        mended::render(input, &self.told, |input| self.rendered(input, tokenizer))
    }

    fn rendered(&self, input: &ChatInput, tokenizer: Option<&Tokenizer>) -> Result<Rendered, TemplateError> {
        let prepared = prepare::prepare(self, input, tokenizer)?;
        let mut text = self.render_values(&prepared.messages, &prepared.context)?;
        if let Some(tag) = &prepared.cut_at {
            let at = text.find(tag.as_str()).ok_or_else(|| TemplateError::Input {
                what: "the template does not show the last message, so that it cannot be continued".into(),
            })?;
            text.truncate(at);
        }
        let mut generation_prompt = String::new();
        if input.add_generation_prompt {
            let mut context = prepared.context.clone();
            context.insert("add_generation_prompt".into(), Json::Bool(false));
            // A template that wants the prompt always has no render without it.
            let without = self.render_values(&prepared.messages, &context).unwrap_or_default();
            let common = text.bytes().zip(without.bytes()).take_while(|(a, b)| a == b).count();
            let common = (0..=common).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
            generation_prompt = text[common..].to_owned();
        }
        Ok(Rendered { text, generation_prompt })
    }

    /// Renders a conversation without a vocabulary.
    pub fn render(&self, input: &ChatInput) -> Result<Rendered, TemplateError> {
        self.render_for(input, None)
    }

    /// Renders values as they are.
    pub fn render_values(
        &self,
        messages: &[Json],
        context: &serde_json::Map<String, Json>,
    ) -> Result<String, TemplateError> {
        self.render_at(messages, context, None)
    }

    /// Renders values as they are, at a time; now where it is not given.
    pub fn render_at(
        &self,
        messages: &[Json],
        context: &serde_json::Map<String, Json>,
        now: Option<jiff::civil::DateTime>,
    ) -> Result<String, TemplateError> {
        let now = now.unwrap_or_else(|| jiff::Zoned::now().datetime());
        let mut variables: Vec<(&str, Value)> = vec![
            ("messages", Value::from(Serde(messages))),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(false)),
            ("strftime_now", environment::strftime_now(now)),
            // A vocabulary that has none of them still meets templates that write them.
            ("bos_token", Value::from("")),
            ("eos_token", Value::from("")),
        ];
        for token in &self.tokens {
            variables.retain(|(known, _)| *known != token.name);
            variables.push((token.name, Value::from(token.text.as_str())));
        }
        for (name, value) in context {
            variables.retain(|(known, _)| known != name);
            variables.push((name, Value::from(Serde(value))));
        }
        let context = Value::from_pairs(variables);
        let mut out = Capped::default();
        let rendered =
            self.env.get_template("chat").and_then(|chat| chat.render_captured_to(context, &mut out).map(drop));
        rendered.map_err(render_error)?;
        Ok(String::from_utf8_lossy(&out.bytes).into_owned())
    }

    /// The tokens that end a turn: those of the vocabulary, those of known models, and the one that this template
    /// writes after what an assistant said.
    pub fn end_ids(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, TemplateError> {
        let mut ids = end_ids(tokenizer);
        ids.extend(self.turn_end(tokenizer)?);
        if self.source.contains("<|observation|>") {
            ids.extend(["<|user|>", "<|observation|>"].iter().filter_map(|text| special_id(tokenizer, text)));
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// The special token right after what an assistant said.
    fn turn_end(&self, tokenizer: &Tokenizer) -> Result<Option<u32>, TemplateError> {
        const SAID: &str = "Kiln7Said3";
        let message = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
        let messages = [message("user", "Hello"), message("assistant", SAID), message("user", "Bye")];
        let Ok(text) = self.render_values(&messages, &serde_json::Map::new()) else { return Ok(None) };
        let Some((_, after)) = text.split_once(SAID) else { return Ok(None) };
        let first = tokenizer.encode(after.trim_start(), AddSpecial::No, ParseSpecial::Yes)?.first().copied();
        let is_control = |id: &u32| tokenizer.vocab().token_types[*id as usize] == TokenType::Control;
        // A token that opens a turn as well stands only between turns; generating it ends one just the same.
        Ok(first.filter(is_control).filter(|id| Some(*id) != tokenizer.vocab().bos))
    }
}

/// The tokens that end a generation, without a template.
pub fn end_ids(tokenizer: &Tokenizer) -> Vec<u32> {
    let further = ["<|eot|>", "<|eom|>", "[e~["];
    let mut ids = tokenizer.end_ids().to_vec();
    ids.extend(further.iter().filter_map(|text| special_id(tokenizer, text)));
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// The control token that is spelled so.
fn special_id(tokenizer: &Tokenizer, text: &str) -> Option<u32> {
    let id = tokenizer.token_id(text)?;
    let kind = tokenizer.vocab().token_types[id as usize];
    matches!(kind, TokenType::Control | TokenType::UserDefined).then_some(id)
}

impl Rendered {
    /// A text of a model file with places like `{query}`, filled in.
    pub fn filled(source: &str, texts: &[(&str, &str)], tokenizer: &Tokenizer) -> Rendered {
        Rendered { text: marks::filled(source, texts, tokenizer), generation_prompt: String::new() }
    }

    /// Bytes of the text, with its marks.
    pub fn length(&self) -> usize {
        self.text.len()
    }

    /// The text without marks.
    pub fn plain(&self) -> String {
        marks::unmarked(&self.text).0
    }

    /// The tokens of the prompt. Control tokens that the template wrote become tokens, those that a request spelled stay
    /// text. BOS comes first where the vocabulary wants it, and never twice.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, TokenizerError> {
        self.encode_within(tokenizer, &EncodeLimit::default())
    }

    /// The tokens of each part of the text, which is cut wherever `between` stands, each as far as a limit lets it; BOS belongs to the
    /// first.
    pub fn encode_parts(
        &self,
        tokenizer: &Tokenizer,
        between: &str,
        limit: &EncodeLimit,
    ) -> Result<Vec<Vec<u32>>, TokenizerError> {
        let mut parts = Vec::new();
        for (nth, part) in self.text.split(between).enumerate() {
            if nth == 0 {
                let first = Rendered { text: part.to_owned(), generation_prompt: String::new() };
                parts.push(first.encode_within(tokenizer, limit)?);
                continue;
            }
            let (text, foreign) = marks::unmarked(part);
            parts.push(tokenizer.encode_with_foreign(&text, &foreign, limit)?);
        }
        Ok(parts)
    }

    /// The same, as far as a limit lets it.
    pub fn encode_within(&self, tokenizer: &Tokenizer, limit: &EncodeLimit) -> Result<Vec<u32>, TokenizerError> {
        let (text, foreign) = marks::unmarked(&self.text);
        let mut ids = tokenizer.encode_with_foreign(&text, &foreign, limit)?;
        let vocab = tokenizer.vocab();
        if let Some(bos) = vocab.bos.filter(|bos| vocab.add_bos && ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }
}

fn named_tokens(metadata: &Metadata, tokenizer: &Tokenizer) -> Result<Vec<NamedToken>, TemplateError> {
    const ROLES: [(&str, &str); 7] = [
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
        ("sep_token", "seperator"),
        ("cls_token", "cls"),
        ("mask_token", "mask"),
    ];
    let mut named = Vec::new();
    for (name, role) in ROLES {
        let id = metadata.get_i64_opt(&format!("tokenizer.ggml.{role}_token_id"))?;
        let text = id.and_then(|id| u32::try_from(id).ok()).and_then(|id| tokenizer.spelling(id));
        named.extend(text.map(|text| NamedToken { name, text: String::from_utf8_lossy(&text).into_owned() }));
    }
    Ok(named)
}

/// The innermost error says what happened; the outer ones where the call was.
fn innermost(error: &Error) -> &Error {
    let mut found = error;
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(inner) = inner.downcast_ref::<Error>() {
            found = inner;
        }
        source = inner.source();
    }
    found
}

fn describe(error: &Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => match std::error::Error::source(error) {
            Some(source) => format!("{}: {source}", error.kind()),
            None => error.kind().to_string(),
        },
    }
}

fn render_error(error: Error) -> TemplateError {
    let inner = innermost(&error);
    let line = inner.line().or(error.line()).unwrap_or(0);
    if let Some(message) = inner.detail().and_then(|detail| detail.strip_prefix(RAISED)) {
        return TemplateError::Raised { line, message: message.to_owned() };
    }
    match inner.kind() {
        ErrorKind::OutOfFuel => TemplateError::OutOfFuel { line },
        _ => TemplateError::Render { line, what: describe(inner) },
    }
}

#[cfg(test)]
mod tests;
