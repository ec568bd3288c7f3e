//! Who gets what, and when: several models, limits of keys and of time, the page, the engine's view, TLS, filling in the middle.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod client;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use client::*;
use kiln_engine::model::Adapter;
use kiln_gguf::{Gguf, Metadata, Writer};
use kiln_server::{Key, LoadedEngine, ModelSpec, Running, Secrets, Server, Settings, Sharing, Tls};
use serde_json::{Value, json};
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{self, ClientConfig, ClientConnection, RootCertStore, StreamOwned};

fn offer(name: &str, loads: &Arc<AtomicUsize>) -> ModelSpec {
    let loads = Arc::clone(loads);
    let load = move || {
        loads.fetch_add(1, Ordering::Relaxed);
        // Long enough for others to come meanwhile.
        std::thread::sleep(Duration::from_millis(100));
        Ok(LoadedEngine { scheduler: scheduler(&model(Some(CHATML))).into(), sequences: SEQUENCES, encoder: None })
    };
    ModelSpec { name: name.into(), aliases: vec![format!("{name}-too")], bytes: 60, load: Box::new(load) }
}

fn states(server: &Running) -> Vec<String> {
    let models = get(server, "/v1/models").json();
    let told = |m: &Value| format!("{} {}", m["id"].as_str().unwrap(), m["status"]["value"].as_str().unwrap());
    models["data"].as_array().unwrap().iter().map(told).collect()
}

fn ask_of(name: &str) -> Value {
    with(ask("hello"), json!({"model": name}))
}

/// As much as one request can ask for.
fn long() -> Value {
    with(ask("go on"), json!({"max_tokens": 480, "n": SEQUENCES, "stream": true, "logprobs": true, "top_logprobs": 20}))
}

fn writing(server: &Running) -> u64 {
    get(server, "/engine").json()["load"]["writing"].as_u64().unwrap_or(0)
}

#[test]
fn models_are_loaded_when_asked_for_and_make_room_for_each_other() {
    let (one, two) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let sharing = Sharing { keep: Some(Duration::from_secs(3)), budget: Some(100) };
    let specs = vec![offer("one", &one), offer("two", &two)];
    let server = Server::offer("127.0.0.1", 0, settings(), specs, sharing).unwrap();
    // Looking wakes no model, and a server whose models sleep is ready.
    assert_eq!(states(&server), ["one unloaded", "two unloaded"]);
    assert_eq!(get(&server, "/readyz").status, 200);
    // The page and `kiln top` look at a server whose models sleep, too.
    let asleep = get(&server, "/props").json();
    assert_eq!((&asleep["is_sleeping"], &asleep["model_alias"]), (&json!(true), &json!("one")), "{asleep}");
    let engine = get(&server, "/engine?model=two").json();
    assert_eq!(
        (&engine["model"], &engine["loaded"], &engine["load"]["pages"]),
        (&json!("two"), &json!(false), &json!(0))
    );
    assert_eq!(get(&server, "/engine?model=three").status, 404);
    assert_eq!(one.load(Ordering::Relaxed), 0);
    // Whoever comes while a model is loaded waits for it; it is loaded once.
    let open: Vec<TcpStream> = (0..4)
        .map(|_| send(server.address(), "POST", "/v1/chat/completions", &[], &ask_of("one").to_string()))
        .collect();
    let texts: Vec<String> = open.into_iter().map(|stream| text_of(&receive(stream).json())).collect();
    assert!(texts.iter().all(|text| *text == texts[0]));
    assert_eq!((one.load(Ordering::Relaxed), states(&server)), (1, vec!["one loaded".into(), "two unloaded".into()]));
    // The budget holds one of them: the idle one goes.
    let reply = post(&server, "/v1/chat/completions", &ask_of("two-too")).json();
    assert_eq!(reply["model"], "two", "{reply}");
    assert_eq!(states(&server), ["one unloaded", "two loaded"]);
    // One that is in use stays, and whoever wants another is told.
    wait_until("a refusal", || {
        let _busy = send(
            server.address(),
            "POST",
            "/v1/chat/completions",
            &[],
            &with(long(), json!({"model": "two"})).to_string(),
        );
        wait_until("the long request", || writing(&server) > 0);
        let reply = post(&server, "/v1/chat/completions", &ask_of("one"));
        assert!(reply.status == 200 || reply.body.contains("no memory for `one`"), "{}", reply.body);
        reply.status == 503
    });
    wait_until("room", || post(&server, "/v1/chat/completions", &ask_of("one")).status == 200);
    // A client wishes that it goes, and with its own answer.
    let go = post(&server, "/api/generate", &json!({"model": "one", "keep_alive": 0})).json();
    assert_eq!((&go["done_reason"], &go["done"]), (&json!("unload"), &json!(true)), "{go}");
    assert_eq!(states(&server)[0], "one unloaded");
    let last =
        json!({"model": "one", "prompt": "hello", "keep_alive": "0s", "stream": false, "options": {"num_predict": 2}});
    assert_eq!(post(&server, "/api/generate", &last).status, 200);
    wait_until("its end", || states(&server)[0] == "one unloaded");
    assert_eq!(post(&server, "/v1/chat/completions", &ask_of("one")).status, 200);
    // Nobody asks any more.
    wait_until("the end of both", || states(&server) == ["one unloaded", "two unloaded"]);
    let missing = post(&server, "/v1/chat/completions", &ask_of("three"));
    assert_eq!((missing.status, missing.json()["error"]["code"].as_str()), (404, Some("model_not_found")));
    // Each metric is described once and told of both.
    let metrics = get(&server, "/metrics").body;
    assert_eq!(metrics.matches("# HELP vllm:generation_tokens_total ").count(), 1, "{metrics}");
    for name in ["one", "two"] {
        let line = metrics.lines().find(|l| l.starts_with("vllm:generation_tokens_total{") && l.contains(name));
        assert!(line.is_some_and(|l| !l.ends_with(" 0")), "{metrics}");
    }
    assert!(metrics.ends_with("# EOF\n"));
    server.stop().unwrap();
}

