//! llama-server's own way to continue texts, and what holds where a request says nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod client;

use std::sync::Arc;

use client::*;
use kiln_server::{RequestDefaults, Settings, ThinkingBudget};
use serde_json::{Value, json};

fn wish(more: Value) -> Value {
    with(json!({"prompt": "hello there", "n_predict": 6, "temperature": 0, "ignore_eos": true}), more)
}

#[test]
fn completions_tell_how_they_were_made() {
    let server = start();
    let whole =
        post(&server, "/completion", &wish(json!({"stop": ["never"], "seed": 7, "logit_bias": [[5, false]]}))).json();
    let settings = &whole["generation_settings"];
    assert_eq!(
        (&settings["n_predict"], &settings["seed"], &settings["stop"]),
        (&json!(6), &json!(7), &json!(["never"]))
    );
    let biases = settings["logit_bias"].as_array().unwrap();
    assert_eq!(biases[0], json!({"token": 5, "bias": null}));
    // Tokens that end a text are forbidden by `ignore_eos`.
    assert!(biases.len() > 1, "{biases:?}");
    assert_eq!(whole["tokens"], json!([]));
    assert_eq!((&whole["stop_type"], &whole["tokens_predicted"]), (&json!("limit"), &json!(6)));
    assert!(whole["prompt"].as_str().unwrap().contains("hello there"), "{whole}");
    assert!(whole["has_new_line"].is_boolean() && whole["id_slot"].is_u64());

    let picked = post(
        &server,
        "/completion",
        &wish(json!({"response_fields": ["content", "generation_settings/top_k", "no/such"]})),
    );
    assert_eq!(picked.json(), json!({"content": whole["content"], "generation_settings/top_k": 40}));
    let tokens = post(&server, "/completion", &wish(json!({"return_tokens": true}))).json()["tokens"].clone();
    assert_eq!(tokens.as_array().unwrap().len(), 6);
}

#[test]
fn several_prompts_give_a_list_and_texts_may_stand_among_tokens() {
    let server = start();
    let ids =
        post(&server, "/tokenize", &json!({"content": "hello there", "add_special": true})).json()["tokens"].clone();
    let alone = post(&server, "/completion", &wish(json!({}))).json()["content"].clone();
    let all =
        post(&server, "/completion", &wish(json!({"prompt": [ids, "hello there", {"prompt_string": "hello there"}]})))
            .json();
    let all: Vec<&Value> = all.as_array().unwrap().iter().map(|one| &one["content"]).collect();
    assert_eq!(all, [&alone; 3]);
    let mixed = post(&server, "/completion", &wish(json!({"prompt": [1, 2, "hello", 3]}))).json();
    assert!(mixed["content"].is_string(), "{mixed}");
    let media = json!({"prompt": {"prompt_string": "a", "multimodal_data": ["AA=="]}});
    for (wrong, param) in
        [(media, "prompt"), (json!({"prompt": [1, 99_999_999]}), "prompt[1]"), (json!({"prompt": {}}), "prompt")]
    {
        let reply = post(&server, "/completion", &wish(wrong));
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)));
    }
}

