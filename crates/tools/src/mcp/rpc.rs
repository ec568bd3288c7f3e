//! JSON-RPC, as MCP speaks it: what a message is, and what goes wrong.

use kiln_system::text::shown;
use serde_json::{Value, json};

/// Why a server did not answer as it should. Each is told behind the server's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    #[error("sent more than {0} bytes, which is all that is read; the rest is cut and the call given up")]
    TooMuch(usize),
    #[error("did not answer in time; the call is given up")]
    Late,
    #[error("was not waited for any longer")]
    Cancelled,
    #[error("{0}")]
    Gone(String),
    #[error("broke the protocol: {0}")]
    Wrong(String),
    #[error("refused: {0}")]
    Refused(String),
}

/// What came of a request.
pub(crate) type Answer = Result<Value, Failure>;

pub(crate) fn request(id: u64, method: &str, params: &Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
}

pub(crate) fn notification(method: &str, params: &Value) -> Value {
    json!({"jsonrpc": "2.0", "method": method, "params": params})
}

/// A message of a server.
#[derive(Debug, PartialEq)]
pub(crate) enum Incoming {
    /// The answer to a request.
    Answer(u64, Answer),
    /// It asks something; this is what it is told.
    Asked(Value),
    /// Its tools are others now.
    ToolsChanged,
    /// Progress, log lines, and what else nobody reads.
    Other,
}

/// Understands a message.
pub(crate) fn incoming(value: &Value) -> Incoming {
    let method = value.get("method").and_then(Value::as_str);
    match (value.get("id").filter(|id| !id.is_null()), method) {
        (Some(id), Some(method)) => Incoming::Asked(match method {
            "ping" => json!({"jsonrpc": "2.0", "id": id, "result": {}}),
            // Nothing was offered that it could ask for: no model, no person, no files.
            _ => json!({"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "not offered"}}),
        }),
        (None, Some("notifications/tools/list_changed")) => Incoming::ToolsChanged,
        (Some(id), None) => match (id.as_u64(), value.get("result"), value.get("error")) {
            (Some(id), _, Some(error)) if !error.is_null() => Incoming::Answer(id, Err(Failure::Refused(told(error)))),
            (Some(id), Some(result), _) => Incoming::Answer(id, Ok(result.clone())),
            (Some(id), None, _) => Incoming::Answer(id, Err(Failure::Wrong("an answer without a result".to_owned()))),
            (None, ..) => Incoming::Other,
        },
        _ => Incoming::Other,
    }
}

/// What an error says.
fn told(error: &Value) -> String {
    let message = error.get("message").and_then(Value::as_str).unwrap_or("no reason given");
    match error.get("code").and_then(Value::as_i64) {
        Some(code) => format!("{} ({code})", shown(message)),
        None => shown(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_told_apart() {
        let read = |value: Value| incoming(&value);
        assert_eq!(read(json!({"id": 1, "result": {"a": 1}})), Incoming::Answer(1, Ok(json!({"a": 1}))));
        let refused = read(json!({"id": 2, "error": {"code": -5, "message": "no\u{1b}[2J"}}));
        assert_eq!(refused, Incoming::Answer(2, Err(Failure::Refused("no\\u{1b}[2J (-5)".into()))));
        let Incoming::Asked(told) = read(json!({"id": "p", "method": "ping"})) else { panic!("asked") };
        assert_eq!(told, json!({"jsonrpc": "2.0", "id": "p", "result": {}}));
        let Incoming::Asked(told) = read(json!({"id": 1, "method": "sampling/createMessage"})) else { panic!("asked") };
        assert_eq!(told["error"]["code"], -32601, "a server gets no model");
        assert_eq!(read(json!({"method": "notifications/tools/list_changed"})), Incoming::ToolsChanged);
        for odd in [json!({"id": "x", "result": 1}), json!([]), json!(7), json!({"method": "log"}), json!({"id": null})]
        {
            assert_eq!(read(odd), Incoming::Other);
        }
        assert!(matches!(read(json!({"id": 3})), Incoming::Answer(3, Err(Failure::Wrong(_)))));
    }
}