#[test]
fn a_model_that_cannot_be_loaded_is_refused_and_tried_again() {
    let tries = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&tries);
    let load = move || match seen.fetch_add(1, Ordering::Relaxed) {
        0 => Err("the file is gone: /secret/path".to_owned()),
        1 => panic!("a defect"),
        _ => {
            Ok(LoadedEngine { scheduler: scheduler(&model(Some(CHATML))).into(), sequences: SEQUENCES, encoder: None })
        }
    };
    let specs = vec![ModelSpec { name: "weak".into(), aliases: Vec::new(), bytes: 1, load: Box::new(load) }];
    let server = Server::offer("127.0.0.1", 0, settings(), specs, Sharing::default()).unwrap();
    for _ in 0..2 {
        let reply = post(&server, "/v1/chat/completions", &ask("hello"));
        assert_eq!(reply.status, 503);
        assert!(!reply.body.contains("secret"), "{}", reply.body);
    }
    assert_eq!(post(&server, "/v1/chat/completions", &ask("hello")).status, 200);
    server.stop().unwrap();
}

#[test]
fn keys_have_limits_of_their_own() {
    let key = |name: &str, at_once, per_minute| Key { name: name.into(), secret: name.into(), at_once, per_minute };
    let keys = vec![key("one", Some(1), None), key("few", None, Some(2)), key("free", None, None)];
    let server = start_with(Settings { keys, ..settings() }, Some(CHATML));
    let open = |key: &str, body: &Value| {
        let bearer = format!("Bearer {key}");
        send(server.address(), "POST", "/v1/chat/completions", &[("Authorization", &bearer)], &body.to_string())
    };
    let second = || receive(open("one", &ask("hello")));
    wait_until("the limit of requests at once", || {
        let _busy = open("one", &long());
        let reply = second();
        assert!(reply.status == 200 || reply.json()["error"]["code"] == "rate_limit_exceeded", "{}", reply.body);
        reply.status == 429
    });
    wait_until("the end of the first", || second().status == 200);
    assert_eq!(receive(open("free", &ask("hello"))).status, 200);
    let replies: Vec<Reply> = (0..3).map(|_| receive(open("few", &ask("hello")))).collect();
    assert_eq!(replies.iter().map(|r| r.status).collect::<Vec<_>>(), [200, 200, 429]);
    let seconds: u64 = replies[2].header("retry-after").unwrap().parse().unwrap();
    assert!((1..=30).contains(&seconds), "{seconds}");
    server.stop().unwrap();
}

