//! Brings a conversation into the form that a template takes: parts to text, arguments to objects, a system message to
//! the first user where there is no other place. Every string of it that a request brought is marked (`marks`).

use serde_json::{Map, Value as Json, json};

use super::marks::{Marker, PLACE};
use super::{ChatInput, Content, Message, Template, TemplateError, ToolCall, environment};
use crate::text::reasoning::Markers;
use crate::tokenizer::Tokenizer;

/// Variables of templates that the conversation and the vocabulary set. A request that set them itself could put anything into a prompt.
const RESERVED: [&str; 16] = [
    "messages",
    "tools",
    "functions",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "strftime_now",
    "raise_exception",
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
];

pub(super) fn is_reserved(name: &str) -> bool {
    RESERVED.contains(&name)
}

/// A conversation that a template takes.
pub(super) struct Prepared {
    pub(super) messages: Vec<Json>,
    pub(super) context: Map<String, Json>,
    /// Where the text is cut off.
    pub(super) cut_at: Option<String>,
}

pub(super) fn prepare(
    template: &Template,
    input: &ChatInput,
    tokenizer: Option<&Tokenizer>,
) -> Result<Prepared, TemplateError> {
    if input.messages.is_empty() {
        return Err(TemplateError::Input { what: "the conversation has no messages".into() });
    }
    let marker = Marker::new(tokenizer);
    let system_moves = !template.capabilities.system;
    let mut messages: Vec<Json> = Vec::with_capacity(input.messages.len());
    let mut system = String::new();
    for (index, message) in input.messages.iter().enumerate() {
        let role = match message.role.as_str() {
            "developer" if !template.source.contains("<|channel|>") => "system",
            "function" => "tool",
            role => role,
        };
        if role == "system" && system_moves {
            let text = marker.mark(&message.content.to_text());
            system = if system.is_empty() { text } else { format!("{system}\n\n{text}") };
            continue;
        }
        let mut value = message_value(template, input, index, role, marker)?;
        if role == "user" && !system.is_empty() {
            put_before(&mut value["content"], &std::mem::take(&mut system));
        }
        messages.push(value);
    }
    if !system.is_empty() {
        messages.insert(0, json!({"role": "user", "content": system}));
    }
    let cut_at = match input.continue_final_message {
        true => Some(put_cut(&mut messages)?),
        false => None,
    };
    Ok(Prepared { messages, context: context(template, input, marker)?, cut_at })
}

/// The variables beside the messages.
fn context(template: &Template, input: &ChatInput, marker: Marker<'_>) -> Result<Map<String, Json>, TemplateError> {
    let mut context = Map::new();
    let tools: Json = input.tools.iter().map(|tool| marker.mark_json(tool)).collect();
    // Firefunction's template puts the tools in as a text of its own.
    if template.source.contains("functools") {
        let text = if input.tools.is_empty() { String::new() } else { format!("{tools:#}") };
        context.insert("functions".into(), Json::String(text));
    }
    if !input.tools.is_empty() {
        context.insert("tools".into(), tools);
    }
    context.insert("add_generation_prompt".into(), Json::Bool(input.add_generation_prompt));
    let now = input.now.unwrap_or_else(|| jiff::Zoned::now().datetime());
    for (name, format) in [("date_string", "%d %b %Y"), ("datetime", "%b %d %Y")] {
        let text = environment::strftime(now, format).map_err(super::render_error)?;
        context.insert(name.into(), Json::String(text));
    }
    for (name, value) in &input.kwargs {
        if is_reserved(name) {
            return Err(TemplateError::Reserved { name: name.clone() });
        }
        context.insert(name.clone(), marker.mark_json(value));
    }
    Ok(context)
}

fn message_value(
    template: &Template,
    input: &ChatInput,
    index: usize,
    role: &str,
    marker: Marker<'_>,
) -> Result<Json, TemplateError> {
    let message = &input.messages[index];
    // Templates look for marks of reasoning in what the assistant said.
    let own = role == "assistant";
    let markers = Markers::of_template(&template.source).filter(|_| own);
    let said = markers.map_or(marker, |markers| marker.except([markers.open, markers.close].map(str::trim)));
    let mut value = Map::new();
    value.insert("role".into(), marker.mark(role).into());
    let mut content = content_value(template, &message.content, said);
    if !message.tool_calls.is_empty() && !template.capabilities.tool_calls {
        put_calls(&mut content, &message.tool_calls, marker);
    }
    value.insert("content".into(), content);
    if let Some(reasoning) = message.reasoning_content.as_deref().filter(|_| own) {
        // Templates know it by one of these names.
        value.insert("reasoning_content".into(), said.mark(reasoning).into());
        value.insert("thinking".into(), said.mark(reasoning).into());
    }
    if !message.tool_calls.is_empty() && template.capabilities.tool_calls {
        let calls =
            message.tool_calls.iter().enumerate().map(|(call, found)| call_value(template, index, call, found, marker));
        value.insert("tool_calls".into(), Json::Array(calls.collect::<Result<_, _>>()?));
        // Harmony shows either thoughts or content before a call.
        if template.source.contains("<|channel|>") && message.reasoning_content.is_some() {
            value.insert("content".into(), "".into());
        }
    }
    if let Some(id) = &message.tool_call_id {
        value.insert("tool_call_id".into(), marker.mark(&call_id(template, id)).into());
    }
    if let Some(name) = message.name.clone().or_else(|| called_name(input, index)) {
        value.insert("name".into(), marker.mark(&name).into());
    }
    Ok(Json::Object(value))
}

