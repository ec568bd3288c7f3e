//! What a server has beside models: tools, listed and called for those who may, and called for a model by the Responses API; and the
//! conversations of the page.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod client;

use std::sync::Arc;
use std::time::Duration;

use client::*;
use kiln_server::{Key, Running, Settings};
use kiln_tools::{Limits, ServerSpec, Setup, Toolbox};
use serde_json::{Value, json};

/// Shows tools, calls and what they gave.
const TEMPLATE: &str = "{# <tool_call> #}{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }}\n{% endfor %}<|im_end|>\n{% endif %}\
    {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }} \
    {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn toolbox(behaviours: &[&str]) -> Arc<Toolbox> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tools/tests/hostile_server.py");
    let spec = |name: &&str| ServerSpec::parse(&format!("{name}=python3 '{script}' {name}")).unwrap().remove(0);
    let limits = Limits { turns: 2, call_time: Duration::from_secs(20), received: 1 << 20, ..Limits::default() };
    let servers = behaviours.iter().map(spec).collect();
    Arc::new(Toolbox::new(Setup { servers, calculator: true, limits, ..Setup::default() }).unwrap())
}

fn start_tools(behaviours: &[&str], settings: Settings) -> Running {
    start_with(Settings { tools: Some(toolbox(behaviours)), ..settings }, Some(TEMPLATE))
}

fn call(server: &Running, body: &Value) -> Reply {
    post(server, "/tools/call", body)
}

fn get(server: &Running, path: &str, headers: &[(&str, &str)]) -> Reply {
    receive(send(server.address(), "GET", path, headers, ""))
}

#[test]
fn tools_are_listed_and_called() {
    let server = start_tools(&["good"], settings());
    let list = get(&server, "/tools", &[]).json();
    let names: Vec<&str> = list["data"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert_eq!(names[..2], ["calculator", "good__echo"]);
    assert_eq!((&list["data"][0]["approval"], &list["data"][1]["approval"]), (&json!("always"), &json!("ask")));
    assert_eq!(list["limits"]["turns"], 2);
    let sum = call(&server, &json!({"name": "calculator", "arguments": {"expression": "6*7"}})).json();
    assert_eq!((&sum["text"], &sum["is_error"]), (&json!("42"), &json!(false)));
    let seen = &list["data"][1]["fingerprint"];
    let said = json!({"name": "good__echo", "arguments": "{\"text\": \"a\"}", "fingerprint": seen});
    assert_eq!(call(&server, &said).json()["content"], json!([{"type": "text", "text": "a"}]));
    let picture = call(&server, &json!({"name": "good__picture"})).json();
    assert_eq!(picture["content"][0]["type"], "picture");
    for (wrong, param) in [
        (json!({"name": "no"}), "name"),
        (json!({}), "name"),
        (json!({"name": "good__echo", "fingerprint": "00"}), "fingerprint"),
    ] {
        let reply = call(&server, &wrong);
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)), "{}", reply.body);
    }
    let broken = call(&server, &json!({"name": "good__fail"})).json();
    assert_eq!((&broken["text"], &broken["is_error"]), (&json!("Error:\nit broke"), &json!(true)));
    server.stop().unwrap();
    let none = start();
    assert_eq!(get(&none, "/tools", &[]).json()["data"], json!([]));
    assert_eq!(call(&none, &json!({"name": "calculator"})).status, 501);
    none.stop().unwrap();
}

#[test]
fn only_own_pages_and_holders_of_keys_call_tools() {
    let server = start_tools(&[], settings());
    let own = format!("http://{}", server.address());
    let body = json!({"name": "calculator", "arguments": {"expression": "1"}}).to_string();
    let from =
        |origin: &str| receive(send(server.address(), "POST", "/tools/call", &[("Origin", origin)], &body)).status;
    assert_eq!((from(&own), from("http://localhost:3000"), from("https://evil.example")), (200, 403, 403));
    let foreign = [("Origin", "http://localhost:3000")];
    assert_eq!(get(&server, "/tools", &foreign).status, 403);
    assert_eq!(get(&server, "/v1/models", &foreign).status, 200, "models are for pages of this machine, tools are not");
    server.stop().unwrap();
    let key = Key { name: "a".into(), secret: "s".into(), ..Key::default() };
    let server = start_tools(&[], Settings { keys: vec![key], ..settings() });
    assert_eq!(get(&server, "/tools", &[]).status, 401);
    assert_eq!(get(&server, "/tools", &[("Authorization", "Bearer s")]).status, 200);
    server.stop().unwrap();
}