#[test]
fn requests_that_wait_or_run_too_long_are_ended() {
    let limits = Settings { total_limit: Some(Duration::from_millis(40)), ..settings() };
    let server = start_with(limits, Some(CHATML));
    let slow = post(&server, "/v1/chat/completions", &with(long(), json!({"stream": false})));
    assert_eq!((slow.status, slow.json()["error"]["type"].as_str()), (504, Some("timeout_error")), "{}", slow.body);
    assert_eq!(slow.header("x-should-retry"), Some("false"));
    let events = post(&server, "/v1/chat/completions", &long()).events();
    assert_eq!(events.last().unwrap()["error"]["code"], "timeout", "{events:?}");
    wait_until("the end of both", || writing(&server) == 0);
    server.stop().unwrap();

    let limits = Settings { queue_limit: Some(Duration::from_millis(20)), ..settings() };
    let server = start_with(limits, Some(CHATML));
    wait_until("a request that waited too long", || {
        let _busy = send(server.address(), "POST", "/v1/chat/completions", &[], &long().to_string());
        wait_until("the long request", || writing(&server) > 0);
        let waits = post(&server, "/v1/chat/completions", &ask("hello"));
        assert!(waits.status == 200 || waits.json()["error"]["code"] == "queue_full", "{}", waits.body);
        waits.status == 429
    });
    server.stop().unwrap();
}

#[test]
fn a_client_that_takes_nothing_of_its_answer_is_let_go() {
    let server = start_with(Settings { write_timeout: Duration::from_millis(300), ..settings() }, Some(CHATML));
    // Several times what the buffers of two sockets hold.
    let prompts = vec!["go on"; 8];
    let body = json!({"prompt": prompts, "n_predict": 480, "ignore_eos": true, "stream": true, "n_probs": 100});
    let mut idle = send(server.address(), "POST", "/completion", &[], &body.to_string());
    let tasks = || get(&server, "/engine").json()["tasks"].as_u64().unwrap();
    wait_until("the answer", || writing(&server) > 0);
    let before = tasks();
    wait_until("the end of its connection", || writing(&server) == 0 && tasks() < before);
    let mut rest = Vec::new();
    // The connection may have been reset.
    let _ = idle.read_to_end(&mut rest);
    let ends = String::from_utf8_lossy(&rest).matches("\"stop\":true").count();
    assert!(ends < 8, "{} bytes with {ends} ends", rest.len());
}

#[test]
fn browsers_get_the_page_whole_and_nothing_else_may_run_in_it() {
    let key = Key { name: "k".into(), secret: "k".into(), ..Key::default() };
    let server = start_with(Settings { keys: vec![key], ..settings() }, Some(CHATML));
    let fetch = |path: &str, headers: &[(&str, &str)]| receive(send(server.address(), "GET", path, headers, ""));
    let page = fetch("/", &[("Accept", "text/html,application/xhtml+xml")]);
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    assert!(policy.contains("font-src 'self'") && !policy.contains("data:"), "{policy}");
    // What a model wrote may run in its frame, which has no origin and no way out, and only there.
    let preview = fetch("/page/preview.html", &[]);
    let preview = preview.header("content-security-policy").unwrap();
    assert!(
        preview.starts_with("sandbox allow-scripts; default-src 'none'") && !preview.contains("allow-same-origin"),
        "{preview}"
    );
    assert!(
        !preview.contains("connect-src") && !preview.contains("http") && preview.contains("frame-ancestors 'self'"),
        "{preview}"
    );
    assert!(policy.contains("frame-src 'self';"), "{policy}");
    assert_eq!(fetch("/page/kiln.webmanifest", &[]).header("content-type"), Some("application/manifest+json"));
    assert_eq!(fetch("/page/math.woff2", &[]).header("content-type"), Some("font/woff2"));
    assert!(!page.body.contains("http://") && !page.body.contains("https://"), "the page names another place");
    assert_eq!(fetch("/", &[]).body, "Ollama is running");
    // Everything in the folder but its tests is served, and what is asked for again is not sent again.
    let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/page")).unwrap();
    for file in folder.map(|file| file.unwrap().file_name().into_string().unwrap()).filter(|name| name != "test.mjs") {
        let part = fetch(&format!("/page/{file}"), &[]);
        assert_eq!(part.status, 200, "{file}");
        let tag = part.header("etag").unwrap();
        assert_eq!(fetch(&format!("/page/{file}"), &[("If-None-Match", tag)]).status, 304);
    }
    assert_eq!(fetch("/page/../Cargo.toml", &[]).status, 404);
    assert_eq!(fetch("/page/other.js", &[]).status, 404);
    assert_eq!(fetch("/engine", &[]).status, 401);
    let seen = fetch("/engine", &[("x-api-key", "k")]).json();
    assert_eq!((&seen["model"], &seen["sequences"]), (&json!("tiny"), &json!(SEQUENCES)), "{seen}");
    assert!(seen["memory"]["total"].as_u64() > seen["memory"]["free"].as_u64(), "{seen}");
    let times = fetch("/engine/kernels", &[("x-api-key", "k")]).json();
    let kinds = times["kernels"].as_array().unwrap();
    let sum: f64 = kinds.iter().map(|k| k["microseconds"].as_f64().unwrap()).sum();
    assert!(kinds.len() > 3 && (sum - times["microseconds"].as_f64().unwrap()).abs() < 1.0, "{times}");
    server.stop().unwrap();
}

