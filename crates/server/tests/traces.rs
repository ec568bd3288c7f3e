//! Spans as a collector sees them: whose they are, what they tell and what not, and what a collector costs that is away.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod client;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use client::*;
use kiln_server::{Server, Settings, Tracing};
use serde_json::{Value, json};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// The plainest collector there is: its address, and the bodies that came with their heads.
fn collector() -> (String, Receiver<(String, String)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1/traces", listener.local_addr().unwrap());
    let (to, from) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let (mut head, mut line) = (String::new(), String::new());
            while reader.read_line(&mut line).unwrap() > 2 {
                head += &std::mem::take(&mut line);
            }
            let length =
                head.lines().find_map(|l| l.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
            let mut body = vec![0; length.unwrap()];
            reader.read_exact(&mut body).unwrap();
            reader
                .into_inner()
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
                .unwrap();
            if to.send((head, String::from_utf8(body).unwrap())).is_err() {
                break;
            }
        }
    });
    (url, from)
}

fn traced(url: String) -> Settings {
    let headers = vec![("x-team".to_owned(), "kilns".to_owned())];
    Settings { strict_model: true, tracing: Some(Tracing { url, headers, service: "kiln here".into() }), ..settings() }
}

/// The spans that came, each with the resource that it is of checked.
fn spans_of(from: &Receiver<(String, String)>) -> Vec<Value> {
    let mut spans = Vec::new();
    while let Ok((head, body)) = from.recv_timeout(Duration::from_millis(500)) {
        assert!(head.starts_with("POST /v1/traces ") && head.to_ascii_lowercase().contains("x-team: kilns"), "{head}");
        assert!(!body.contains("a-secret-word"), "{body}");
        let body: Value = serde_json::from_str(&body).unwrap();
        let resource = &body["resourceSpans"][0];
        assert_eq!(resource["resource"]["attributes"][0]["value"]["stringValue"], "kiln here");
        spans.extend(resource["scopeSpans"][0]["spans"].as_array().unwrap().clone());
    }
    spans
}

fn attribute<'a>(span: &'a Value, key: &str) -> &'a Value {
    let found = span["attributes"].as_array().unwrap().iter().find(|attribute| attribute["key"] == key);
    found.map_or(&Value::Null, |attribute| attribute["value"].as_object().unwrap().values().next().unwrap())
}

#[test]
fn a_collector_gets_one_span_a_request_and_nothing_of_what_was_said() {
    let (url, from) = collector();
    let server = start_with(traced(url), Some(CHATML));
    let parent = format!("00-{TRACE}-{PARENT}-01");
    let unwanted = format!("00-{TRACE}-{PARENT}-00");
    let ask_as = |parent: &str, more: Value| {
        let body = with(ask("a-secret-word"), more).to_string();
        receive(send(server.address(), "POST", "/v1/chat/completions", &[("traceparent", parent)], &body))
    };
    let streamed = ask_as(&parent, json!({"stream": true}));
    assert_eq!(streamed.status, 200);
    assert_eq!(ask_as("nonsense", json!({})).status, 200);
    assert_eq!(ask_as(&parent, json!({"model": "another"})).status, 404);
    assert_eq!(ask_as(&unwanted, json!({})).status, 200);
    assert_eq!(get(&server, "/v1/models").status, 200);
    // What waits is sent before the server ends.
    server.stop().unwrap();
    let spans = spans_of(&from);
    let [first, second, third] = spans.as_slice() else { panic!("{spans:?}") };
    assert_eq!((&first["traceId"], &first["parentSpanId"]), (&json!(TRACE), &json!(PARENT)));
    assert_eq!((&first["name"], &first["kind"]), (&json!("chat tiny"), &json!(2)));
    assert_eq!(attribute(first, "gen_ai.operation.name"), "chat");
    assert_eq!(attribute(first, "gen_ai.request.model"), "tiny");
    assert_eq!(attribute(first, "gen_ai.usage.output_tokens"), "12");
    assert!(attribute(first, "gen_ai.usage.input_tokens").as_str().unwrap().parse::<usize>().unwrap() > 3);
    assert!(attribute(first, "gen_ai.latency.time_to_first_token").as_f64().unwrap() > 0.0);
    assert_eq!(attribute(first, "kiln.request.id").as_str(), streamed.header("x-request-id"));
    let nanos = |name: &str| first[name].as_str().unwrap().parse::<u128>().unwrap();
    assert!(nanos("endTimeUnixNano") > nanos("startTimeUnixNano"));
    // A header that says nothing begins a trace of its own.
    assert!(second["parentSpanId"].is_null() && second["traceId"] != TRACE);
    assert_ne!(first["spanId"], third["spanId"]);
    assert_eq!(
        (attribute(third, "http.response.status_code"), attribute(third, "error.type")),
        (&json!("404"), &json!("404"))
    );
}

#[test]
fn spans_of_embeddings_and_ranks_name_the_model_and_count_what_was_read() {
    let (url, from) = collector();
    let server = Server::listen("127.0.0.1", 0, traced(url)).unwrap();
    server.ready(scheduler(&embedder()), SEQUENCES);
    let made = post(&server, "/v1/embeddings", &json!({"input": ["a-secret-word", "and more of them"]})).json();
    let ranked = json!({"query": "a-secret-word", "documents": ["one", "another"]});
    assert_eq!(post(&server, "/v1/rerank", &ranked).status, 200);
    server.stop().unwrap();
    let spans = spans_of(&from);
    let [embedded, ranked] = spans.as_slice() else { panic!("{spans:?}") };
    assert_eq!((&embedded["name"], &ranked["name"]), (&json!("embeddings tiny"), &json!("rerank tiny")));
    let read = |span| attribute(span, "gen_ai.usage.input_tokens").as_str().unwrap().parse::<u64>().unwrap();
    assert_eq!(read(embedded), made["usage"]["prompt_tokens"].as_u64().unwrap());
    assert!(read(ranked) > 8, "{ranked}");
    assert!(attribute(embedded, "gen_ai.usage.output_tokens").is_null(), "{embedded}");
}

#[test]
fn a_collector_that_is_away_or_hangs_costs_nothing() {
    // One address where nobody listens, and one where nobody answers.
    let hanging = TcpListener::bind("127.0.0.1:0").unwrap();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for address in [closed, hanging.local_addr().unwrap()] {
        let server = start_with(traced(format!("http://{address}/v1/traces")), Some(CHATML));
        let started = Instant::now();
        for _ in 0..20 {
            assert_eq!(
                post(&server, "/v1/chat/completions", &with(ask("hello"), json!({"max_tokens": 2}))).status,
                200
            );
        }
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
        let ending = Instant::now();
        server.stop().unwrap();
        assert!(ending.elapsed() < Duration::from_secs(5), "{:?}", ending.elapsed());
    }
}
