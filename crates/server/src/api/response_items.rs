//! Items of the Responses API as messages of a conversation: words, thoughts, calls and what they gave.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kiln_engine::text::{Content, Function, Message, ToolCall};
use serde_json::Value;

use crate::api_error::ApiError;
use crate::chat;
use crate::media;

/// An item of the input. Thoughts, words and calls that follow each other are one message.
pub(crate) fn item(index: usize, value: &Value, out: &mut Vec<Message>) -> Result<(), ApiError> {
    let param = format!("input[{index}]");
    let text = |field: &str| {
        let text = value.get(field).and_then(Value::as_str).map(str::to_owned);
        text.ok_or_else(|| ApiError::invalid(format!("{param}.{field}"), format!("`{param}.{field}` must be a string")))
    };
    let kind = value.get("type").and_then(Value::as_str);
    match kind {
        None | Some("message") => {
            let role = text("role")?;
            let content = chat::content(&format!("{param}.content"), value.get("content"))?;
            if role == "assistant" {
                let last = assistant(out, |m| m.content == Content::None && m.tool_calls.is_empty());
                last.content = content;
            } else if ["user", "system", "developer"].contains(&role.as_str()) {
                out.push(Message { role, content, ..Message::default() });
            } else {
                let message = format!("`{param}.role` is {role:?}; it must be user, assistant, system or developer");
                return Err(ApiError::invalid(format!("{param}.role"), message));
            }
        }
        Some("reasoning") => {
            let parts = value.get("content").and_then(Value::as_array).into_iter().flatten();
            let texts: Vec<&str> = parts.filter_map(|part| part.get("text").and_then(Value::as_str)).collect();
            // Clients that keep nothing send back what they were given in the place of the text.
            let sealed = value.get("encrypted_content").and_then(Value::as_str).filter(|_| texts.is_empty());
            // What another server has sealed is lost, as it would be there.
            let text = sealed.map_or_else(|| texts.join("\n"), |sealed| unsealed(sealed).unwrap_or_default());
            assistant(out, |m| m.content == Content::None && m.tool_calls.is_empty()).reasoning_content =
                Some(text).filter(|text| !text.is_empty());
        }
        Some("function_call") => {
            let (id, name) = (text("call_id")?, text("name")?);
            let arguments = value.get("arguments").cloned().unwrap_or(Value::Null);
            let function = Function { name, arguments };
            let call = ToolCall { id: Some(id), kind: "function".into(), function };
            assistant(out, |_| true).tool_calls.push(call);
        }
        Some("function_call_output") => {
            let output = chat::content(&format!("{param}.output"), value.get("output"))?;
            let content = if media::are_in(&output) { output } else { output.to_text().into() };
            out.push(Message { tool_call_id: Some(text("call_id")?), content, ..Message::new("tool", "") });
        }
        // The tools are asked for anew.
        Some("mcp_list_tools") => {}
        Some("mcp_approval_request") => {
            let call = server_call(&param, value, &text("id")?)?;
            assistant(out, |_| true).tool_calls.push(call);
        }
        Some("mcp_approval_response") => {
            let id = text("approval_request_id")?;
            let asked = out.iter().flat_map(|m| &m.tool_calls).any(|call| call.id.as_deref() == Some(&id));
            if !asked {
                let message =
                    format!("`{param}` answers {id:?}, which is no mcp_approval_request of this conversation");
                return Err(ApiError::invalid(format!("{param}.approval_request_id"), message));
            }
            let content = match value.get("approve").and_then(Value::as_bool) {
                // It is made before the model goes on, and has no result until then.
                Some(true) => Content::None,
                Some(false) => match value.get("reason").and_then(Value::as_str).filter(|reason| !reason.is_empty()) {
                    Some(reason) => format!("Error:\n{REFUSED}: {reason}").into(),
                    None => format!("Error:\n{REFUSED}").into(),
                },
                None => return Err(ApiError::invalid(format!("{param}.approve"), "`approve` must be true or false")),
            };
            out.push(Message { tool_call_id: Some(id), content, ..Message::new("tool", "") });
        }
        Some("mcp_call") => server_result(&param, value, out)?,
        Some(other) => {
            return Err(ApiError::unsupported(
                format!("{param}.type"),
                format!("`{param}` is of type {other:?}, which is not served"),
            ));
        }
    }
    Ok(())
}

/// What begins reasoning that a client carries for the server.
const SEAL: &[u8] = b"kiln1:";

/// Reasoning as clients carry it to the next request without looking at it. It is theirs: nothing in it is secret.
pub(crate) fn sealed(text: &str) -> String {
    STANDARD.encode([SEAL, text.as_bytes()].concat())
}

fn unsealed(text: &str) -> Option<String> {
    let bytes = STANDARD.decode(text).ok()?;
    String::from_utf8(bytes.strip_prefix(SEAL)?.to_vec()).ok()
}

/// The assistant's message at the end, if it can take more, else a new one.
fn assistant(out: &mut Vec<Message>, takes: impl Fn(&Message) -> bool) -> &mut Message {
    if !out.last().is_some_and(|m| m.role == "assistant" && takes(m)) {
        out.push(Message { role: "assistant".into(), ..Message::default() });
    }
    let last = out.len() - 1;
    &mut out[last]
}

/// What the model is told of a call that a person did not allow.
pub(crate) const REFUSED: &str = "the user does not allow this call";

/// A call of a server's tool, as the model made it.
fn server_call(param: &str, value: &Value, id: &str) -> Result<ToolCall, ApiError> {
    let text = |field: &str| {
        let text = value.get(field).and_then(Value::as_str);
        text.ok_or_else(|| ApiError::invalid(format!("{param}.{field}"), format!("`{param}.{field}` must be a string")))
    };
    let name = kiln_tools::offered_name(label_to_server(text("server_label")?), text("name")?);
    let function = Function { name, arguments: value.get("arguments").cloned().unwrap_or(Value::Null) };
    Ok(ToolCall { id: Some(id.to_owned()), kind: "function".into(), function })
}

