//! The server over real connections, with a tiny model: answers, streams, errors, keys, queues, disconnects.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod client;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use client::*;
use kiln_server::{Key, Server, Settings};
use serde_json::{Value, json};

#[test]
fn a_chat_is_answered_whole_and_as_a_stream() {
    let server = start();
    let reply = post(&server, "/v1/chat/completions", &ask("hello"));
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert!(reply.header("x-request-id").unwrap().starts_with("req_"));
    let whole = reply.json();
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["model"], "tiny");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["usage"]["completion_tokens"], 12);
    let options = json!({"stream": true, "stream_options": {"include_usage": true}});
    let reply = post(&server, "/v1/chat/completions", &with(ask("hello"), options));
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    assert!(reply.body.ends_with("data: [DONE]\n\n"), "{}", reply.body);
    let events = reply.events();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let streamed: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(streamed, text_of(&whole));
    let roles = events.iter().filter(|e| !e["choices"][0]["delta"]["role"].is_null()).count();
    assert_eq!(roles, 1, "clients join what comes twice");
    let last = events.last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(12)));
    assert!(events[..events.len() - 1].iter().all(|e| e["usage"].is_null()));
    server.stop().unwrap();
}

#[test]
fn many_clients_at_once_get_what_each_gets_alone() {
    let server = start();
    let prompts: Vec<String> = (0..12).map(|i| format!("number {i} {}", "and so on ".repeat(i % 5))).collect();
    let alone: Vec<String> =
        prompts.iter().map(|p| text_of(&post(&server, "/v1/chat/completions", &ask(p)).json())).collect();
    let open: Vec<TcpStream> = prompts
        .iter()
        .enumerate()
        .map(|(i, p)| {
            let body = with(ask(p), json!({"stream": i % 2 == 0}));
            send(server.address(), "POST", "/v1/chat/completions", &[], &body.to_string())
        })
        .collect();
    for (i, (stream, alone)) in open.into_iter().zip(&alone).enumerate() {
        let reply = receive(stream);
        let text = match i % 2 {
            0 => reply.events().iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect(),
            _ => text_of(&reply.json()),
        };
        assert_eq!(&text, alone, "client {i}");
    }
    server.stop().unwrap();
}