/// A certificate and its key among the files of these tests.
fn certificate(name: &str) -> Tls {
    let [certificates, key] = ["cert.pem", "key.pem"]
        .map(|file| std::fs::read(format!("{}/tests/tls/{name}{file}", env!("CARGO_MANIFEST_DIR"))).unwrap());
    Tls { certificates, key }
}

/// A connection of a client that trusts one certificate alone.
fn trusting(server: &Running, tls: &Tls) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(&tls.certificates).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(config.with_root_certificates(roots).with_no_client_auth());
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let stream = TcpStream::connect(server.address()).unwrap();
    StreamOwned::new(ClientConnection::new(config, name).unwrap(), stream)
}

#[test]
fn tls_is_spoken_with_a_certificate_and_bad_files_are_named() {
    let tls = certificate("");
    let server = start_with(Settings { tls: Some(tls.clone()), ..settings() }, Some(CHATML));
    let mut stream = trusting(&server, &tls);
    stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let reply = receive(&mut stream);
    assert_eq!((reply.status, reply.json()), (200, json!({"status": "ready"})));
    // Somebody who speaks plain HTTP is told what this port speaks.
    let plain = get(&server, "/readyz");
    assert_eq!((plain.status, plain.body.contains("https://")), (400, true), "{}", plain.body);
    server.stop().unwrap();
    let wrong = Tls { certificates: tls.key, key: tls.certificates };
    let error = Server::listen("127.0.0.1", 0, Settings { tls: Some(wrong), ..settings() }).err().unwrap().to_string();
    assert!(error.contains("TLS") && error.contains("PEM"), "{error}");
}