/// A request in which the model, which knows nothing, must call a tool that it can.
fn respond(server: &Running, tool: &Value, more: Value) -> Reply {
    let base = json!({
        "input": "How hot is it?", "tools": [tool], "tool_choice": {"type": "function", "name": "good__heat"},
        "max_output_tokens": 200, "temperature": 0, "parallel_tool_calls": false,
    });
    post(server, "/v1/responses", &with(base, more))
}

fn kinds(response: &Value) -> Vec<&str> {
    response["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect()
}

#[test]
fn a_model_calls_tools_and_goes_on() {
    let server = start_tools(&["good"], settings());
    let tool = json!({"type": "mcp", "server_label": "good", "require_approval": "never", "allowed_tools": ["heat"]});
    let reply = respond(&server, &tool, json!({}));
    assert_eq!(reply.status, 200, "{}", reply.body);
    let whole = reply.json();
    assert_eq!(kinds(&whole)[..2], ["mcp_list_tools", "mcp_call"], "{whole}");
    assert_eq!(whole["output"][0]["tools"].as_array().unwrap().len(), 1);
    let made = &whole["output"][1];
    assert_eq!(
        (&made["server_label"], &made["name"], &made["status"]),
        (&json!("good"), &json!("heat"), &json!("completed"))
    );
    assert!(made["output"].as_str().unwrap().starts_with("1300 "), "{made}");
    assert!(kinds(&whole).contains(&"message"), "{whole}");
    assert!(whole["usage"]["output_tokens"].as_u64().unwrap() <= 200, "the limit is for all answers together");
    // The same as a stream.
    let reply = respond(&server, &tool, json!({"stream": true}));
    let events = reply.events();
    let types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let order = [
        "response.created",
        "response.mcp_list_tools.completed",
        "response.mcp_call_arguments.done",
        "response.mcp_call.in_progress",
        "response.mcp_call.completed",
        "response.output_text.done",
    ];
    let places: Vec<usize> = order
        .iter()
        .map(|wanted| types.iter().position(|kind| kind == wanted).unwrap_or_else(|| panic!("{wanted}: {types:?}")))
        .collect();
    assert!(places.is_sorted(), "{types:?}");
    assert!(events.iter().enumerate().all(|(i, event)| event["sequence_number"] == json!(i)));
    let last = &events.last().unwrap()["response"];
    assert_eq!(kinds(last), kinds(&whole));
    let done = types.iter().filter(|kind| **kind == "response.output_item.done").count();
    assert_eq!(done, last["output"].as_array().unwrap().len());
    // What was said and called is part of the next request; the tools are not listed again.
    let next = respond(
        &server,
        &tool,
        json!({"previous_response_id": whole["id"], "tool_choice": "none", "max_output_tokens": 8}),
    );
    assert_eq!(kinds(&next.json()), ["message"], "{}", next.body);
    server.stop().unwrap();
}

#[test]
fn calls_wait_for_the_client_where_it_wants_to_be_asked() {
    let server = start_tools(&["good"], settings());
    let tool = json!({"type": "mcp", "server_label": "good", "allowed_tools": ["heat"]});
    let first = respond(&server, &tool, json!({})).json();
    assert_eq!(kinds(&first), ["mcp_list_tools", "mcp_approval_request"], "{first}");
    let asked = &first["output"][1];
    assert_eq!((&asked["name"], &first["status"]), (&json!("heat"), &json!("completed")));
    let answer = |approve: bool| {
        json!({"previous_response_id": first["id"], "tool_choice": "none", "max_output_tokens": 8,
            "input": [{"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": approve}]})
    };
    let made = respond(&server, &tool, answer(true)).json();
    assert_eq!(kinds(&made), ["mcp_call", "message"], "{made}");
    assert_eq!(made["output"][0]["approval_request_id"], asked["id"]);
    assert!(made["output"][0]["output"].as_str().unwrap().starts_with("1300 "));
    let refused = respond(&server, &tool, answer(false)).json();
    assert_eq!(kinds(&refused), ["message"], "{refused}");
    // What was called stays called: nothing is made twice when the conversation goes on.
    let third =
        json!({"previous_response_id": made["id"], "input": "And now?", "tool_choice": "none", "max_output_tokens": 8});
    assert_eq!(kinds(&respond(&server, &tool, third).json()), ["message"]);
    server.stop().unwrap();
}

#[test]
fn what_cannot_be_offered_is_refused_and_hostile_servers_are_survived() {
    let server = start_tools(&["good", "huge"], settings());
    let ask = |tool: Value, more: Value| respond(&server, &tool, more);
    for (tool, param) in [
        (json!({"type": "mcp", "server_label": "other"}), "tools[0].server_label"),
        (json!({"type": "mcp"}), "tools[0].server_label"),
        (json!({"type": "mcp", "server_label": "good", "server_url": "http://127.0.0.1:1/"}), "tools[0].server_url"),
        (json!({"type": "mcp", "server_label": "good", "headers": {"a": "b"}}), "tools[0].headers"),
        (json!({"type": "mcp", "server_label": "good", "require_approval": 7}), "tools[0].require_approval"),
    ] {
        let reply = ask(tool, json!({}));
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)), "{}", reply.body);
    }
    let huge = json!({"type": "mcp", "server_label": "huge", "require_approval": "never", "allowed_tools": ["heat"]});
    let reply = ask(huge, json!({"tool_choice": {"type": "function", "name": "huge__heat"}})).json();
    let made = &reply["output"][1];
    assert_eq!(made["status"], "failed", "{reply}");
    assert!(made["error"].as_str().unwrap().contains("sent more than 1048576 bytes"), "{made}");
    assert!(kinds(&reply).contains(&"message"), "the model goes on: {reply}");
    let function = json!({"type": "function", "name": "good__heat", "parameters": {"type": "object"}});
    let both = json!([{"type": "mcp", "server_label": "good"}, function]);
    assert_eq!(ask(json!(null), json!({"tools": both})).status, 400, "two tools of one name");
    server.stop().unwrap();
}