#[test]
fn several_texts_seeds_stops_biases_and_probabilities() {
    let server = start();
    let chat = |more: Value| post(&server, "/v1/chat/completions", &with(ask("hello"), more));
    let hot = json!({"n": 3, "temperature": 1.5, "seed": 7, "top_k": 0, "min_p": 0, "top_p": 1});
    let texts = |reply: Value| -> Vec<String> {
        let choices = reply["choices"].as_array().unwrap().clone();
        choices.iter().map(|c| c["message"]["content"].as_str().unwrap().to_owned()).collect()
    };
    let (one, again) = (texts(chat(hot.clone()).json()), texts(chat(hot.clone()).json()));
    assert_eq!(one.len(), 3);
    assert_eq!(one, again, "the same seed, the same texts");
    assert!(one[0] != one[1]);
    let streamed = chat(with(hot, json!({"stream": true}))).events();
    let indices: Vec<&Value> = streamed.iter().take(3).map(|e| &e["choices"][0]["index"]).collect();
    assert_eq!(indices, [&json!(0), &json!(1), &json!(2)], "no choice is seen before all lower ones");
    for (i, want) in one.iter().enumerate() {
        let of = |e: &&Value| e["choices"][0]["index"] == json!(i);
        let text: String =
            streamed.iter().filter(of).filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(&text, want);
    }
    let whole = text_of(&chat(json!({})).json());
    let word: String = whole.chars().skip(3).take(2).collect();
    let stopped = chat(json!({"stop": [word]})).json();
    assert_eq!(text_of(&stopped), whole[..whole.find(&word).unwrap()]);
    assert_eq!(
        (&stopped["choices"][0]["finish_reason"], &stopped["choices"][0]["stop_reason"]),
        (&json!("stop"), &json!(word))
    );
    // A bias of 100 wins over everything: the text is one letter.
    let forced = chat(json!({"logit_bias": {"33": 100}})).json();
    assert_eq!(text_of(&forced).chars().collect::<std::collections::BTreeSet<_>>().len(), 1, "{forced}");
    let probabilities = chat(json!({"logprobs": true, "top_logprobs": 3})).json();
    let entries = probabilities["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(entries.len(), 12);
    assert!(entries.iter().all(|e| e["top_logprobs"].as_array().unwrap().len() == 3));
    // The best one is taken, unless it is an end token, which the request forbids.
    let best = |e: &Value| e["logprob"] == e["top_logprobs"][0]["logprob"];
    let second = |e: &Value| e["logprob"] == e["top_logprobs"][1]["logprob"];
    assert!(entries.iter().all(|e| best(e) || second(e)) && entries.iter().any(best), "{entries:?}");
    let joined: Vec<u8> = entries
        .iter()
        .flat_map(|e| e["bytes"].as_array().unwrap().clone())
        .map(|b| b.as_u64().unwrap() as u8)
        .collect();
    assert_eq!(String::from_utf8_lossy(&joined), whole);
    let allowed = chat(json!({"allowed_token_ids": [65, 66]})).json();
    assert!(
        text_of(&allowed).bytes().all(|b| text_of(&allowed).as_bytes()[..].contains(&b))
            && allowed["choices"][0]["finish_reason"] == "length"
    );
    server.stop().unwrap();
}

#[test]
fn bad_requests_get_a_status_and_name_the_field() {
    let server = start_with(Settings { strict_model: true, ..settings() }, Some(CHATML));
    let refused = |path: &str, body: Value, status: u16, param: &str| {
        let reply = post(&server, path, &body);
        let error = reply.json()["error"].clone();
        assert_eq!((reply.status, error["param"].as_str().unwrap_or("")), (status, param), "{body}: {}", reply.body);
        assert_eq!(error["type"], "invalid_request_error");
    };
    let chat = "/v1/chat/completions";
    refused(chat, json!({}), 400, "messages");
    refused(chat, json!({"messages": []}), 400, "messages");
    refused(
        chat,
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": 5}]}),
        400,
        "messages[1].content",
    );
    refused(chat, json!({"messages": [{"role": "wizard", "content": "a"}]}), 400, "messages[0].role");
    refused(chat, with(ask("a"), json!({"temperature": "hot"})), 400, "temperature");
    refused(chat, with(ask("a"), json!({"temperature": -1})), 400, "temperature");
    refused(chat, with(ask("a"), json!({"n": 9})), 400, "n");
    refused(chat, with(ask("a"), json!({"top_logprobs": 2})), 400, "top_logprobs");
    refused(chat, with(ask("a"), json!({"stream_options": {"include_usage": true}})), 400, "stream_options");
    refused(chat, with(ask("a"), json!({"stream": true, "max_tokens": -3})), 400, "max_tokens");
    refused(chat, with(ask("a"), json!({"logit_bias": {"99999": 1}})), 400, "logit_bias");
    refused(chat, with(ask("a"), json!({"functions": []})), 400, "functions");
    refused(chat, with(ask("a"), json!({"model": "gpt-9"})), 404, "model");
    refused("/v1/completions", json!({"prompt": [1, 2, 99999]}), 400, "prompt[2]");
    let long = post(&server, chat, &with(ask(&"word ".repeat(600)), json!({"stream": true})));
    let error = long.json()["error"].clone();
    assert_eq!((long.status, &error["code"]), (400, &json!("context_length_exceeded")));
    assert!(error["message"].as_str().unwrap().contains("maximum context length is 512 tokens"), "{error}");
    let raw = |headers: &[(&str, &str)], body: &str| receive(send(server.address(), "POST", chat, headers, body));
    assert_eq!(raw(&[], "{\"messages\": [").status, 400);
    assert_eq!(raw(&[("Content-Type", "text/plain")], &ask("a").to_string()).status, 400);
    let own = format!("http://{}", server.address());
    assert_eq!(raw(&[("Content-Type", "-")], &ask("a").to_string()).status, 200);
    assert_eq!(raw(&[("Content-Type", "-"), ("Origin", &own)], &ask("a").to_string()).status, 400);
    assert_eq!(raw(&[("Content-Type", ""), ("Origin", &own)], &ask("a").to_string()).status, 400);
    assert_eq!(raw(&[], "{\"messages\": \"\u{1}\"}").json()["error"]["type"], "invalid_request_error");
    let missing = get(&server, "/v1/nothing");
    assert_eq!((missing.status, missing.json()["error"]["type"].as_str()), (404, Some("invalid_request_error")));
    assert_eq!(get(&server, chat).status, 405);
    let ignored = post(&server, chat, &with(ask("a"), json!({"user": "me", "oddity": 1, "store": null})));
    assert_eq!(ignored.header("x-kiln-ignored"), Some("oddity"));
    let messages = receive(send(server.address(), "POST", "/v1/messages", &[], "{}"));
    assert_eq!((messages.status, messages.json()["type"].as_str()), (400, Some("error")));
    let ollama = receive(send(server.address(), "POST", "/api/chat", &[], "{"));
    assert!(ollama.status == 400 && ollama.json()["error"].is_string());
    server.stop().unwrap();
}

#[test]
fn a_body_that_is_too_large_is_refused() {
    let server = start_with(Settings { body_limit: 1000, ..settings() }, Some(CHATML));
    let reply = post(&server, "/v1/chat/completions", &ask(&"x".repeat(2000)));
    assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (413, Some("request_too_large")));
    server.stop().unwrap();
}

#[test]
fn who_sends_too_much_before_it_reads_learns_it_as_well() {
    let server = start_with(Settings { body_limit: 16 << 20, ..settings() }, Some(CHATML));
    // More than the buffers of two sockets hold: it is taken, or the client never comes to read.
    let reply = post(&server, "/v1/chat/completions", &ask(&"x".repeat(40 << 20)));
    assert_eq!(reply.status, 413);
}