#[test]
fn keys_and_the_certificate_are_renewed_while_the_server_runs() {
    let key = |secret: &str| Key { name: secret.into(), secret: secret.into(), ..Key::default() };
    let (first, next) = (certificate(""), certificate("next-"));
    let with_both = Settings { keys: vec![key("old"), key("stays")], tls: Some(first.clone()), ..settings() };
    let server = start_with(with_both, Some(CHATML));
    let asks = |stream: &mut StreamOwned<ClientConnection, TcpStream>, secret: &str| {
        let head =
            format!("GET /v1/models HTTP/1.1\r\nHost: localhost\r\nx-api-key: {secret}\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).map(|()| receive(stream).status)
    };
    let mut before = trusting(&server, &first);
    // The handshake is done before anything changes.
    before.conn.complete_io(&mut before.sock).unwrap();
    let statuses = |tls: &Tls| ["old", "stays", "new"].map(|secret| asks(&mut trusting(&server, tls), secret).unwrap());
    assert_eq!(statuses(&first), [200, 200, 401]);
    // What is wrong changes nothing, and no server with keys becomes one without.
    let wrong = Tls { certificates: next.certificates.clone(), key: first.key.clone() };
    for (keys, tls) in [(vec![key("new")], Some(wrong)), (Vec::new(), Some(next.clone()))] {
        assert!(server.renew(Secrets { keys, tls }).is_err());
        assert_eq!(statuses(&first), [200, 200, 401]);
    }
    server.renew(Secrets { keys: vec![key("stays"), key("new")], tls: Some(next.clone()) }).unwrap();
    assert_eq!(statuses(&next), [401, 200, 200]);
    assert!(asks(&mut trusting(&server, &first), "stays").is_err(), "new connections get the new certificate");
    assert_eq!(asks(&mut before, "stays").unwrap(), 200, "a connection from before goes on");
    server.stop().unwrap();
}

#[test]
fn the_middle_is_filled_in_by_models_that_can() {
    let server = start();
    let gap = json!({"input_prefix": "fn a() {", "input_suffix": "}", "n_predict": 8, "temperature": 0});
    assert_eq!(post(&server, "/infill", &gap).status, 501);
    server.stop().unwrap();
    let server = Server::listen("127.0.0.1", 0, settings()).unwrap();
    let able = model_with(Some(CHATML), |metadata| {
        for (key, id) in [("pre", 33u32), ("suf", 34), ("mid", 35)] {
            metadata.set(format!("tokenizer.ggml.fim_{key}_token_id"), id);
        }
    });
    server.ready(scheduler(&able), SEQUENCES);
    let gap = with(gap, json!({"ignore_eos": true}));
    let filled = post(&server, "/infill", &gap).json();
    assert_eq!((&filled["tokens_predicted"], &filled["stop_type"]), (&json!(8), &json!("limit")), "{filled}");
    // Three marks stand around the two texts.
    let plain = post(&server, "/tokenize", &json!({"content": "fn a() {", "add_special": true})).json();
    let rest = post(&server, "/tokenize", &json!({"content": "}"})).json();
    let count = |v: &Value| v["tokens"].as_array().unwrap().len();
    assert_eq!(filled["tokens_evaluated"], count(&plain) + count(&rest) + 3, "{filled}");
    let body = json!({"prompt": "fn a() {", "suffix": "}", "max_tokens": 8, "temperature": 0, "ignore_eos": true});
    let other = post(&server, "/v1/completions", &body).json();
    assert_eq!(other["choices"][0]["text"], filled["content"], "{other}");
    server.stop().unwrap();
}

#[test]
fn the_dashboard_and_the_alerts_ask_for_metrics_that_there_are() {
    let server = start();
    post(&server, "/v1/chat/completions", &ask("hello"));
    let metrics = get(&server, "/metrics").body;
    for (file, least) in [("grafana/kiln.json", 8), ("alerts.yml", 6)] {
        let path = format!("{}/../../deploy/{file}", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path).unwrap();
        let mut names: Vec<&str> = text
            .split(|c: char| c != ':' && c != '_' && !c.is_ascii_alphanumeric())
            .filter(|word| ["vllm:", "kiln:", "process_"].iter().any(|start| word.starts_with(start)))
            .collect();
        names.sort_unstable();
        names.dedup();
        assert!(names.len() >= least, "{file}: {names:?}");
        for name in names {
            let is_there =
                metrics.lines().any(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
            assert!(is_there, "{file}: {name} is not among\n{metrics}");
        }
    }
    server.stop().unwrap();
}

#[test]
fn requests_are_counted_by_route_and_status_and_connections_while_they_are_open() {
    let alice = Key { name: "alice".into(), secret: "alice".into(), ..Key::default() };
    let server = start_with(Settings { keys: vec![alice], open_metrics: true, ..settings() }, Some(CHATML));
    let metrics = || get(&server, "/metrics").body;
    let value = |metrics: &str, name: &str, labels: &[&str]| {
        let mut lines = metrics.lines().filter(|line| {
            let rest = line.strip_prefix(name).unwrap_or_default();
            rest.starts_with(['{', ' ']) && labels.iter().all(|label| rest.contains(label))
        });
        let found = lines.next().map_or(0.0, |line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
        assert!(lines.next().is_none(), "{name} {labels:?} is there twice:\n{metrics}");
        found
    };
    let chat = |who: &str, body: &str| {
        receive(send(server.address(), "POST", "/v1/chat/completions", &[("x-api-key", who)], body)).status
    };
    assert_eq!((chat("alice", &ask("hello").to_string()), chat("alice", &ask("again").to_string())), (200, 200));
    assert_eq!((chat("eve", &ask("hello").to_string()), chat("alice", "{")), (401, 400));
    for path in ["/none", "/none/at/all?of=these"] {
        let reply = receive(send(server.address(), "GET", path, &[("x-api-key", "alice")], ""));
        assert_eq!(reply.status, 404);
    }
    let told = metrics();
    let counted = |method: &str, route: &str, status: u16| {
        let labels = [format!("method=\"{method}\""), format!("route=\"{route}\""), format!("status=\"{status}\"")];
        value(&told, "kiln:http_requests_total", &labels.each_ref().map(String::as_str))
    };
    for (status, want) in [(200, 2.0), (401, 1.0), (400, 1.0), (429, 0.0)] {
        assert_eq!(counted("POST", "/v1/chat/completions", status), want, "{status}:\n{told}");
    }
    // Clients cannot make up labels.
    assert_eq!(counted("GET", "other", 404), 2.0, "{told}");
    assert!(!told.contains("/none"), "{told}");
    // Connections that say nothing are seen, and go when they are closed.
    let idle: Vec<TcpStream> = (0..3).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    let open = || value(&metrics(), "kiln:http_connections", &[]);
    wait_until("three more connections", || open() >= 4.0);
    drop(idle);
    wait_until("only the one that asks", || open() <= 1.0);
    let told = metrics();
    assert!(value(&told, "kiln:http_connections_opened_total", &[]) >= 10.0, "{told}");
    assert_eq!(value(&told, "kiln:preparation_queue", &[]), 0.0);
    assert!(value(&told, "process_resident_memory_bytes", &[]) > 1e6, "{told}");
    server.stop().unwrap();
}

#[test]
fn saved_slots_belong_to_their_key() {
    let folder = std::env::temp_dir().join(format!("kiln-slots-keys-{}", std::process::id()));
    let key = |name: &str| Key { name: name.into(), secret: name.into(), ..Key::default() };
    let here = Settings { slots_folder: Some(folder.clone()), keys: vec![key("alice"), key("bob")], ..settings() };
    let server = start_with(here, Some(CHATML));
    let call = |who: &str, path: &str, body: Value| {
        receive(send(server.address(), "POST", path, &[("x-api-key", who)], &body.to_string()))
    };
    let story = with(ask(&"a long story ".repeat(20)), json!({"id_slot": 1}));
    let saved = |name: &str| json!({"filename": name});
    assert_eq!(call("alice", "/v1/chat/completions", story).status, 200);
    let first = call("alice", "/slots/1?action=save", saved("story")).json();
    assert_eq!(call("bob", "/slots/2?action=restore", saved("story")).status, 400, "bob has no such file");
    assert_eq!(call("bob", "/v1/chat/completions", with(ask("short"), json!({"id_slot": 2}))).status, 200);
    assert_eq!(call("bob", "/slots/2?action=save", saved("story")).status, 200);
    let again = call("alice", "/slots/3?action=restore", saved("story")).json();
    assert_eq!(again["n_restored"], first["n_saved"], "bob's file has not replaced it");
    for own in std::fs::read_dir(&folder).unwrap() {
        let mode = |path: &std::path::Path| {
            std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(path).unwrap().permissions()) & 0o777
        };
        let own = own.unwrap().path();
        assert_eq!((mode(&own), mode(&own.join("story"))), (0o700, 0o600), "{}", own.display());
    }
    for more in 0..63 {
        assert_eq!(call("bob", "/slots/2?action=save", saved(&format!("more{more}"))).status, 200);
    }
    let full = call("bob", "/slots/2?action=save", saved("one too many"));
    assert!(full.status == 400 && full.body.contains("64 slots"), "{}", full.body);
    assert_eq!(call("bob", "/slots/2?action=save", saved("story")).status, 200, "over one of its own");
    server.stop().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn slots_are_saved_and_brought_back() {
    let folder = std::env::temp_dir().join(format!("kiln-slots-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let here = || Settings { slots_folder: Some(folder.clone()), ..settings() };
    let prompt = with(ask(&"a long story ".repeat(20)), json!({"id_slot": 2}));
    let cached = |reply: &Value| reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let server = start_with(here(), Some(CHATML));
    let first = post(&server, "/v1/chat/completions", &prompt).json();
    assert_eq!(cached(&first), 0);
    let saved = post(&server, "/slots/2?action=save", &json!({"filename": "story.bin"})).json();
    let all = first["usage"]["total_tokens"].as_u64().unwrap();
    assert_eq!(saved["n_saved"], all, "{saved}");
    assert_eq!(post(&server, "/slots/3?action=save", &json!({"filename": "x"})).status, 400, "nothing is in it");
    assert_eq!(post(&server, "/slots/9?action=save", &json!({"filename": "x"})).status, 400);
    assert_eq!(post(&server, "/slots/2?action=save", &json!({"filename": "../x"})).status, 400);
    assert_eq!(post(&server, "/slots/2?action=erase", &json!({})).json()["n_erased"], all);
    server.stop().unwrap();
    // Another process would not know the beginning; a restored slot does.
    let server = start_with(here(), Some(CHATML));
    let restored = post(&server, "/slots/0?action=restore", &json!({"filename": "story.bin"})).json();
    assert_eq!(restored["n_restored"], all, "{restored}");
    let again = post(&server, "/v1/chat/completions", &prompt).json();
    assert!(cached(&again) > 100, "{again}");
    assert_eq!(text_of(&again), text_of(&first));
    std::fs::write(folder.join("bad.bin"), b"no state").unwrap();
    assert_eq!(post(&server, "/slots/0?action=restore", &json!({"filename": "bad.bin"})).status, 400);
    assert_eq!(post(&server, "/slots/0?action=restore", &json!({"filename": "none.bin"})).status, 400);
    server.stop().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
}

/// The tiny model with an adapter for some of its matrices.
fn adapted() -> Running {
    let plain = Arc::into_inner(model(Some(CHATML))).unwrap();
    let mut metadata = Metadata::new();
    for (key, value) in [("general.type", "adapter"), ("adapter.type", "lora"), ("general.architecture", "llama")] {
        metadata.set(key, value);
    }
    metadata.set("adapter.lora.alpha", kiln_gguf::Value::F32(8.0));
    let mut writer = Writer::new(metadata);
    for info in plain.gguf.tensors().iter().filter(|t| t.name.contains("ffn_down")) {
        let [input, output, ..] = info.shape;
        for (end, dims) in [("lora_a", [input, 2]), ("lora_b", [2, output])] {
            let value = |i: usize| ((i * 37 % 101) as f32 / 50.0 - 1.0).to_le_bytes();
            let values: Vec<u8> = (0..dims[0] * dims[1]).flat_map(value).collect();
            writer.add(&format!("{}.{end}", info.name), &dims, kiln_gguf::TensorType::F32, values).unwrap();
        }
    }
    let file = Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap();
    let adapter = Adapter::new(&file, "adapter.gguf", 1.0, &plain).unwrap();
    let model = Arc::new(plain.with_adapters(vec![adapter]).unwrap());
    let server = Server::listen("127.0.0.1", 0, settings()).unwrap();
    server.ready(scheduler(&model), SEQUENCES);
    server
}

#[test]
fn adapters_count_as_strongly_as_requests_say() {
    let (plain, server) = (start(), adapted());
    let say = |server: &Running, more: Value| {
        let body = with(ask("hello there"), with(json!({"max_tokens": 12, "temperature": 0}), more));
        text_of(&post(server, "/v1/chat/completions", &body).json())
    };
    let (bare, full) = (say(&plain, json!({})), say(&server, json!({})));
    assert_ne!(bare, full, "the adapter changes nothing");
    // Said in the request, whatever the cache holds of the same prompt; who is not named does not count.
    for _ in 0..2 {
        assert_eq!(say(&server, json!({"lora": []})), bare);
        assert_eq!(say(&server, json!({"lora": [{"id": 0, "scale": 0}]})), bare);
        assert_eq!(say(&server, json!({"lora": [{"id": 0, "scale": 1.0}]})), full);
    }
    // Said for all who do not say.
    let told = get(&server, "/lora-adapters").json();
    assert_eq!(told, json!([{"id": 0, "path": "adapter.gguf", "scale": 1.0}]));
    assert_eq!(post(&server, "/lora-adapters", &json!([{"id": 0, "scale": 0.0}])).status, 200);
    assert_eq!(get(&server, "/lora-adapters").json()[0]["scale"], 0.0);
    assert_eq!(say(&server, json!({})), bare);
    assert_eq!(say(&server, json!({"lora": [{"id": 0, "scale": 1.0}]})), full);
    assert_eq!(post(&server, "/lora-adapters", &json!([{"id": 0, "scale": 1.0}])).status, 200);
    assert_eq!(say(&server, json!({})), full);
    // What is wrong is said with the field.
    for wrong in [
        json!([{"id": 7, "scale": 1.0}]),
        json!([{"id": 0}]),
        json!({"id": 0, "scale": 1}),
        json!([{"id": 0, "scale": "x"}]),
    ] {
        let reply = post(&server, "/v1/chat/completions", &with(ask("hello"), json!({"lora": wrong})));
        assert_eq!(reply.status, 400, "{}", reply.body);
        assert!(reply.json()["error"]["param"].as_str().unwrap().starts_with("lora"), "{}", reply.body);
        assert_eq!(post(&server, "/lora-adapters", &wrong).status, 400);
    }
    let none = post(&plain, "/v1/chat/completions", &with(ask("hello"), json!({"lora": [{"id": 0, "scale": 1}]})));
    assert!(none.body.contains("there is no adapter 0"), "{}", none.body);
}

#[test]
fn one_server_listens_on_several_addresses() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        eprintln!("left out: this machine has no IPv6");
        return;
    }
    let server = Server::listen("127.0.0.1, ::1", 0, settings()).unwrap();
    server.ready(scheduler(&model(Some(CHATML))), SEQUENCES);
    let port = server.address().port();
    for address in [format!("127.0.0.1:{port}"), format!("[::1]:{port}")] {
        let reply = receive(send(address.parse().unwrap(), "GET", "/readyz", &[], ""));
        assert_eq!(reply.status, 200, "{address}: {}", reply.body);
    }
    server.stop().unwrap();
    assert!(Server::listen("127.0.0.1,nowhere.invalid", 0, settings()).is_err());
}

#[test]
fn metrics_have_the_names_and_shapes_that_vllm_has() {
    let server = start();
    for _ in 0..2 {
        let wish = with(ask(&"the same beginning ".repeat(12)), json!({"n": 2}));
        assert_eq!(post(&server, "/v1/chat/completions", &wish).status, 200);
    }
    let metrics = get(&server, "/metrics").body;
    let labelled = |name: &str, label: &str| {
        let line = metrics.lines().find(|line| line.starts_with(name) && line.contains(label));
        let line = line.unwrap_or_else(|| panic!("{name} {label} is not in\n{metrics}"));
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap_or_else(|why| panic!("{why}: {line}"))
    };
    let value = |name: &str| labelled(name, "");
    assert_eq!(labelled("vllm:num_requests_waiting_by_reason{", "capacity"), 0.0);
    assert_eq!(value("vllm:num_preemptions_total{"), 0.0);
    let source = |name: &str| labelled("vllm:prompt_tokens_by_source_total{", name);
    let (computed, cached) = (source("local_compute"), source("local_cache_hit"));
    assert!(computed > 0.0 && cached > 0.0, "{metrics}");
    assert_eq!(labelled("kiln:prefix_cache_hit_tokens_total{", "device"), cached);
    assert_eq!(computed + cached, value("vllm:prompt_tokens_total{"));
    assert_eq!(value("vllm:request_prefill_kv_computed_tokens_sum{"), computed);
    assert_eq!(value("vllm:request_max_num_generation_tokens_sum{"), 24.0, "the longest of two texts, twice");
    // Prompts that were computed and all tokens but the last of each text went through the engine.
    let steps = value("vllm:iteration_tokens_total_sum{");
    assert!(steps >= computed + 2.0 * 22.0, "{steps} of {computed}");
    assert_eq!(value("vllm:iteration_tokens_total_bucket{le=\"+Inf\""), value("vllm:iteration_tokens_total_count{"));
    assert!(value("vllm:iteration_tokens_total_bucket{le=\"8.0\"") > 0.0);
    server.stop().unwrap();
}
