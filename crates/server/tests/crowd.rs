//! A server that strangers crowd: silent connections, long bodies, prompts that nobody waits for. Whoever asks for little is served meanwhile.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod client;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use client::*;
use kiln_engine::run::{Events, LogitsHook, Request, Scheduler};
use kiln_server::{LoadEngine, LoadedEngine, ModelSpec, Running, Server, Settings, Sharing};
use serde_json::json;

const PLACES: usize = 8;

fn small() -> Settings {
    Settings { connections: PLACES, connections_per_address: Some(PLACES), ..settings() }
}

/// What a client of HTTP/2 begins with: the preface and an empty SETTINGS frame.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// A connection that says this and nothing more.
fn silent(server: &Running, words: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(words).unwrap();
    stream
}

/// Waits until the server closes a connection.
fn until_closed(mut stream: &TcpStream) -> Duration {
    let began = Instant::now();
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "it stayed open"),
    }
    began.elapsed()
}

fn writing(server: &Running) -> u64 {
    get(server, "/engine").json()["load"]["writing"].as_u64().unwrap_or(0)
}

#[test]
fn silent_connections_keep_nobody_out() {
    let server = start_with(small(), Some(CHATML));
    for words in [PREFACE, b"".as_slice(), b"GET / HTTP/1.1\r\nHost: x\r\n"] {
        let crowd: Vec<TcpStream> = (0..4 * PLACES).map(|_| silent(&server, words)).collect();
        let began = Instant::now();
        assert_eq!(get(&server, "/livez").status, 200);
        assert_eq!(post(&server, "/v1/chat/completions", &ask("hello")).status, 200);
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        // The first ones had to go, the last ones are still there.
        until_closed(&crowd[0]);
        let last = &crowd[4 * PLACES - 1];
        last.set_nonblocking(true).unwrap();
        let mut greeting = vec![0; 256];
        let still = (&mut { last }).read(&mut greeting);
        assert!(!matches!(still, Ok(0)), "the longest idle connection goes first");
    }
    server.stop().unwrap();
}

#[test]
fn requests_in_flight_stay_and_probes_are_answered_in_a_full_server() {
    let server = start_with(small(), Some(CHATML));
    let address = server.address();
    // Requests that were begun and whose bodies are still coming hold all places.
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    );
    let body = with(ask("hello"), json!({"max_tokens": 2})).to_string();
    let head = format!("{head}Expect: 100-continue\r\nContent-Length: {}\r\n\r\n", body.len());
    let begun = || {
        let mut stream = silent(&server, head.as_bytes());
        let mut told = [0; 25];
        stream.read_exact(&mut told).unwrap();
        assert_eq!(&told, b"HTTP/1.1 100 Continue\r\n\r\n");
        stream
    };
    let mut busy: Vec<TcpStream> = (0..PLACES).map(|_| begun()).collect();
    assert_eq!(post(&server, "/v1/chat/completions", &ask("hello")).status, 503);
    let refused = post(&server, "/api/chat", &ask("hello"));
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("5")), "{}", refused.body);
    assert!(refused.json()["error"].as_str().unwrap().contains("connections"), "{}", refused.body);
    for probe in ["/livez", "/readyz", "/health"] {
        let reply = get(&server, probe);
        assert_eq!((reply.status, reply.header("connection")), (200, Some("close")), "{probe}");
    }
    for mut stream in busy.drain(..) {
        stream.write_all(body.as_bytes()).unwrap();
        let reply = receive(stream);
        assert_eq!(reply.status, 200, "{}", reply.body);
    }
    wait_until("room", || post(&server, "/v1/chat/completions", &ask("hello")).status == 200);
    server.stop().unwrap();
}

#[test]
fn one_address_has_only_its_share() {
    let server = start_with(Settings { connections_per_address: Some(2), ..small() }, Some(CHATML));
    let crowd: Vec<TcpStream> = (0..3).map(|_| silent(&server, b"")).collect();
    until_closed(&crowd[0]);
    assert_eq!(get(&server, "/livez").status, 200);
    server.stop().unwrap();
}