/// A call of a server's tool and what it gave.
fn server_result(param: &str, value: &Value, out: &mut Vec<Message>) -> Result<(), ApiError> {
    let text = |field: &str| value.get(field).and_then(Value::as_str);
    let id = text("approval_request_id").or(text("id")).unwrap_or("mcp");
    let output = text("output").or(text("error")).unwrap_or("(no result)").to_owned();
    // One that a person allowed has its place already.
    let is_place =
        |m: &&mut Message| m.role == "tool" && m.content == Content::None && m.tool_call_id.as_deref() == Some(id);
    if let Some(place) = out.iter_mut().find(is_place) {
        place.content = output.into();
        return Ok(());
    }
    let call = server_call(param, value, id)?;
    assistant(out, |_| true).tool_calls.push(call);
    out.push(Message { tool_call_id: Some(id.to_owned()), ..Message::new("tool", output) });
    Ok(())
}

/// What clients call the tools that are Kiln's own.
pub(crate) const OWN_LABEL: &str = "kiln";

/// The server that a label names.
pub(crate) fn label_to_server(label: &str) -> &str {
    if label == OWN_LABEL { "" } else { label }
}

/// The label of a server.
pub(crate) fn server_to_label(server: &str) -> &str {
    if server.is_empty() { OWN_LABEL } else { server }
}

/// Calls that were allowed since the model made them, and have no result yet.
pub(crate) fn allowed_calls(messages: &[Message]) -> Vec<kiln_tools::Call> {
    let waits = |m: &&Message| m.role == "tool" && m.content == Content::None;
    let ids: Vec<&str> = messages.iter().filter(waits).filter_map(|m| m.tool_call_id.as_deref()).collect();
    let calls = messages.iter().flat_map(|m| &m.tool_calls);
    let is_allowed = |call: &&ToolCall| call.id.as_deref().is_some_and(|id| ids.contains(&id));
    let made = |call: &ToolCall| kiln_tools::Call {
        id: call.id.clone().unwrap_or_default(),
        name: call.function.name.clone(),
        arguments: match &call.function.arguments {
            Value::String(text) => text.clone(),
            Value::Null => String::new(),
            other => other.to_string(),
        },
    };
    calls.filter(is_allowed).map(made).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn thoughts_words_and_calls_become_one_message() {
        let items = json!([
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ]);
        let mut messages = Vec::new();
        for (i, value) in items.as_array().into_iter().flatten().enumerate() {
            item(i, value, &mut messages).expect("it is sound");
        }
        assert_eq!(messages.iter().map(|m| m.role.as_str()).collect::<Vec<_>>(), ["user", "assistant", "tool"]);
        assert_eq!(messages[1].reasoning_content.as_deref(), Some("hm"));
        assert_eq!(messages[1].tool_calls.len(), 2);
        assert!(item(7, &json!({"type": "item_reference"}), &mut messages).is_err());
        // Reasoning that the client carried, and some that it has from elsewhere.
        let carried = json!({"type": "reasoning", "summary": [], "encrypted_content": sealed("I know")});
        item(8, &carried, &mut messages).expect("it is sound");
        assert_eq!(messages.last().and_then(|m| m.reasoning_content.as_deref()), Some("I know"));
        let foreign = json!({"type": "reasoning", "summary": [], "encrypted_content": "Zm9yZWlnbg=="});
        item(9, &foreign, &mut messages).expect("it is another server's");
        assert_eq!(messages.last().and_then(|m| m.reasoning_content.as_deref()), None);
    }

    #[test]
    fn calls_of_servers_and_what_they_gave_are_part_of_the_conversation() {
        let read = |items: Value| {
            let mut messages = Vec::new();
            let done: Result<Vec<()>, ApiError> = items
                .as_array()
                .into_iter()
                .flatten()
                .enumerate()
                .map(|(i, value)| item(i, value, &mut messages))
                .collect();
            done.map(|_| messages)
        };
        let request = json!({"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "files", "name": "read",
            "arguments": "{\"path\": \"a\"}"});
        let answer = |approve: bool| json!({"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": approve});
        let allowed = read(json!([{"role": "user", "content": "Hi"}, request, answer(true)])).expect("it is sound");
        let waiting = allowed_calls(&allowed);
        assert_eq!((waiting[0].name.as_str(), waiting[0].arguments.as_str()), ("files__read", "{\"path\": \"a\"}"));
        assert_eq!(allowed[2].content, Content::None);
        let made = json!({"type": "mcp_call", "id": "mcp_2", "approval_request_id": "mcpr_1", "server_label": "files",
            "name": "read", "arguments": "{}", "output": "inside"});
        let known = read(json!([request, answer(true), made])).expect("it is sound");
        assert_eq!((known.len(), known[1].content.to_text().as_str()), (2, "inside"));
        assert!(allowed_calls(&known).is_empty());
        let refused = read(json!([request, answer(false)])).expect("it is sound");
        assert!(refused[1].content.to_text().contains(REFUSED) && allowed_calls(&refused).is_empty());
        assert!(read(json!([answer(true)])).is_err(), "nothing was asked");
        let own =
            json!({"type": "mcp_call", "id": "mcp_3", "server_label": "kiln", "name": "calculator", "output": "42"});
        let own = read(json!([own])).expect("it is sound");
        assert_eq!(
            (own[0].tool_calls[0].function.name.as_str(), own[1].content.to_text().as_str()),
            ("calculator", "42")
        );
    }
}