#[test]
fn a_body_that_never_comes_is_not_waited_for() {
    let server = start_with(Settings { header_timeout: Duration::from_millis(200), ..settings() }, Some(CHATML));
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{";
    stream.write_all(head.as_bytes()).unwrap();
    let reply = receive(stream);
    assert_eq!(reply.status, 408);
    assert!(reply.body.contains("did not come within"), "{}", reply.body);
}

/// The answer to one who has closed its side; interim ones are passed over.
fn receive_half_closed(mut stream: TcpStream) -> Option<Reply> {
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut said = Vec::new();
    stream.read_to_end(&mut said).unwrap();
    let mut said = &said[..];
    while let Some(rest) = said.strip_prefix(b"HTTP/1.1 102 Processing\r\n\r\n") {
        said = rest;
    }
    (!said.is_empty()).then(|| receive(said))
}

#[test]
fn who_closes_its_side_gets_an_answer_and_who_has_gone_ends_its_request() {
    let server = start();
    let address = server.address();
    let long = json!({"max_tokens": 300});
    let alone = text_of(&post(&server, "/v1/chat/completions", &with(ask("hello"), long.clone())).json());
    for stream in [false, true] {
        let wish = with(ask("hello"), with(long.clone(), json!({"stream": stream})));
        let half = send(address, "POST", "/v1/chat/completions", &[], &wish.to_string());
        let reply = receive_half_closed(half).expect("it still listens");
        assert_eq!(reply.status, 200);
        match stream {
            false => assert_eq!(text_of(&reply.json()), alone),
            true => assert!(reply.body.ends_with("data: [DONE]\n\n"), "{}", reply.body),
        }
    }
    for (path, status) in [("/health", 200), ("/v1/models", 200), ("/nowhere", 404)] {
        let reply = receive_half_closed(send(address, "GET", path, &[], "")).expect("it still listens");
        assert_eq!(reply.status, status, "{path}");
    }
    let bad = receive_half_closed(send(address, "POST", "/v1/chat/completions", &[], "{")).expect("it still listens");
    assert_eq!(bad.status, 400);
    // Whoever knows no interim answers cannot be asked, and gets what is ready at once.
    let mut old = TcpStream::connect(address).unwrap();
    old.write_all(format!("GET /health HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes()).unwrap();
    assert_eq!(receive_half_closed(old).expect("it still listens").status, 200);
    // One that closes both sides has gone: whether it waited for all of the answer, or for more of it.
    let aborted = || {
        let metrics = get(&server, "/metrics").body;
        let line = metrics.lines().find(|line| line.contains("finished_reason=\"abort\""));
        line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse::<u32>().unwrap())
    };
    for stream in [false, true] {
        let before = aborted();
        let wish = with(ask("hello"), json!({"max_tokens": 450, "stream": stream}));
        // It may have been answered before it was seen to go: then another goes.
        wait_until("a request that is given up", || {
            let gone = send(address, "POST", "/v1/chat/completions", &[], &wish.to_string());
            wait_until("the text", || running(&server)["num_running_reqs"] != 0);
            drop(gone);
            wait_until("its end", || running(&server)["num_running_reqs"] == 0);
            aborted() > before
        });
    }
    server.stop().unwrap();
}

#[test]
fn who_comes_while_the_server_goes_down_is_told_so() {
    let server = start();
    let address = server.address();
    let long = with(ask("go on"), json!({"max_tokens": 450, "stream": true}));
    let running = send(address, "POST", "/v1/chat/completions", &[], &long.to_string());
    wait_until("the text", || get(&server, "/engine").json()["load"]["writing"] == 1);
    // A request whose body is still to come keeps the server, however fast the text above is written.
    let body = ask("hello").to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nConnection: close\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let mut half = TcpStream::connect(address).unwrap();
    half.write_all(head.as_bytes()).unwrap();
    // One that has said nothing at all is heard, too.
    let mut silent = TcpStream::connect(address).unwrap();
    wait_until("all three", || get(&server, "/engine").json()["tasks"].as_u64().unwrap() >= 3);
    let ended = std::thread::spawn(move || server.stop());
    wait_until("going down", || receive(send(address, "GET", "/readyz", &[], "")).status == 503);
    let silent_head = format!("GET /readyz HTTP/1.1\r\nConnection: close\r\nHost: {address}\r\n\r\n");
    silent.write_all(silent_head.as_bytes()).unwrap();
    assert_eq!(receive(silent).status, 503, "it was connected before");
    let late = receive(send(address, "POST", "/v1/chat/completions", &[], &body));
    assert_eq!(late.status, 503, "{}", late.body);
    assert!(late.header("retry-after").is_some());
    assert!(receive(running).body.ends_with("data: [DONE]\n\n"), "what was begun is finished");
    half.write_all(body.as_bytes()).unwrap();
    assert_eq!(receive(half).status, 503);
    ended.join().unwrap().unwrap();
}

#[test]
fn keys_hosts_and_origins_are_checked() {
    let key = |name: &str, secret: &str| Key { name: name.into(), secret: secret.into(), ..Key::default() };
    let keys = vec![key("one", "secret-1"), key("two", "secret-2")];
    let server =
        start_with(Settings { keys, origins: vec!["https://good.example".into()], ..settings() }, Some(CHATML));
    let status = |headers: &[(&str, &str)]| receive(send(server.address(), "GET", "/v1/models", headers, "")).status;
    assert_eq!(status(&[]), 401);
    assert_eq!(status(&[("Authorization", "Bearer secret-3")]), 401);
    assert_eq!(status(&[("Authorization", "Bearer secret-2")]), 200);
    assert_eq!(status(&[("x-api-key", "secret-1")]), 200);
    assert_eq!(get(&server, "/health").status, 200, "probes need no key");
    let own = ("Authorization", "Bearer secret-1");
    assert_eq!(status(&[own, ("Host", "evil.example")]), 403);
    assert_eq!(status(&[own, ("Host", "localhost:1")]), 200);
    assert_eq!(status(&[own, ("Origin", "https://evil.example")]), 403);
    let good = receive(send(server.address(), "GET", "/v1/models", &[own, ("Origin", "https://good.example")], ""));
    assert_eq!((good.status, good.header("access-control-allow-origin")), (200, Some("https://good.example")));
    // The server's own page may ask, also where the name stands in the address and not in a header, as HTTP/2 has it.
    let (name, whole) = (server.address().to_string(), format!("http://{}/v1/models", server.address()));
    let page = format!("http://{name}");
    assert_eq!(status(&[own, ("Origin", &page)]), 200);
    let absolute = |origin: &str| {
        receive(send(server.address(), "GET", &whole, &[own, ("Host", "-"), ("Origin", origin)], "")).status
    };
    assert_eq!((absolute(&page), absolute("http://evil.example")), (200, 403));
    // What one key has read is nothing to another, and neither is what has another salt.
    let cached = |secret: &str, salt: Option<&str>| {
        let bearer = format!("Bearer {secret}");
        let body = with(ask(&"shared beginning ".repeat(12)), json!({"cache_salt": salt})).to_string();
        let headers = [("Authorization", bearer.as_str())];
        let reply = receive(send(server.address(), "POST", "/v1/chat/completions", &headers, &body)).json();
        reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached("secret-1", None), 0);
    assert!(cached("secret-1", None) > 0);
    assert_eq!(cached("secret-2", None), 0);
    assert_eq!(cached("secret-1", Some("a")), 0);
    assert!(cached("secret-1", Some("a")) > 0);
    assert_eq!((cached("secret-1", Some("b")), cached("secret-2", Some("a"))), (0, 0));
    assert_eq!(get(&server, "/metrics").status, 401);
    server.stop().unwrap();
    let keys = vec![key("one", "secret-1")];
    let server = start_with(Settings { keys, open_metrics: true, ..settings() }, Some(CHATML));
    assert_eq!((get(&server, "/metrics").status, get(&server, "/v1/models").status), (200, 401));
    server.stop().unwrap();
}

#[test]
fn fields_that_are_known_are_no_strangers_even_to_a_strict_server() {
    let server = start_with(Settings { strict: true, ..settings() }, Some(CHATML));
    let known = json!({"user": "me", "store": true, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "x", "verbosity": "low"});
    let reply = post(&server, "/v1/chat/completions", &with(ask("hello"), known.clone()));
    assert_eq!((reply.status, reply.header("x-kiln-ignored")), (200, None), "{}", reply.body);
    let response = with(known, json!({"input": "hello", "max_output_tokens": 4, "truncation": "auto", "include": []}));
    assert_eq!(post(&server, "/v1/responses", &response).status, 200);
    let message = json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "metadata": {"user_id": "x"}, "service_tier": "auto"});
    assert_eq!(post(&server, "/v1/messages", &message).status, 200);
    let odd = post(&server, "/v1/chat/completions", &with(ask("hello"), json!({"oddity": 1})));
    assert_eq!((odd.status, odd.json()["error"]["param"].as_str()), (400, Some("oddity")));
    server.stop().unwrap();
}