#[test]
fn conversations_are_kept_for_a_key_and_for_no_other() {
    let folder = std::env::temp_dir().join(format!("kiln-conversations-of-{}", std::process::id()));
    let key = |name: &str| Key { name: name.into(), secret: format!("secret of {name}"), ..Key::default() };
    let with_folder =
        || Settings { keys: vec![key("alice"), key("bob")], conversations: Some(folder.clone()), ..settings() };
    let ask = |server: &Running, method: &str, path: &str, name: &str, body: &str| {
        let key = format!("Bearer secret of {name}");
        receive(send(server.address(), method, path, &[("Authorization", &key)], body))
    };
    let talk = json!({"id": "a b", "title": "Clay", "changed": 7, "nodes": {"n": {"content": "wet"}}});
    let server = start_with(with_folder(), Some(TEMPLATE));
    assert_eq!(ask(&server, "GET", "/conversations", "eve", "").status, 401);
    let kept = ask(&server, "PUT", "/conversations/a%20b", "alice", &talk.to_string());
    assert_eq!((kept.status, kept.json()), (200, json!({"kept": true})), "{}", kept.body);
    let list = ask(&server, "GET", "/conversations", "alice", "").json();
    assert_eq!((&list["kept"], &list["data"][0]["title"]), (&json!(true), &json!("Clay")));
    assert_eq!(ask(&server, "GET", "/conversations/a%20b", "bob", "").status, 404);
    assert_eq!(ask(&server, "GET", "/conversations", "bob", "").json()["data"], json!([]));
    assert_ne!(list["folder"], ask(&server, "GET", "/conversations", "bob", "").json()["folder"]);
    let foreign = [("Authorization", "Bearer secret of alice"), ("Origin", "http://localhost:3000")];
    assert_eq!(get(&server, "/conversations", &foreign).status, 403, "a page of another origin reads nothing");
    server.stop().unwrap();
    // Another server of the same folder finds them.
    let server = start_with(with_folder(), Some(TEMPLATE));
    assert_eq!(ask(&server, "GET", "/conversations/a%20b", "alice", "").json(), talk);
    assert_eq!(ask(&server, "DELETE", "/conversations/a%20b", "alice", "").json(), json!({"deleted": true}));
    assert_eq!(ask(&server, "GET", "/conversations/a%20b", "alice", "").status, 404);
    server.stop().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let none = start();
    assert_eq!(get(&none, "/conversations", &[]).json()["kept"], false);
    assert_eq!(get(&none, "/conversations/x", &[]).status, 501);
    none.stop().unwrap();
}
