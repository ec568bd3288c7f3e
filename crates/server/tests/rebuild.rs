//! A device is lost while people are being answered: they are told, `/readyz` says what is going on, and when the device is there again
//! the server serves on.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod client;
#[path = "../../engine/tests/frail/mod.rs"]
mod frail;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use client::*;
use frail::{Fault, Frail, Trigger};
use kiln_engine::arch::Room;
use kiln_engine::executor::{Arithmetic, CpuExecutor};
use kiln_engine::run::{Engine, Policy, Scheduler};
use kiln_server::Server;
use serde_json::json;

#[test]
fn a_lost_device_is_told_of_and_the_server_serves_on_when_it_is_back() {
    let (model, room) = (model(Some(CHATML)), Room { pages: 64, sequences: 4, ..Room::one(512) });
    let (executor, _) = Frail::counted(&Trigger::after(Fault::Lost, 20));
    let engine = Engine::new(Arc::clone(&model), executor, room, &mut |_, _| {}).unwrap();
    // The device comes back when the test says so.
    let back = Arc::new(AtomicBool::new(false));
    let there = Arc::clone(&back);
    let rebuild = move |_: usize| {
        if !there.load(Ordering::Relaxed) {
            return Err(kiln_gpu::Error::NoDevice.into());
        }
        Engine::new(Arc::clone(&model), Box::new(CpuExecutor::new(Arithmetic::Fast)), room, &mut |_, _| {})
    };
    let server = Server::listen("127.0.0.1", 0, settings()).unwrap();
    server.ready(Scheduler::start_lasting(engine, Policy::default(), Box::new(rebuild)), 4);
    assert_eq!(get(&server, "/readyz").status, 200);

    // A stream that is under way ends with an error, and does so in its own words.
    let question = with(ask("hello"), json!({"max_tokens": 200, "ignore_eos": true, "stream": true}));
    let stream = post(&server, "/v1/chat/completions", &question);
    assert_eq!(stream.status, 200);
    assert!(
        stream.body.contains(r#"{"error":{"message""#) && !stream.body.contains("finish_reason\":\"stop"),
        "{}",
        stream.body
    );

    // Until it is back: not ready, alive, and every request is told so at once.
    wait_until("the loss is known", || get(&server, "/readyz").status == 503);
    let ready = get(&server, "/readyz");
    assert!(ready.header("retry-after").is_some(), "{:?}", ready.headers);
    assert_eq!(get(&server, "/livez").status, 200, "an engine that can be had again is no reason to end the process");
    let refused = post(&server, "/v1/chat/completions", &ask("hello"));
    assert_eq!(refused.status, 503, "{}", refused.body);
    assert!(refused.json()["error"]["message"].is_string(), "{}", refused.body);

    back.store(true, Ordering::Relaxed);
    wait_until("the device is there again", || get(&server, "/readyz").status == 200);
    let answered = post(&server, "/v1/chat/completions", &with(ask("hello"), json!({"max_tokens": 5})));
    assert_eq!(answered.status, 200, "{}", answered.body);
    server.stop().unwrap();
}