#[test]
fn ollama_tells_probabilities_and_an_echo_streams() {
    let server = start();
    let chat = json!({"messages": [{"role": "user", "content": "hello"}], "options": {"num_predict": 3, "temperature": 0}, "logprobs": true, "top_logprobs": 2});
    let whole = post(&server, "/api/chat", &with(chat.clone(), json!({"stream": false}))).json();
    let told = whole["logprobs"].as_array().unwrap_or_else(|| panic!("{whole}"));
    assert!(
        !told.is_empty()
            && told.iter().all(|l| l["logprob"].is_number() && l["top_logprobs"].as_array().unwrap().len() == 2),
        "{whole}"
    );
    let lines = post(&server, "/api/chat", &chat).body;
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let streamed: Vec<Value> = lines.iter().filter_map(|l| l["logprobs"].as_array()).flatten().cloned().collect();
    assert_eq!(&streamed, told);
    // `curl -d` calls everything a form, which Ollama takes; a web page does not get in that way.
    let form = ("Content-Type", "application/x-www-form-urlencoded");
    let typed = |path: &str, more: &[(&str, &str)]| {
        let headers: Vec<_> = [form].into_iter().chain(more.iter().copied()).collect();
        let body = json!({"prompt": "hello", "stream": false, "options": {"num_predict": 1}}).to_string();
        receive(send(server.address(), "POST", path, &headers, &body)).status
    };
    assert_eq!((typed("/api/generate", &[]), typed("/v1/completions", &[])), (200, 400));
    assert_eq!(typed("/api/generate", &[("Sec-Fetch-Site", "cross-site")]), 400);
    // What was used is told with every piece, if that is wished.
    let counted = json!({"prompt": "hello", "max_tokens": 4, "ignore_eos": true, "stream": true, "stream_options": {"continuous_usage_stats": true}});
    let chat = with(
        ask("hello"),
        json!({"stream": true, "stream_options": {"continuous_usage_stats": true, "include_usage": true}}),
    );
    for (path, wish, tokens) in [("/v1/completions", counted, 4), ("/v1/chat/completions", chat, 12)] {
        let events = post(&server, path, &wish).events();
        let told: Vec<u64> = events.iter().map(|e| e["usage"]["completion_tokens"].as_u64().unwrap()).collect();
        assert!(told.is_sorted() && told.last() == Some(&tokens), "{path}: {told:?}");
        assert!(events.iter().all(|e| e["usage"]["prompt_tokens"] != 0), "{path}");
    }
    // Nothing but the prompt is asked for: a stream of it all the same.
    let echo = json!({"prompt": "hello", "echo": true, "max_tokens": 0, "logprobs": 1, "stream": true, "stream_options": {"include_usage": true}});
    let reply = post(&server, "/v1/completions", &echo);
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    let events = reply.events();
    assert_eq!((events.len(), &events[0]["choices"][0]["text"]), (2, &json!("hello")), "{}", reply.body);
    assert!(events[0]["usage"].is_null() && events[1]["usage"]["prompt_tokens"].is_u64(), "{}", reply.body);
    assert!(reply.body.ends_with("data: [DONE]\n\n"));
    server.stop().unwrap();
}

