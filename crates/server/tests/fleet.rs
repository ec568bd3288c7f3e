//! One server among many behind a gateway: what probes get, when a stream has its status, how the server goes down, whose request it is.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod client;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use client::*;
use kiln_engine::model::Adapter;
use kiln_engine::run::{Cancel, Request, Scheduler};
use kiln_gguf::{Gguf, Metadata, Value as MetadataValue, Writer};
use kiln_server::{Error, Key, LoadedEngine, NamedAdapter, RequestDefaults, Running, Server, Settings};
use serde_json::{Value, json};

fn endless() -> Value {
    with(ask("go on"), json!({"max_tokens": 480, "stream": true}))
}

/// An engine that gets on with nothing until it is let go.
struct Held {
    go: Sender<()>,
    cancel: Cancel,
    /// Its end waits for the engine.
    _scheduler: Arc<Scheduler>,
}

impl Held {
    fn new(scheduler: Arc<Scheduler>) -> Held {
        let (go, held) = channel::<()>();
        let (begin, begun) = channel::<()>();
        let mut told = false;
        let cancel = scheduler.submit(Request { limit: Some(400), ..Request::new(vec![5, 6, 7]) }, move |_| {
            if !std::mem::replace(&mut told, true) {
                begin.send(()).unwrap();
                // Who holds it may be gone.
                let _ = held.recv();
            }
            true
        });
        begun.recv().unwrap();
        Held { go, cancel, _scheduler: scheduler }
    }

    fn let_go(self) {
        self.cancel.cancel();
        self.go.send(()).unwrap();
    }
}

/// A server whose engine is held.
fn held(settings: Settings) -> (Running, Held) {
    let server = Server::listen("127.0.0.1", 0, settings).unwrap();
    let scheduler = Arc::new(scheduler(&model(Some(CHATML))));
    server.ready_with(LoadedEngine { scheduler: Arc::clone(&scheduler), sequences: SEQUENCES, encoder: None });
    let held = Held::new(scheduler);
    (server, held)
}

/// The first bytes that come within a time.
fn first_bytes(stream: &mut TcpStream, time: Duration) -> Option<String> {
    stream.set_read_timeout(Some(time)).unwrap();
    let mut bytes = [0; 15];
    let got = stream.read_exact(&mut bytes).ok().map(|()| String::from_utf8_lossy(&bytes).into_owned());
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    got
}

fn in_flight(address: SocketAddr) -> u64 {
    receive(send(address, "GET", "/load", &[], "")).json()["server_load"].as_u64().unwrap()
}

#[test]
fn probes_need_no_host_and_all_else_does() {
    let server = start();
    for path in ["/livez", "/readyz", "/health", "/ping", "/health_generate"] {
        let mut plain = TcpStream::connect(server.address()).unwrap();
        plain.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).unwrap();
        assert_eq!(receive(plain).status, 200, "{path}");
        let named = receive(send(server.address(), "GET", path, &[("Host", "10.1.2.3")], ""));
        assert_eq!(named.status, 200, "{path}");
    }
    for path in ["/v1/models", "/metrics", "/slots"] {
        let named = receive(send(server.address(), "GET", path, &[("Host", "10.1.2.3")], ""));
        assert_eq!(named.status, 403, "{path}");
    }
    server.stop().unwrap();
}

