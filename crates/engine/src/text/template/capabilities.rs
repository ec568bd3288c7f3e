//! What a template can do, found by rendering small conversations and looking for what was put in.

use serde_json::{Map, Value as Json, json};

use super::Template;

/// What a template does with the parts of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// It shows what a `system` message says.
    pub system: bool,
    /// It shows a content that is a text.
    pub text_content: bool,
    /// It shows the texts of a content that is a list of parts.
    pub part_content: bool,
    /// It shows the tools.
    pub tools: bool,
    /// It shows earlier tool calls; `false` where it leaves them out.
    pub tool_calls: bool,
    /// It wants arguments as a text and not as an object.
    pub string_arguments: bool,
    /// It shows several calls of one message.
    pub parallel_calls: bool,
    /// It shows what tools answered.
    pub tool_results: bool,
    /// It shows earlier reasoning, at least within a turn.
    pub reasoning: bool,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            system: true,
            text_content: true,
            part_content: false,
            tools: false,
            tool_calls: false,
            string_arguments: false,
            parallel_calls: false,
            tool_results: false,
            reasoning: false,
        }
    }
}

const NEEDLE: &str = "kiln7probe";
const SECOND: &str = "kiln8probe";

fn user(text: &str) -> Json {
    json!({"role": "user", "content": text})
}

fn tool(name: &str) -> Json {
    json!({"type": "function", "function": {
        "name": name,
        "description": "d",
        "parameters": {"type": "object", "properties": {"k": {"type": "string", "description": "d"}}, "required": ["k"]}
    }})
}

fn call(value: &str, id: &str, as_text: bool) -> Json {
    let arguments = json!({"k": value});
    let arguments = if as_text { Json::String(arguments.to_string()) } else { arguments };
    json!({"id": id, "type": "function", "function": {"name": "probe_tool", "arguments": arguments}})
}

/// A user, an assistant who calls, the tool's answer, an assistant who sums up.
fn calling(calls: &[Json], answer: &str, reasoning: Option<&str>) -> Vec<Json> {
    let mut assistant = json!({"role": "assistant", "content": "", "tool_calls": calls});
    if let Some(reasoning) = reasoning {
        assistant["reasoning_content"] = json!(reasoning);
        assistant["thinking"] = json!(reasoning);
    }
    let mut messages = vec![user("Hello"), assistant];
    for call in calls {
        let id = &call["id"];
        messages.push(json!({"role": "tool", "content": answer, "tool_call_id": id, "name": "probe_tool"}));
    }
    messages
}

/// Tries a template.
pub(super) fn probe(template: &Template) -> Capabilities {
    let render = |messages: &[Json], tools: &[Json]| {
        let mut context = Map::new();
        if !tools.is_empty() {
            context.insert("tools".into(), Json::Array(tools.to_vec()));
        }
        context.insert("add_generation_prompt".into(), Json::Bool(true));
        template.render_values(messages, &context).ok()
    };
    let shows = |rendered: Option<String>, needle: &str| rendered.is_some_and(|text| text.contains(needle));
    let part = json!([{"type": "text", "text": NEEDLE}]);
    // A list that is printed as a whole shows its keys.
    let part_shown = render(&[json!({"role": "user", "content": part})], &[])
        .filter(|text| !text.contains("'text'") && !text.contains("\"text\""));
    let tools = [tool("probe_tool")];
    let ids = ["abcdefghi", "bcdefghij"];
    let as_object = shows(render(&calling(&[call(NEEDLE, ids[0], false)], "r", None), &tools), NEEDLE);
    // A text that is put through `tojson` has its quotation marks escaped.
    let as_text = render(&calling(&[call(NEEDLE, ids[0], true)], "r", None), &tools)
        .is_some_and(|text| text.contains(NEEDLE) && !text.contains(r#"{\"k\""#));
    let object_is_plain = render(&calling(&[call(NEEDLE, ids[0], false)], "r", None), &tools)
        .is_some_and(|text| text.contains(NEEDLE) && !text.contains("{'k'"));
    let string_arguments = !(as_object && object_is_plain) && as_text;
    let two = [call(NEEDLE, ids[0], string_arguments), call(SECOND, ids[1], string_arguments)];
    let both = render(&calling(&two, "r", None), &tools);
    Capabilities {
        system: shows(render(&[json!({"role": "system", "content": NEEDLE}), user("Hello")], &[]), NEEDLE),
        text_content: shows(render(&[user(NEEDLE)], &[]), NEEDLE),
        part_content: shows(part_shown, NEEDLE),
        tools: shows(render(&[user("Hello")], &tools), "probe_tool"),
        tool_calls: as_object || as_text,
        string_arguments,
        parallel_calls: shows(both.clone(), NEEDLE) && shows(both, SECOND),
        tool_results: shows(render(&calling(&[call("v", ids[0], string_arguments)], NEEDLE, None), &tools), NEEDLE),
        reasoning: shows(render(&calling(&[call("v", ids[0], string_arguments)], "r", Some(NEEDLE)), &tools), NEEDLE),
    }
}