#[test]
fn a_client_that_goes_ends_its_request_and_a_full_queue_refuses() {
    let server = start_with(Settings { queue: 2, ..settings() }, Some(CHATML));
    let endless = |stream: bool| {
        let body = with(ask("go on"), json!({"max_tokens": 480, "stream": stream})).to_string();
        send(server.address(), "POST", "/v1/chat/completions", &[], &body)
    };
    let open: Vec<TcpStream> = (0..6 * SEQUENCES).map(|i| endless(i % 2 == 0)).collect();
    let replies: Vec<Reply> = open.into_iter().map(receive).collect();
    let (served, refused): (Vec<&Reply>, Vec<&Reply>) = replies.iter().partition(|reply| reply.status == 200);
    assert!(served.len() >= SEQUENCES + 2 && !refused.is_empty(), "{} served", served.len());
    for reply in refused {
        assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (429, Some("queue_full")));
        assert!(reply.header("retry-after").is_some());
    }
    // Clients that go before their answer is whole, while it is written and while it waits.
    wait_until("a request that was cut short", || {
        let mut open: Vec<TcpStream> = (0..SEQUENCES + 2).map(|_| endless(true)).collect();
        open[0].read_exact(&mut [0; 16]).unwrap();
        drop(open);
        get(&server, "/metrics").body.contains("finished_reason=\"abort\"")
    });
    wait_until("the end of all requests", || {
        let load = running(&server);
        load["num_running_reqs"] == 0 && load["num_waiting_reqs"] == 0 && load["num_free_pages"] == load["num_pages"]
    });
    assert_eq!(post(&server, "/v1/chat/completions", &ask("hello")).status, 200);
    server.stop().unwrap();
}

#[test]
fn a_stream_that_is_silent_for_long_gives_signs_of_life() {
    let server = start_with(Settings { keep_alive: Duration::from_millis(1), ..settings() }, Some(CHATML));
    let body = with(ask(&"a long prompt ".repeat(30)), json!({"stream": true}));
    let reply = post(&server, "/v1/chat/completions", &body);
    assert!(reply.body.contains("\n:\n\n") && reply.body.ends_with("data: [DONE]\n\n"), "{}", reply.body);
    server.stop().unwrap();
}

#[test]
fn clients_that_dawdle_or_never_read_keep_nobody_waiting() {
    let settings = Settings { header_timeout: Duration::from_millis(300), ..settings() };
    let server = start_with(settings, Some(CHATML));
    let mut slow = TcpStream::connect(server.address()).unwrap();
    slow.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    slow.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc").unwrap();
    let body = with(ask("go on"), json!({"max_tokens": 400, "stream": true})).to_string();
    let never_read: Vec<TcpStream> =
        (0..8).map(|_| send(server.address(), "POST", "/v1/chat/completions", &[], &body)).collect();
    assert_eq!(post(&server, "/v1/chat/completions", &ask("hello")).status, 200);
    let mut rest = Vec::new();
    let start = Instant::now();
    let _ = slow.read_to_end(&mut rest);
    assert!(start.elapsed() < Duration::from_secs(8), "the connection is closed");
    drop(never_read);
    server.stop().unwrap();
}