#[test]
fn gateways_find_what_they_look_for() {
    let server = start_with(Settings { replica: "rack-7".into(), ..settings() }, Some(CHATML));
    // smg takes a server that answers these two for vLLM, and labels it by them.
    assert!(get(&server, "/version").json()["version"].is_string());
    let info = get(&server, "/server_info").json();
    assert!(
        info["served_model_name"] == "tiny" && info["max_model_len"].as_u64() > Some(0) && info["version"].is_string()
    );
    let loads = get(&server, "/v1/loads").json();
    let load = &loads["loads"][0];
    assert!(load["num_running_reqs"] == 0 && load["num_waiting_reqs"] == 0 && load["token_usage"] == 0.0, "{loads}");
    assert!(load["max_total_num_tokens"].as_u64() >= Some(512), "{loads}");
    assert_eq!(get(&server, "/load").json(), json!({"server_load": 0}));
    assert_eq!(post(&server, "/ping", &json!({})).status, 200);
    // Who answered is told with every answer, also with refusals.
    for path in ["/readyz", "/v1/models", "/nowhere"] {
        assert_eq!(get(&server, path).header("x-kiln-replica"), Some("rack-7"), "{path}");
    }
    let metrics = get(&server, "/metrics").body;
    let build = metrics.lines().find(|line| line.starts_with("kiln:build_info{")).unwrap();
    assert!(build.contains("replica=\"rack-7\"") && build.contains("version="), "{build}");
    server.stop().unwrap();
    // Without a name nothing is told.
    let server = start();
    assert_eq!(get(&server, "/readyz").header("x-kiln-replica"), None);
    server.stop().unwrap();
}

#[test]
fn a_stream_has_its_status_with_its_first_token() {
    let late = |time| Settings { late_headers: time, ..settings() };
    // At once, as long as nobody asks for another thing.
    let (server, engine) = held(late(Duration::ZERO));
    let mut stream = send(server.address(), "POST", "/v1/chat/completions", &[], &endless().to_string());
    assert_eq!(first_bytes(&mut stream, Duration::from_secs(20)).as_deref(), Some("HTTP/1.1 200 OK"));
    drop(stream);
    engine.let_go();
    server.stop().unwrap();

    let (server, engine) = held(late(Duration::from_secs(30)));
    let streams = [
        ("/v1/chat/completions", endless()),
        ("/v1/completions", json!({"prompt": "go on", "max_tokens": 9, "stream": true})),
        ("/completion", json!({"prompt": "go on", "n_predict": 9, "stream": true})),
        ("/v1/messages", with(ask("go on"), json!({"max_tokens": 9, "stream": true}))),
        ("/v1/responses", json!({"input": "go on", "max_output_tokens": 9, "stream": true})),
        ("/api/generate", json!({"prompt": "go on", "options": {"num_predict": 9}})),
    ];
    let mut open: Vec<TcpStream> =
        streams.iter().map(|(path, body)| send(server.address(), "POST", path, &[], &body.to_string())).collect();
    wait_until("all of them", || in_flight(server.address()) >= streams.len() as u64);
    for (stream, (path, _)) in open.iter_mut().zip(&streams) {
        assert_eq!(first_bytes(stream, Duration::from_millis(50)), None, "{path}");
    }
    engine.let_go();
    for (stream, (path, _)) in open.into_iter().zip(&streams) {
        let reply = receive(stream);
        assert_eq!(reply.status, 200, "{path}");
        // All that happened before is told as well: each stream begins as it always does.
        let begins = match *path {
            "/v1/chat/completions" => reply.events()[0]["choices"][0]["delta"]["role"] == "assistant",
            "/v1/messages" => reply.body.starts_with("event: message_start"),
            "/v1/responses" => reply.body.starts_with("event: response.created"),
            _ => !reply.body.is_empty(),
        };
        assert!(begins, "{path}: {}", reply.body);
    }
    server.stop().unwrap();

    // No longer than was said.
    let (server, engine) = held(late(Duration::from_millis(200)));
    let mut stream = send(server.address(), "POST", "/v1/chat/completions", &[], &endless().to_string());
    assert_eq!(first_bytes(&mut stream, Duration::from_secs(20)).as_deref(), Some("HTTP/1.1 200 OK"));
    drop(stream);
    engine.let_go();
    server.stop().unwrap();

    // What fails before its first token is a plain refusal, which a gateway may try elsewhere.
    let limits = Settings { queue_limit: Some(Duration::from_millis(100)), ..late(Duration::from_secs(30)) };
    let (server, engine) = held(limits);
    let reply = post(&server, "/v1/chat/completions", &endless());
    assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (429, Some("queue_full")), "{}", reply.body);
    engine.let_go();
    server.stop().unwrap();
}