#[test]
fn probabilities_and_progress_are_told() {
    let server = start();
    let whole = post(&server, "/completion", &wish(json!({"n_probs": 3}))).json();
    let told = whole["completion_probabilities"].as_array().unwrap();
    assert_eq!(told.len(), 6);
    for token in told {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        // Greedily, the likeliest is what was taken.
        assert_eq!((&top[0]["id"], &top[0]["logprob"]), (&token["id"], &token["logprob"]));
        assert!(token["bytes"].is_array() && token["logprob"].as_f64().unwrap() <= 0.0);
    }
    let after = json!({"n_probs": 9, "post_sampling_probs": true, "temperature": 1.0, "top_k": 4, "seed": 5, "top_p": 1.0, "min_p": 0.0});
    let whole_after = post(&server, "/completion", &wish(after)).json();
    let told = whole_after["completion_probabilities"].as_array().unwrap();
    assert_eq!(told.len(), 6);
    for token in told {
        // What `top_k` has left is all there is to choose from.
        let top = token["top_probs"].as_array().unwrap();
        let sum: f64 = top.iter().map(|one| one["prob"].as_f64().unwrap()).sum();
        assert!(top.len() == 4 && (sum - 1.0).abs() < 1e-5, "{token}");
        assert!(top.iter().any(|one| one["id"] == token["id"] && one["prob"] == token["prob"]), "{token}");
    }
    let more = json!({"stream": true, "timings_per_token": true, "return_progress": true, "n_probs": 1});
    let events = post(&server, "/completion", &wish(more.clone())).events();
    let progress: Vec<&Value> =
        events.iter().map(|event| &event["prompt_progress"]).filter(|told| told.is_object()).collect();
    assert_eq!(progress.last().unwrap()["processed"], progress[0]["total"]);
    let text: String = events.iter().filter_map(|event| event["content"].as_str()).collect();
    assert_eq!(json!(text), whole["content"]);
    assert_eq!(events.last().unwrap()["timings"]["predicted_n"], 6);
    let written = events.iter().filter(|event| event["stop"] == false && event["prompt_progress"].is_null());
    assert!(written.clone().all(|event| event["timings"]["predicted_n"].as_u64() >= Some(1)), "{events:?}");
    assert!(written.clone().count() > 1);
    let chat = post(&server, "/v1/chat/completions", &with(ask("hello"), more)).events();
    assert!(chat.iter().any(|event| event["timings"]["predicted_n"].as_u64() == Some(1)), "{chat:?}");
    let progress = chat.iter().find(|event| event["prompt_progress"].is_object()).unwrap();
    assert!(progress["prompt_progress"]["total"].as_u64() > Some(0) && progress["prompt_progress"]["time_ms"].is_u64());
}

#[test]
fn what_a_request_does_not_say_is_as_the_server_was_told() {
    let request_defaults = RequestDefaults {
        sampling: Some(Arc::new(|s| (s.temperature, s.seed) = (0.25, Some(11)))),
        limit: Some(5),
        template: Some("{{ greeting | default('plain') }}:{% for m in messages %}{{ m.content }}{% endfor %}".into()),
        kwargs: json!({"greeting": "hey"}).as_object().unwrap().clone(),
        ..RequestDefaults::default()
    };
    // The model brings no template of its own.
    let server = start_with(Settings { request_defaults, ..settings() }, None);
    let props = get(&server, "/props").json()["default_generation_settings"]["params"].clone();
    assert_eq!((&props["temperature"], &props["seed"], &props["n_predict"]), (&json!(0.25), &json!(11), &json!(5)));
    let messages = json!({"messages": [{"role": "user", "content": "hello"}]});
    assert_eq!(post(&server, "/apply-template", &messages).json()["prompt"], "hey:hello");
    let other = with(messages.clone(), json!({"chat_template_kwargs": {"greeting": "you"}}));
    assert_eq!(post(&server, "/apply-template", &other).json()["prompt"], "you:hello");
    let [one, two] = [(); 2]
        .map(|()| post(&server, "/v1/chat/completions", &with(messages.clone(), json!({"ignore_eos": true}))).json());
    assert_eq!(one["usage"]["completion_tokens"], 5);
    assert_eq!(text_of(&one), text_of(&two), "the seed is the same");
    let longer = with(messages, json!({"ignore_eos": true, "max_tokens": 9}));
    assert_eq!(post(&server, "/v1/chat/completions", &longer).json()["usage"]["completion_tokens"], 9);
}

#[test]
fn slots_tell_what_they_were_asked_for_and_how_far_they_are() {
    let server = start();
    let before = get(&server, "/slots").json();
    assert!(before[0].get("params").is_none() && before[0]["id_task"] == -1, "{before}");
    let wish = json!({"prompt": "hello", "n_predict": 5, "id_slot": 2, "stop": ["never this"], "ignore_eos": true});
    assert_eq!(post(&server, "/completion", &wish).status, 200);
    let after = get(&server, "/slots").json();
    let slot = &after[2];
    assert_eq!(
        (&slot["is_processing"], &slot["next_token"]["n_decoded"], &slot["next_token"]["n_remain"]),
        (&json!(false), &json!(5), &json!(0)),
        "{after}"
    );
    assert_eq!((&slot["params"]["n_predict"], &slot["params"]["stop"]), (&json!(5), &json!(["never this"])));
    server.stop().unwrap();
}