#[test]
fn a_server_that_loads_or_goes_says_so() {
    let server = Server::listen("127.0.0.1", 0, settings()).unwrap();
    assert_eq!(get(&server, "/livez").status, 200);
    assert_eq!((get(&server, "/readyz").status, get(&server, "/health").status), (503, 503));
    let early = post(&server, "/v1/chat/completions", &ask("hello"));
    assert!(early.status == 503 && early.header("retry-after").is_some(), "{}", early.body);
    server.ready(scheduler(&model(Some(CHATML))), SEQUENCES);
    assert_eq!((get(&server, "/readyz").status, get(&server, "/health").status), (200, 200));
    assert_eq!(get(&server, "/version").status, 200);
    // What runs when the server is told to go is finished.
    let address = server.address();
    let body = with(ask("go on"), json!({"max_tokens": 200})).to_string();
    let open = send(address, "POST", "/v1/chat/completions", &[], &body);
    wait_until("the request to be taken up", || {
        running(&server)["num_running_reqs"] != 0
            || get(&server, "/metrics").body.contains("request_success_total{finished_reason=\"length\"")
    });
    server.stop().unwrap();
    assert_eq!(receive(open).json()["usage"]["completion_tokens"], 200);
    assert!(TcpStream::connect(address).is_err(), "nobody listens any more");
}