fn content_value(template: &Template, content: &Content, marker: Marker<'_>) -> Json {
    let text = |text: &str| marker.mark(text);
    match content {
        Content::None => "".into(),
        Content::Text(whole) if template.capabilities.text_content || !template.capabilities.part_content => {
            text(whole).into()
        }
        Content::Text(whole) => json!([{"type": "text", "text": text(whole)}]),
        Content::Parts(parts) if template.capabilities.part_content => {
            Json::Array(parts.iter().map(|part| marker.mark_json(part)).collect())
        }
        Content::Parts(_) => text(&content.to_text()).into(),
    }
}

/// A template that leaves out earlier calls gets them as text; most models know this form.
fn put_calls(content: &mut Json, calls: &[ToolCall], marker: Marker<'_>) {
    for call in calls {
        let arguments = match &call.function.arguments {
            Json::String(text) => serde_json::from_str(text).unwrap_or_else(|_| Json::String(text.clone())),
            other => other.clone(),
        };
        let object = marker.mark_json(&json!({"name": call.function.name, "arguments": arguments}));
        let text = format!("<tool_call>\n{object}\n</tool_call>");
        let joined = match content.as_str() {
            Some("") | None => text,
            Some(before) => format!("{before}\n{text}"),
        };
        *content = Json::String(joined);
    }
}

fn call_value(
    template: &Template,
    index: usize,
    call: usize,
    found: &ToolCall,
    marker: Marker<'_>,
) -> Result<Json, TemplateError> {
    let wrong = |why: String| TemplateError::Arguments { index, call, why };
    let arguments = match &found.function.arguments {
        Json::String(text) if text.trim().is_empty() => json!({}),
        Json::String(text) => serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?,
        Json::Null => json!({}),
        other => other.clone(),
    };
    if !arguments.is_object() {
        return Err(wrong(format!("it is {arguments}")));
    }
    let arguments = marker.mark_json(&arguments);
    let arguments = match template.capabilities.string_arguments {
        true => Json::String(arguments.to_string()),
        false => arguments,
    };
    let mut value = Map::new();
    if let Some(id) = &found.id {
        value.insert("id".into(), marker.mark(&call_id(template, id)).into());
    }
    value.insert("type".into(), "function".into());
    value.insert("function".into(), json!({"name": marker.mark(&found.function.name), "arguments": arguments}));
    Ok(Json::Object(value))
}

/// Mistral's templates take ids of nine letters and digits only; others are mapped, alike in calls and answers.
fn call_id(template: &Template, id: &str) -> String {
    let fits = id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if fits || !template.source.contains("[TOOL_CALLS]") {
        return id.to_owned();
    }
    // FNV-1a, written in base 36.
    let mut hash =
        id.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let digits = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let digit = |_| {
        let digit = digits[(hash % 36) as usize];
        hash /= 36;
        char::from(digit)
    };
    (0..9).map(digit).collect()
}

/// The name of the tool that a message answers for.
fn called_name(input: &ChatInput, index: usize) -> Option<String> {
    let message = &input.messages[index];
    let id = message.tool_call_id.as_ref().filter(|_| matches!(message.role.as_str(), "tool" | "function"))?;
    let calls = input.messages[..index].iter().rev().flat_map(|message: &Message| &message.tool_calls);
    calls.into_iter().find(|call| call.id.as_ref() == Some(id)).map(|call| call.function.name.clone())
}

fn put_before(content: &mut Json, text: &str) {
    match content {
        Json::Array(parts) => parts.insert(0, json!({"type": "text", "text": text})),
        other => {
            let rest = other.as_str().unwrap_or_default();
            *other = Json::String(if rest.is_empty() { text.to_owned() } else { format!("{text}\n\n{rest}") });
        }
    }
}

/// Marks the end of the last message.
fn put_cut(messages: &mut [Json]) -> Result<String, TemplateError> {
    let content = messages.last_mut().and_then(|message| message.get_mut("content"));
    let text = content.and_then(|content| match content {
        Json::Array(parts) => parts.last_mut().and_then(|part| part.get_mut("text")),
        other => Some(other),
    });
    let Some(Json::String(text)) = text else {
        return Err(TemplateError::Input { what: "the last message has no text to continue".into() });
    };
    let cut = format!("{PLACE}cut{PLACE}");
    text.push_str(&cut);
    Ok(cut)
}