#[test]
fn a_server_that_goes_serves_until_gateways_know() {
    let settings = Settings { drain_delay: Duration::from_secs(2), ..settings() };
    let server = start_with(settings, Some(CHATML));
    let address = server.address();
    let get = |path: &str| receive(send(address, "GET", path, &[], ""));
    assert_eq!(get("/readyz").status, 200);
    let start = Instant::now();
    let stopping = std::thread::spawn(move || server.stop());
    wait_until("the first word of it", || get("/readyz").status == 503);
    for path in ["/readyz", "/health"] {
        let reply = get(path);
        assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")), "{path}");
    }
    // Those who still come are served, and told to come no more.
    let reply =
        receive(send(address, "POST", "/v1/chat/completions", &[("Connection", "keep-alive")], &ask("hi").to_string()));
    assert_eq!((reply.status, reply.header("connection")), (200, Some("close")), "{}", reply.body);
    assert!(start.elapsed() < Duration::from_secs(2), "the machine is too slow for this test");
    stopping.join().unwrap().unwrap();
    assert!(start.elapsed() >= Duration::from_secs(2));
}

#[test]
fn what_is_cut_off_is_told_so_and_counted() {
    let (server, engine) = held(Settings { drain: Duration::from_millis(300), ..settings() });
    let address = server.address();
    let ask_for = |body: &Value| send(address, "POST", "/v1/chat/completions", &[], &body.to_string());
    let (mut stream, plain) = (ask_for(&endless()), ask_for(&ask("hi")));
    assert!(first_bytes(&mut stream, Duration::from_secs(20)).is_some(), "the stream has begun");
    wait_until("both", || in_flight(address) >= 2);
    let ended = server.stop();
    let Err(Error::CutOff(count)) = ended else { panic!("{ended:?}") };
    assert_eq!(count, 2);
    assert!(ended.unwrap_err().to_string().starts_with("2 requests were ended"));
    let reply = receive(plain);
    assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")), "{}", reply.body);
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"error\"") && rest.contains("went down") && !rest.contains("[DONE]"), "{rest}");
    engine.let_go();
}

#[test]
fn clients_of_a_trusted_gateway_are_apart() {
    let secret = "gateway";
    let key = Key { name: "gateway".into(), secret: secret.into(), at_once: Some(1), ..Key::default() };
    let trusting = |proxies: &[&str]| {
        let trusted_proxies = proxies.iter().map(|proxy| proxy.parse().unwrap()).collect();
        start_with(Settings { keys: vec![key.clone()], trusted_proxies, ..settings() }, Some(CHATML))
    };
    let bearer = format!("Bearer {secret}");
    let open = |server: &Running, header: &str, tenant: &str, body: &Value| {
        let headers = [("Authorization", bearer.as_str()), (header, tenant)];
        send(server.address(), "POST", "/v1/chat/completions", &headers, &body.to_string())
    };
    let question = ask(&"a beginning that is common to many ".repeat(12));
    let cached = |server: &Running, header: &str, tenant: &str| {
        let reply = receive(open(server, header, tenant, &question)).json();
        reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_else(|| panic!("{reply}"))
    };
    let server = trusting(&["127.0.0.0/8"]);
    assert_eq!(cached(&server, "x-kiln-tenant", "alice"), 0);
    assert!(cached(&server, "x-kiln-tenant", "alice") > 64, "a client finds what it left");
    assert_eq!(cached(&server, "x-kiln-tenant", "bob"), 0, "and nothing of another one");
    assert!(cached(&server, "x-forwarded-user", "alice") > 64, "the other header means the same client");
    // Limits are each one's own.
    wait_until("alice's limit", || {
        let _busy = open(&server, "x-kiln-tenant", "alice", &endless());
        let second = receive(open(&server, "x-kiln-tenant", "alice", &ask("hi")));
        let other = receive(open(&server, "x-kiln-tenant", "bob", &ask("hi")));
        assert_eq!(other.status, 200, "{}", other.body);
        second.status == 429 && second.body.contains("alice")
    });
    // The gateway's key is asked for all the same.
    let without = receive(send(server.address(), "GET", "/v1/models", &[("x-kiln-tenant", "alice")], ""));
    assert_eq!(without.status, 401);
    server.stop().unwrap();
    // Who is not trusted cannot say who asks.
    let server = trusting(&["10.0.0.1"]);
    assert_eq!(cached(&server, "x-kiln-tenant", "alice"), 0);
    assert!(cached(&server, "x-kiln-tenant", "bob") > 64);
    server.stop().unwrap();
}