#[test]
fn a_model_without_a_template_completes_but_does_not_chat() {
    // A vocabulary that has ChatML's tokens gives away how conversations are written.
    let known = start_with(settings(), None);
    let prompt = post(&known, "/apply-template", &ask("hello")).json()["prompt"].clone();
    assert_eq!(prompt, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n");
    let unknown = model_with(None, |metadata| {
        let mut tokens = kiln_gguf::Strings::default();
        for token in metadata.get_str_array_opt("tokenizer.ggml.tokens").unwrap().unwrap().iter() {
            tokens.push(if token == b"<|im_start|>" { b"<|other|>" } else { token });
        }
        metadata.set("tokenizer.ggml.tokens", tokens);
    });
    let server = kiln_server::Server::listen("127.0.0.1", 0, settings()).unwrap();
    server.ready(scheduler(&unknown), SEQUENCES);
    let chat = post(&server, "/v1/chat/completions", &ask("hello"));
    assert_eq!((chat.status, chat.json()["error"]["code"].as_str()), (400, Some("template_error")));
    assert!(chat.json()["error"]["message"].as_str().unwrap().contains("/v1/completions"));
    let text =
        post(&server, "/v1/completions", &json!({"prompt": "hello", "temperature": 0, "ignore_eos": true})).json();
    assert_eq!(text["usage"]["completion_tokens"], 16, "{text}");
    server.stop().unwrap();
}

#[test]
fn completions_take_prompts_of_all_kinds_and_echo_them() {
    let server = start();
    let base = json!({"temperature": 0, "max_tokens": 4, "ignore_eos": true});
    let complete = |more: Value| post(&server, "/v1/completions", &with(base.clone(), more));
    let tokens =
        post(&server, "/tokenize", &json!({"content": "the hello", "add_special": true})).json()["tokens"].clone();
    let from_text = complete(json!({"prompt": "the hello"})).json();
    let from_tokens = complete(json!({"prompt": tokens})).json();
    assert_eq!(from_text["choices"][0]["text"], from_tokens["choices"][0]["text"]);
    let both = complete(json!({"prompt": ["the hello", "other"], "n": 2})).json();
    let indices: Vec<u64> = both["choices"].as_array().unwrap().iter().map(|c| c["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!(both["choices"][1]["text"], from_text["choices"][0]["text"]);
    let echo = complete(json!({"prompt": tokens, "echo": true, "logprobs": 2})).json();
    let choice = &echo["choices"][0];
    assert!(choice["text"].as_str().unwrap().starts_with("the hello"), "{choice}");
    let (count, values) = (tokens.as_array().unwrap().len(), choice["logprobs"]["token_logprobs"].as_array().unwrap());
    assert_eq!(values.len(), count + 4);
    assert!(values[0].is_null() && values[1..].iter().all(|v| v.as_f64().unwrap() <= 0.0));
    // Measuring the continuation as a prompt gives what writing it gave.
    let ids = complete(json!({"prompt": tokens, "return_token_ids": true, "logprobs": 1})).json()["choices"][0].clone();
    let mut longer = tokens.as_array().unwrap().clone();
    longer.extend(ids["token_ids"].as_array().unwrap().clone());
    let measured = complete(json!({"prompt": longer, "echo": true, "max_tokens": 0, "logprobs": 1})).json();
    let measured = measured["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().clone();
    for (wrote, read) in ids["logprobs"]["token_logprobs"].as_array().unwrap().iter().zip(&measured[count..]) {
        assert!((wrote.as_f64().unwrap() - read.as_f64().unwrap()).abs() < 1e-3, "{wrote} {read}");
    }
    let streamed = complete(json!({"prompt": "the hello", "stream": true})).events();
    let text: String = streamed.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(json!(text), from_text["choices"][0]["text"]);
    let llama = post(
        &server,
        "/completion",
        &json!({"prompt": "the hello", "temperature": 0, "n_predict": 4, "ignore_eos": true}),
    );
    assert_eq!(llama.json()["content"], from_text["choices"][0]["text"]);
    assert_eq!(llama.json()["stop_type"], "limit");
    server.stop().unwrap();
}

#[test]
fn what_clients_ask_about_the_model_is_answered() {
    let server = start();
    let models = get(&server, "/v1/models").json();
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["max_model_len"]), (&json!("tiny"), &json!(512)));
    assert_eq!(get(&server, "/v1/models/tiny").json()["id"], "tiny");
    assert_eq!(get(&server, "/v1/models/other").status, 404);
    let back = post(
        &server,
        "/detokenize",
        &json!({"tokens": post(&server, "/tokenize", &json!({"content": "hello world"})).json()["tokens"]}),
    );
    assert_eq!(back.json()["content"], "hello world");
    let prompt = post(&server, "/apply-template", &json!({"messages": [{"role": "user", "content": "Hi"}]})).json();
    assert_eq!(prompt["prompt"], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    let counted = post(&server, "/v1/chat/completions/input_tokens", &ask("Hi")).json()["input_tokens"].clone();
    assert_eq!(counted, post(&server, "/v1/chat/completions", &ask("Hi")).json()["usage"]["prompt_tokens"]);
    assert_eq!(get(&server, "/props").json()["total_slots"], SEQUENCES);
    assert_eq!(get(&server, "/slots").json().as_array().unwrap().len(), SEQUENCES);
    let metrics = get(&server, "/metrics").body;
    // Kinds and names as Prometheus itself reads them: with one that it does not know it takes nothing at all.
    for line in metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        assert!(matches!(kind, "counter" | "gauge" | "histogram"), "{line}");
        assert!(kind != "counter" || name.ends_with("_total"), "{line}");
        assert!(metrics.contains(&format!("# HELP {name} ")), "{line}");
    }
    assert!(metrics.contains("# TYPE kiln:build_info gauge\n"), "{metrics}");
    for name in [
        "vllm:num_requests_running{",
        "vllm:kv_cache_usage_perc{",
        "vllm:generation_tokens_total{",
        "vllm:time_to_first_token_seconds_bucket{",
    ] {
        assert!(metrics.contains(name), "{name} is not in\n{metrics}");
    }
    server.stop().unwrap();
}

#[test]
fn the_other_apis_say_the_same() {
    let server = start();
    let want = text_of(&post(&server, "/v1/chat/completions", &ask("hello")).json());
    let message = json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0, "ignore_eos": true});
    let whole = post(&server, "/v1/messages", &message).json();
    assert_eq!(whole["content"], json!([{"type": "text", "text": want}]), "{whole}");
    assert_eq!(whole["stop_reason"], "max_tokens");
    let events = post(&server, "/v1/messages", &with(message.clone(), json!({"stream": true}))).events();
    let text: String = events.iter().filter_map(|e| e["delta"]["text"].as_str()).collect();
    assert_eq!(text, want);
    assert_eq!(events.last().unwrap()["type"], "message_stop");
    let counted = post(&server, "/v1/messages/count_tokens", &message).json()["input_tokens"].clone();
    assert!(counted.as_u64().unwrap() > 3);
    let ask = json!({"input": "hello", "max_output_tokens": 12, "temperature": 0, "ignore_eos": true});
    let whole = post(&server, "/v1/responses", &ask).json();
    assert_eq!(whole["output"][0]["content"][0]["text"], want, "{whole}");
    assert_eq!(
        (&whole["status"], &whole["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    let events = post(&server, "/v1/responses", &with(ask, json!({"stream": true}))).events();
    let text: String = events
        .iter()
        .filter(|e| e["type"] == "response.output_text.delta")
        .filter_map(|e| e["delta"].as_str())
        .collect();
    assert_eq!(text, want);
    let options = json!({"temperature": 0, "num_predict": 12, "ignore_eos": true});
    let chat = json!({"model": "tiny:latest", "messages": [{"role": "user", "content": "hello"}], "options": options});
    let whole = post(&server, "/api/chat", &with(chat.clone(), json!({"stream": false}))).json();
    assert_eq!((&whole["message"]["content"], &whole["done_reason"]), (&json!(want), &json!("length")), "{whole}");
    let lines = post(&server, "/api/chat", &chat).body;
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let text: String = lines.iter().filter_map(|l| l["message"]["content"].as_str()).collect();
    assert_eq!((text, &lines.last().unwrap()["done"]), (want.clone(), &json!(true)));
    let generate = json!({"prompt": "hello", "stream": false, "options": options});
    assert_eq!(post(&server, "/api/generate", &generate).json()["response"], want);
    assert_eq!(get(&server, "/api/tags").json()["models"][0]["name"], "tiny");
    assert!(
        post(&server, "/api/show", &json!({"model": "tiny"})).json()["model_info"]["general.architecture"] == "llama"
    );
    assert_eq!(get(&server, "/").body, "Ollama is running");
    assert_eq!(post(&server, "/v1/embeddings", &json!({"input": "a"})).status, 501);
    assert_eq!(post(&server, "/api/pull", &json!({"model": "a"})).status, 403);
    server.stop().unwrap();
}

/// Shows tools and calls as Hermes does, and lets the model think.
const HERMES: &str = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}\
    {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n\
    {\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn weather() -> Value {
    let parameters = json!({
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"], "additionalProperties": false,
    });
    json!({"name": "get_weather", "description": "d", "parameters": parameters})
}

#[test]
fn a_random_model_keeps_to_schemas_and_makes_the_calls_it_must() {
    let server = start_with(settings(), Some(HERMES));
    let base = json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 300, "temperature": 0});
    let chat = |more: Value| post(&server, "/v1/chat/completions", &with(base.clone(), more));
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let reply = chat(json!({"response_format": format})).json();
    let value: Value = serde_json::from_str(&text_of(&reply)).unwrap_or_else(|e| panic!("{e}: {reply}"));
    assert!(value["a"].as_u64().unwrap() <= 9);
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    let picked = text_of(&chat(json!({"structured_outputs": {"choice": ["left", "right"]}})).json());
    assert!(["left", "right"].contains(&picked.as_str()), "{picked}");
    let bad = json!({"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"type": "odd"}}}}});
    let refused = chat(json!({"response_format": bad, "stream": true}));
    assert_eq!(
        (refused.status, refused.json()["error"]["code"].as_str()),
        (400, Some("invalid_json_schema")),
        "{}",
        refused.body
    );
    let grammar = chat(json!({"grammar": "root ::= (", "stream": true}));
    assert_eq!(
        (grammar.status, grammar.json()["error"]["code"].as_str()),
        (400, Some("invalid_grammar")),
        "{}",
        grammar.body
    );
    // It ends nowhere, which shows when it is followed.
    let endless = chat(json!({"grammar": "root ::= \"a\" root"}));
    assert_eq!((endless.status, endless.json()["error"]["code"].as_str()), (400, Some("invalid_grammar")));

    let tools = json!({"tools": [{"type": "function", "function": weather()}], "tool_choice": "required", "parallel_tool_calls": false});
    let reply = chat(tools.clone()).json();
    let call = &reply["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(
        (&call["function"]["name"], &reply["choices"][0]["finish_reason"]),
        (&json!("get_weather"), &json!("tool_calls")),
        "{reply}"
    );
    assert!(reply["choices"][0]["message"]["content"].is_null());
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert!(["C", "F"].contains(&arguments["unit"].as_str().unwrap()));
    let events = chat(with(tools, json!({"stream": true}))).events();
    let deltas: Vec<&Value> =
        events.iter().map(|e| &e["choices"][0]["delta"]["tool_calls"][0]).filter(|d| !d.is_null()).collect();
    assert_eq!(deltas.iter().filter(|d| d["function"]["name"].is_string()).count(), 1, "a name comes once");
    let streamed: String = deltas.iter().filter_map(|d| d["function"]["arguments"].as_str()).collect();
    assert_eq!(json!(streamed), call["function"]["arguments"]);
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    let named = json!({"tools": [{"type": "function", "function": weather()}], "tool_choice": {"type": "function", "function": {"name": "other"}}});
    assert_eq!(chat(named).json()["error"]["param"], "tool_choice");
    // The other APIs force calls as well.
    let tool = json!({"name": "get_weather", "input_schema": weather()["parameters"]});
    let message =
        with(base.clone(), json!({"tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": true}}));
    let reply = post(&server, "/v1/messages", &message).json();
    assert_eq!(
        (&reply["content"][0]["type"], &reply["stop_reason"]),
        (&json!("tool_use"), &json!("tool_use")),
        "{reply}"
    );
    assert_eq!(reply["content"][0]["input"], arguments);
    server.stop().unwrap();
}

#[test]
fn a_prediction_is_tried_and_changes_nothing() {
    let server = start();
    let plain = with(ask("hello"), json!({"max_tokens": 40, "temperature": 0}));
    let want = post(&server, "/v1/chat/completions", &plain).json();
    let predicted = |content: Value| {
        let body = with(plain.clone(), json!({"prediction": {"type": "content", "content": content}}));
        post(&server, "/v1/chat/completions", &body)
    };
    for content in [json!(text_of(&want)), json!([{"type": "text", "text": text_of(&want)}]), json!("something else")] {
        let got = predicted(content.clone());
        assert_eq!(got.status, 200, "{}", got.body);
        let got = got.json();
        assert_eq!(text_of(&got), text_of(&want));
        assert_eq!(got["usage"]["completion_tokens"], want["usage"]["completion_tokens"]);
    }
    for wrong in [json!(1), json!([{"type": "text"}]), Value::Null] {
        let got = predicted(wrong);
        assert_eq!((got.status, got.json()["error"]["param"].clone()), (400, json!("prediction")), "{}", got.body);
    }
    let none = post(&server, "/v1/chat/completions", &with(plain, json!({"speculative.n_max": 0}))).json();
    assert_eq!(text_of(&none), text_of(&want));
    assert!(none["timings"].get("draft_n").is_none(), "{none}");
    server.stop().unwrap();
}