#[test]
fn slots_are_erased_without_a_body() {
    let server = start();
    assert_eq!(post(&server, "/completion", &wish(json!({"id_slot": 1}))).status, 200);
    let erased = receive(send(server.address(), "POST", "/slots/1?action=erase", &[], ""));
    assert_eq!(erased.status, 200, "{}", erased.body);
    // Elsewhere a body is wanted.
    assert_eq!(receive(send(server.address(), "POST", "/completion", &[], "")).status, 400);
}

#[test]
fn what_clients_learn_of_the_server_is_for_the_operator_to_say() {
    let server = start();
    assert_eq!(get(&server, "/props").json()["model_path"], "tiny");
    assert_eq!(get(&server, "/slots").status, 200);
    let told = Settings {
        aliases: vec!["small".into()],
        tags: vec!["chat".into(), "test".into()],
        shown_path: Some("/models/tiny.gguf".into()),
        hides_slots: true,
        ..settings()
    };
    let server = start_with(told, Some(CHATML));
    let model = get(&server, "/v1/models").json()["data"][0].clone();
    assert_eq!((&model["aliases"], &model["tags"]), (&json!(["tiny", "small"]), &json!(["chat", "test"])));
    assert_eq!(get(&server, "/props").json()["model_path"], "/models/tiny.gguf");
    assert_eq!(get(&server, "/slots").status, 501);
}

#[test]
fn thoughts_end_when_their_tokens_are_used_up() {
    // The prompt opens a thought that the model, which writes anything, would hardly ever close.
    let thinking = format!("{CHATML}{{% if add_generation_prompt %}}<think>\n{{% endif %}}");
    let request_defaults =
        RequestDefaults { thinking_budget: Some(ThinkingBudget::Tokens(3)), ..RequestDefaults::default() };
    let server = start_with(Settings { request_defaults, ..settings() }, Some(&thinking));
    let answer = |more: Value| {
        post(&server, "/v1/chat/completions", &with(ask("hello"), with(json!({"max_tokens": 40}), more))).json()
    };
    let parts = |reply: &Value| {
        let message = &reply["choices"][0]["message"];
        (
            reply["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap(),
            message["content"].as_str().unwrap_or_default().len(),
        )
    };
    let request_defaults = answer(json!({}));
    assert!(parts(&request_defaults).1 > 0, "{request_defaults}");
    let [none, some] = [0, 10].map(|n| answer(json!({"thinking_budget_tokens": n})));
    assert!(none["choices"][0]["message"].get("reasoning_content").is_none() && parts(&none).1 > 0, "{none}");
    assert!(parts(&some).0 > parts(&request_defaults).0 && parts(&some).1 > 0, "{some}");
    // Without a bound, nothing closes the thought: all tokens are spent on it.
    let free = answer(json!({"reasoning_budget_tokens": -1}));
    assert_eq!((parts(&free).1, &free["choices"][0]["finish_reason"]), (0, &json!("length")), "{free}");
    let messages = json!({"max_tokens": 40, "messages": [{"role": "user", "content": "hello"}], "thinking": {"type": "enabled", "budget_tokens": 5}});
    let blocks = post(&server, "/v1/messages", &messages).json()["content"].clone();
    assert_eq!((&blocks[0]["type"], &blocks[1]["type"]), (&json!("thinking"), &json!("text")), "{blocks}");
    // Where reasoning stays in the text, its marker is seen there.
    let kept = answer(json!({"reasoning_format": "none"}));
    assert!(text_of(&kept).contains("</think>"), "{kept}");
    assert_eq!(post(&server, "/v1/chat/completions", &with(ask("a"), json!({"reasoning_format": "odd"}))).status, 400);
}