/// The tiny model with an adapter that counts for nobody who does not pick it.
fn adapted() -> Running {
    let plain = Arc::into_inner(model(Some(CHATML))).unwrap();
    let mut metadata = Metadata::new();
    for (key, value) in [("general.type", "adapter"), ("adapter.type", "lora"), ("general.architecture", "llama")] {
        metadata.set(key, value);
    }
    metadata.set("adapter.lora.alpha", MetadataValue::F32(8.0));
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
    let adapter = Adapter::new(&file, "sql.gguf", 0.0, &plain).unwrap();
    let model = Arc::new(plain.with_adapters(vec![adapter]).unwrap());
    let adapters = vec![NamedAdapter { name: "sql".into(), number: 0 }];
    let request_defaults = RequestDefaults { adapters, ..RequestDefaults::default() };
    let server =
        Server::listen("127.0.0.1", 0, Settings { strict_model: true, request_defaults, ..settings() }).unwrap();
    server.ready(scheduler(&model), SEQUENCES);
    server
}

#[test]
fn adapters_are_picked_by_the_name_of_a_model() {
    let (plain, server) = (start(), adapted());
    let say = |server: &Running, model: &str| {
        let reply = post(server, "/v1/chat/completions", &with(ask("hello there"), json!({"model": model})));
        assert_eq!(reply.status, 200, "{model}: {}", reply.body);
        text_of(&reply.json())
    };
    let bare = say(&plain, "tiny");
    for _ in 0..2 {
        assert_eq!(say(&server, "tiny"), bare, "the adapter counts for nobody who does not pick it");
        assert_ne!(say(&server, "sql"), bare, "the adapter changes nothing");
    }
    assert_eq!(post(&server, "/v1/chat/completions", &with(ask("hi"), json!({"model": "other"}))).status, 404);
    let models = get(&server, "/v1/models").json();
    let told: Vec<_> =
        models["data"].as_array().unwrap().iter().map(|m| (m["id"].clone(), m["parent"].clone())).collect();
    assert_eq!(told, [(json!("tiny"), Value::Null), (json!("sql"), json!("tiny"))]);
    // What the endpoint picker reads.
    let info = || {
        let metrics = get(&server, "/metrics").body;
        metrics.lines().find(|line| line.starts_with("vllm:lora_requests_info{")).unwrap().to_owned()
    };
    // A client has its answer a moment before the server is done with it.
    let idle = "max_lora=\"1\",running_lora_adapters=\"\",waiting_lora_adapters=\"\"";
    wait_until("no adapter in use", || info().contains(idle));
    let _busy = send(
        server.address(),
        "POST",
        "/v1/chat/completions",
        &[],
        &with(endless(), json!({"model": "sql", "n": SEQUENCES})).to_string(),
    );
    wait_until("the adapter in use", || info().contains("running_lora_adapters=\"sql\""));
    server.stop().unwrap_or_else(|why| assert!(matches!(why, Error::CutOff(_)), "{why}"));
    plain.stop().unwrap();
}