#[test]
fn idle_connections_are_closed_and_silent_clients_of_http2_found_out() {
    let (short, never) = (Duration::from_millis(300), Duration::from_secs(600));
    let request_defaults = || Settings { header_timeout: never, idle_timeout: never, http2_ping: never, ..settings() };
    let alive = |server: &Running| {
        let mut stream = silent(server, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n");
        let mut head = [0; 12];
        stream.read_exact(&mut head).unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        stream
    };
    // A client that never asks.
    let server = start_with(Settings { header_timeout: short, ..request_defaults() }, Some(CHATML));
    for words in [PREFACE, b"", b"GET /"] {
        assert!(until_closed(&silent(&server, words)) < Duration::from_secs(15), "{words:?}");
    }
    drop(server);
    // One that asks no more, but is not cut off while it is answered.
    let server = start_with(Settings { idle_timeout: short, ..request_defaults() }, Some(CHATML));
    until_closed(&alive(&server));
    let reply = post(&server, "/v1/chat/completions", &with(ask("go on"), json!({"max_tokens": 480})));
    assert_eq!(reply.json()["usage"]["completion_tokens"], 480);
    drop(server);
    // One of HTTP/2 that answers no ping.
    let server = start_with(Settings { http2_ping: short, ..request_defaults() }, Some(CHATML));
    assert!(until_closed(&silent(&server, PREFACE)) < Duration::from_secs(15));
}

#[test]
fn prompts_that_cannot_fit_are_refused_by_their_length() {
    let server = start();
    // One word, which takes longest to tokenise.
    let huge = "a".repeat(4 << 20);
    let began = Instant::now();
    let messages = json!({"messages": [{"role": "user", "content": huge}]});
    let reply = post(&server, "/v1/chat/completions", &messages);
    assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (400, Some("context_length_exceeded")));
    assert!(reply.body.contains("has at least "), "{}", &reply.body[..reply.body.len().min(300)]);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": huge})),
        ("/completion", json!({"prompt": huge})),
        ("/api/generate", json!({"prompt": huge, "raw": true})),
        ("/v1/messages", with(messages.clone(), json!({"max_tokens": 4}))),
    ] {
        assert_eq!(post(&server, path, &body).status, 400, "{path}");
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    // What is longer than the context by little has its tokens counted to the context's end, and no further.
    let reply = post(&server, "/v1/completions", &json!({"prompt": "word ".repeat(1000)}));
    let counted = reply.json()["error"]["n_prompt_tokens"].as_u64().unwrap();
    assert!((513..=520).contains(&counted), "{}", reply.body);
    server.stop().unwrap();
}

