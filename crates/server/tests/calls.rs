//! Calls that must come, in the form of every family; calls beside a shape of the answer; and what is told of reasoning.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod client;

use client::*;
use kiln_server::Running;
use serde_json::{Value, json};

/// Shows tools and calls, and has the marks of a family.
fn template(marks: &str) -> String {
    format!(
        "{{# {marks} #}}{{% if tools %}}<|im_start|>system\n{{% for t in tools %}}{{{{ t.function.name }}}}\n{{% endfor %}}<|im_end|>\n{{% endif %}}\
         {{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}{{{{ c.function.name }}}} \
         {{{{ c.function.arguments | tojson }}}}{{% endfor %}}<|im_end|>\n{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
    )
}

/// Tools whose arguments a model that knows nothing can write to their end.
fn tools() -> Value {
    let tool = |name: &str| {
        let parameters = json!({
            "type": "object", "properties": {"unit": {"enum": ["C", "F"]}, "sure": {"type": "boolean"}},
            "required": ["unit"], "additionalProperties": false,
        });
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    json!([tool("get_weather"), tool("get_heat")])
}

fn chat(server: &Running, more: Value) -> Reply {
    let base = json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 300, "temperature": 0});
    post(server, "/v1/chat/completions", &with(base, more))
}

#[test]
fn every_family_makes_the_calls_that_it_must() {
    for marks in [
        "<tool_call>",
        "<|start_header_id|> \"parameters\"",
        "[TOOL_CALLS]",
        "[TOOL_CALLS] [ARGS]",
        "[TOOL_CALLS] [CALL_ID]",
        ">>>all",
        "<|tool_calls_section_begin|>",
        "DSML function_calls",
        "<｜tool▁calls▁begin｜> ```json",
        "<｜tool▁calls▁begin｜>",
        "<|START_ACTION|>",
        "<|START_OF_TURN_TOKEN|> Action:",
        "<minimax:tool_call>",
        "<|tool_call>call:",
        "<start_function_call>",
        "<|tool_call_start|>",
        "<seed:tool_call>",
        "<arg_key",
        "<function= <parameter=",
        "<function= </function>",
        "<TOOLCALL>",
        "<tool_calls>",
        "<|tools_prefix|>",
        "<|tool_call|>",
        "functools",
        "<|header_start|>",
        "func_name1(",
    ] {
        let server = start_with(settings(), Some(&template(marks)));
        let named = json!({"type": "function", "function": {"name": "get_heat"}});
        for (choice, stream) in [(json!("required"), false), (named.clone(), true)] {
            let wish = json!({"tools": tools(), "tool_choice": choice, "parallel_tool_calls": false, "stream": stream});
            let reply = chat(&server, wish);
            assert_eq!(reply.status, 200, "{marks}: {}", reply.body);
            let (name, arguments, finish) = match stream {
                false => {
                    let choice = &reply.json()["choices"][0];
                    let call = choice["message"]["tool_calls"][0]["function"].clone();
                    (call["name"].clone(), call["arguments"].clone(), choice["finish_reason"].clone())
                }
                true => {
                    let events = reply.events();
                    let calls: Vec<&Value> =
                        events.iter().map(|e| &e["choices"][0]["delta"]["tool_calls"][0]).collect();
                    let name = calls.iter().find_map(|c| c["function"]["name"].as_str()).unwrap_or_default();
                    let arguments: String = calls.iter().filter_map(|c| c["function"]["arguments"].as_str()).collect();
                    (json!(name), json!(arguments), events.last().unwrap()["choices"][0]["finish_reason"].clone())
                }
            };
            assert_eq!(finish, "tool_calls", "{marks}: {}", reply.body);
            assert!(["get_weather", "get_heat"].contains(&name.as_str().unwrap()), "{marks}: {name}");
            assert!(!stream || name == "get_heat", "{marks}: {name}");
            let arguments: Value = serde_json::from_str(arguments.as_str().unwrap()).unwrap();
            assert!(["C", "F"].contains(&arguments["unit"].as_str().unwrap()), "{marks}: {arguments}");
        }
        server.stop().unwrap();
    }
}

#[test]
fn tools_and_a_shape_give_a_call_or_the_shape() {
    let server = start_with(settings(), Some(&template("<tool_call>")));
    let schema = json!({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    for seed in 0..6 {
        let wish = json!({"tools": tools(), "response_format": format, "seed": seed, "temperature": 1.5});
        let reply = chat(&server, wish);
        assert_eq!(reply.status, 200, "{}", reply.body);
        let message = &reply.json()["choices"][0]["message"];
        match message["tool_calls"][0]["function"]["arguments"].as_str() {
            Some(arguments) => assert!(serde_json::from_str::<Value>(arguments).unwrap()["unit"].is_string()),
            None => {
                let value: Value = serde_json::from_str(message["content"].as_str().unwrap()).unwrap();
                assert!([1, 2].contains(&value["a"].as_i64().unwrap()), "{message}");
            }
        }
    }
    let grammar = chat(&server, json!({"tools": tools(), "grammar": "root ::= \"a\""}));
    assert_eq!((grammar.status, grammar.json()["error"]["param"].as_str()), (400, Some("grammar")));
    let strict = {
        let mut tools = tools();
        tools[0]["function"]["strict"] = json!(true);
        chat(&server, json!({"tools": tools, "max_tokens": 20}))
    };
    assert_eq!(strict.status, 200, "{}", strict.body);
    server.stop().unwrap();
}

#[test]
fn strict_tools_leave_the_model_free_to_answer_in_every_family() {
    let marks = [
        "<tool_call>",
        "<|start_header_id|> \"parameters\"",
        "<|header_start|>",
        "func_name1(",
        ">>>all",
        "<function= <parameter=",
    ];
    for marks in marks {
        let server = start_with(settings(), Some(&template(marks)));
        // One that is strict, and one that is not.
        let mut tools = tools();
        tools[0]["function"]["strict"] = json!(true);
        for seed in 0..3 {
            let wish = json!({"tools": tools, "max_tokens": 24, "temperature": 1.5, "seed": seed});
            let reply = chat(&server, wish);
            assert_eq!(reply.status, 200, "{marks}: {}", reply.body);
            let choice = &reply.json()["choices"][0];
            if let Some(call) = choice["message"]["tool_calls"].get(0).filter(|_| choice["finish_reason"] != "length") {
                let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
                assert!(call["function"]["name"] != "get_weather" || arguments["unit"].is_string(), "{marks}: {call}");
            }
        }
        // What is wrong with a schema that must be kept to is told before anything is written, and where it stands.
        tools[0]["function"]["parameters"] = json!({"type": "object", "properties": {"a": {"type": "odd"}}});
        let wrong = chat(&server, json!({"tools": tools}));
        assert_eq!(
            (wrong.status, wrong.json()["error"]["code"].as_str()),
            (400, Some("invalid_json_schema")),
            "{marks}"
        );
        server.stop().unwrap();
    }
}

#[test]
fn the_responses_api_tells_probabilities_and_hands_reasoning_back() {
    let server = start_with(settings(), Some(&template("<think>")));
    let base = json!({"input": "hello", "max_output_tokens": 8, "temperature": 0});
    let ask = |more: Value| post(&server, "/v1/responses", &with(base.clone(), more));
    let wish = json!({"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 2, "ignore_eos": true});
    let whole = ask(wish.clone()).json();
    let part = &whole["output"].as_array().unwrap().last().unwrap()["content"][0];
    let told = part["logprobs"].as_array().unwrap();
    assert!(!told.is_empty() && told.iter().all(|l| l["top_logprobs"].as_array().unwrap().len() == 2), "{whole}");
    let events = ask(with(wish, json!({"stream": true}))).events();
    let deltas = events.iter().filter(|e| e["type"] == "response.output_text.delta");
    let streamed: Vec<Value> = deltas.flat_map(|e| e["logprobs"].as_array().unwrap().clone()).collect();
    assert_eq!(&streamed, told);
    // A model whose prompt has opened its thought thinks; what it thought travels sealed, and comes back as it was.
    server.stop().unwrap();
    let shows = template("<think>").replace("{{ m.content }}", "{{ m.reasoning_content or '' }}{{ m.content }}");
    let opened = format!("{shows}{{% if add_generation_prompt %}}<think>\n{{% endif %}}");
    let server = start_with(settings(), Some(&opened));
    let reply = post(
        &server,
        "/v1/responses",
        &with(base, json!({"include": ["reasoning.encrypted_content"], "ignore_eos": true})),
    )
    .json();
    let item = &reply["output"][0];
    assert_eq!(item["type"], "reasoning", "{reply}");
    let sealed = item["encrypted_content"].as_str().unwrap();
    let thought = item["content"][0]["text"].as_str().unwrap();
    let carried = json!([
        {"role": "user", "content": "hello"}, {"type": "reasoning", "summary": [], "encrypted_content": sealed},
        {"role": "assistant", "content": "so"}, {"role": "user", "content": "and?"},
    ]);
    let open = json!([
        {"role": "user", "content": "hello"}, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]},
        {"role": "assistant", "content": "so"}, {"role": "user", "content": "and?"},
    ]);
    let count = |input: Value| {
        post(&server, "/v1/responses/input_tokens", &json!({"input": input})).json()["input_tokens"].clone()
    };
    let nothing = json!([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "so"}, {"role": "user", "content": "and?"}]);
    assert_eq!(count(carried), count(open.clone()));
    assert_ne!(count(open), count(nothing), "the template shows what was thought");
    server.stop().unwrap();
}

#[test]
fn reasoning_has_the_name_that_the_server_was_told() {
    let opened = format!("{}{{% if add_generation_prompt %}}<think>\n{{% endif %}}", template("<think>"));
    let request_defaults = kiln_server::RequestDefaults { reasoning_field: "reasoning", ..Default::default() };
    let server = start_with(kiln_server::Settings { request_defaults, ..settings() }, Some(&opened));
    let whole = chat(&server, json!({"ignore_eos": true, "max_tokens": 6})).json();
    let message = &whole["choices"][0]["message"];
    assert!(message["reasoning"].is_string() && message.get("reasoning_content").is_none(), "{whole}");
    let events = chat(&server, json!({"ignore_eos": true, "max_tokens": 6, "stream": true})).events();
    assert!(events.iter().any(|e| e["choices"][0]["delta"]["reasoning"].is_string()), "{events:?}");
    server.stop().unwrap();
}