#[test]
fn bodies_of_many_small_values_are_refused_before_they_are_parsed() {
    let server = start();
    let ids = |count: usize| format!(r#"{{"prompt":[{}5],"max_tokens":1}}"#, "5,".repeat(count));
    let ask = |body: &str| receive(send(server.address(), "POST", "/v1/completions", &[], body));
    // As many as any context has are counted as tokens; more than that would take a hundred bytes each.
    let long = ask(&ids(200_000));
    assert_eq!((long.status, long.json()["error"]["code"].as_str()), (400, Some("context_length_exceeded")));
    let many = ask(&ids(2_000_000));
    assert_eq!((many.status, many.json()["error"]["code"].as_str()), (413, Some("request_too_large")), "{}", many.body);
    assert!(many.body.contains("JSON values"), "{}", many.body);
    server.stop().unwrap();
}

#[test]
fn a_model_that_takes_long_to_load_keeps_nobody_from_another() {
    let (may_load, gate) = std::sync::mpsc::channel::<()>();
    let gate = std::sync::Mutex::new(gate);
    let opened =
        || LoadedEngine { scheduler: scheduler(&model(Some(CHATML))).into(), sequences: SEQUENCES, encoder: None };
    let slow = move || {
        let _ = gate.lock().unwrap().recv();
        Ok(opened())
    };
    let offer = |name: &str, load: LoadEngine| ModelSpec { name: name.into(), aliases: Vec::new(), bytes: 1, load };
    let specs = vec![offer("slow", Box::new(slow)), offer("quick", Box::new(move || Ok(opened())))];
    let sharing = Sharing { keep: Some(Duration::from_secs(60)), budget: None };
    let server = Server::offer("127.0.0.1", 0, Settings { queue: 8, ..settings() }, specs, sharing).unwrap();
    let ask_of = |name: &str| with(ask("hello"), json!({"model": name}));
    assert_eq!(post(&server, "/v1/chat/completions", &ask_of("quick")).status, 200);
    // More of them than the server lets wait: the last ones are refused, and only they.
    let body = ask_of("slow").to_string();
    let crowd: Vec<TcpStream> =
        (0..100).map(|_| send(server.address(), "POST", "/v1/chat/completions", &[], &body)).collect();
    let waiting = || {
        let metrics = get(&server, "/metrics").body;
        let line = metrics.lines().find(|l| l.starts_with("vllm:num_requests_waiting{") && l.contains("slow"));
        line.and_then(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).unwrap_or(0.0)
    };
    wait_until("a crowd", || waiting() >= 70.0);
    assert_eq!(post(&server, "/v1/chat/completions", &ask_of("slow")).status, 429);
    assert_eq!(post(&server, "/v1/chat/completions", &ask_of("quick")).status, 200);
    may_load.send(()).unwrap();
    let statuses: Vec<u16> = crowd.into_iter().map(|stream| receive(stream).status).collect();
    assert!(statuses.iter().all(|status| [200, 429].contains(status)), "{statuses:?}");
    assert!(statuses.contains(&200));
    server.stop().unwrap();
}

/// A server of two models. A step of the first one's engine lasts until the sender is dropped.
fn with_a_held_engine() -> (Running, Sender<()>, Events) {
    let engine = Arc::new(OnceLock::new());
    let known: Arc<OnceLock<Weak<Scheduler>>> = Arc::clone(&engine);
    let opened = || Arc::new(scheduler(&model(Some(CHATML))));
    let loaded = |scheduler| Ok(LoadedEngine { scheduler, sequences: SEQUENCES, encoder: None });
    let held = move || {
        let scheduler = opened();
        let _ = known.set(Arc::downgrade(&scheduler));
        loaded(scheduler)
    };
    let offer = |name: &str, load: LoadEngine| ModelSpec { name: name.into(), aliases: Vec::new(), bytes: 1, load };
    let specs = vec![offer("held", Box::new(held)), offer("free", Box::new(move || loaded(opened())))];
    let sharing = Sharing { keep: Some(Duration::from_secs(600)), budget: None };
    let server = Server::offer("127.0.0.1", 0, settings(), specs, sharing).unwrap();
    for name in ["held", "free"] {
        let reply = post(&server, "/v1/chat/completions", &with(ask("hello"), json!({"model": name})));
        assert_eq!(reply.status, 200, "{}", reply.body);
    }
    let (go_on, gate) = channel::<()>();
    let (begun, begins) = channel();
    let hook = LogitsHook::new(move |_, _| {
        let _ = begun.send(());
        let _ = gate.recv();
        None
    });
    let request = Request { hook: Some(hook), limit: Some(1), ..Request::new(vec![40]) };
    let events = engine.get().and_then(Weak::upgrade).unwrap().generate(request);
    begins.recv_timeout(Duration::from_secs(20)).unwrap();
    (server, go_on, events)
}

#[test]
fn a_model_that_takes_long_to_end_keeps_nobody_waiting() {
    let (server, go_on, _events) = with_a_held_engine();
    // Its end waits for the step, and holds no lock that others need.
    let end = json!({"model": "held", "keep_alive": 0}).to_string();
    let ended = send(server.address(), "POST", "/api/generate", &[], &end);
    let state = || get(&server, "/v1/models").json()["data"][0]["status"]["value"].clone();
    wait_until("the end of the model", || state() == "unloaded");
    assert_eq!((get(&server, "/livez").status, get(&server, "/readyz").status), (200, 200));
    let free = with(ask("hello"), json!({"model": "free"}));
    assert_eq!(post(&server, "/v1/chat/completions", &free).status, 200);
    drop(go_on);
    assert_eq!(receive(ended).json()["done_reason"], "unload");
    server.stop().unwrap();
}

#[test]
fn looking_at_a_busy_engine_takes_no_place_from_requests() {
    let (server, go_on, _events) = with_a_held_engine();
    // More of them than requests are prepared at once; each waits until the engine tells its memory.
    let looks: Vec<TcpStream> = (0..24).map(|_| send(server.address(), "GET", "/engine?model=held", &[], "")).collect();
    std::thread::sleep(Duration::from_millis(500));
    let began = Instant::now();
    let free = with(ask("hello"), json!({"model": "free"}));
    assert_eq!(post(&server, "/v1/chat/completions", &free).status, 200);
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    drop(go_on);
    assert!(looks.into_iter().all(|look| receive(look).status == 200));
    server.stop().unwrap();
}

#[test]
fn ambiguous_requests_are_refused() {
    let server = start();
    let two = silent(&server, b"GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nConnection: close\r\n\r\n");
    assert_eq!(receive(two).status, 400);
    // Of two lengths the chunks count, and nothing behind them is taken for another request: the connection ends (RFC 9112, 6.3).
    let body = json!({"content": "a"}).to_string();
    let chunks = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    for lengths in
        ["Content-Length: 4\r\nTransfer-Encoding: chunked", "Transfer-Encoding: chunked\r\nContent-Length: 4"]
    {
        let head = format!(
            "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{lengths}\r\n\r\n"
        );
        let hidden = "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n";
        let mut stream = silent(&server, format!("{head}{chunks}{hidden}").as_bytes());
        let mut answers = Vec::new();
        // What was sent behind the body may reset the connection.
        let _ = stream.read_to_end(&mut answers);
        let answers = String::from_utf8(answers).unwrap();
        assert_eq!(answers.matches("HTTP/1.1 ").count(), 1, "{answers}");
        assert!(answers.contains("\"tokens\"") && answers.contains("connection: close"), "{answers}");
    }
    server.stop().unwrap();
}

#[test]
fn work_ends_with_its_client() {
    let server = start();
    let gauge = |name: &str| {
        let metrics = get(&server, "/metrics").body;
        let line = metrics.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {metrics}"));
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    let prepared = || gauge("kiln:request_body_bytes ");
    // The client of a long text leaves while its tokens are counted.
    let body = json!({"content": "b".repeat(7 << 20)}).to_string();
    let stream = send(server.address(), "POST", "/tokenize", &[], &body);
    wait_until("the text to be tokenised", || prepared() > 1e6);
    drop(stream);
    let began = Instant::now();
    wait_until("the end of the work", || prepared() == 0.0);
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    assert_eq!(writing(&server), 0);
    // More of them than are tokenised at once are seen to wait, until they leave too.
    let body = json!({"content": "b".repeat(2 << 20)}).to_string();
    let crowd: Vec<TcpStream> = (0..12).map(|_| send(server.address(), "POST", "/tokenize", &[], &body)).collect();
    wait_until("a queue", || gauge("kiln:preparation_queue ") >= 1.0);
    drop(crowd);
    wait_until("an empty queue", || gauge("kiln:preparation_queue ") == 0.0 && prepared() == 0.0);
    server.stop().unwrap();
}
