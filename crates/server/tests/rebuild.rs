//! A device is lost while people are being answered: they are told, `/readyz` says what is going on, and when the device is there again
//! the server serves on.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod client;
#[path = "../../engine/tests/frail/mod.rs"]
mod frail;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use client::*;
use frail::{Fault, Frail, Trigger};
use kiln_engine::arch::Room;
use kiln_engine::executor::{Arithmetic, CpuExecutor};
use kiln_engine::run::{Engine, Policy, Request, Scheduler};
use kiln_server::{Server, Settings};
use serde_json::json;

#[test]
fn an_engine_that_hangs_is_not_alive_and_one_that_is_idle_or_busy_is() {
    let (model, room) = (model(Some(CHATML)), Room { pages: 64, sequences: 4, ..Room::one(512) });
    let engine = Engine::new(model, Box::new(CpuExecutor::new(Arithmetic::Fast)), room, &mut |_, _| {}).unwrap();
    let scheduler = Scheduler::start(engine, Policy::default());
    // Whoever takes events must not block; this one does until the test lets go, and the engine's thread with it.
    let (go, held) = std::sync::mpsc::channel::<()>();
    let (begin, begun) = std::sync::mpsc::channel::<()>();
    let hang = Arc::new(AtomicBool::new(false));
    let hangs = Arc::clone(&hang);
    let mut told = false;
    let request = Request { limit: Some(400), ..Request::new(vec![5, 6, 7]) };
    let cancel = scheduler.submit(request, move |_| {
        if hangs.load(Ordering::Relaxed) && !std::mem::replace(&mut told, true) {
            begin.send(()).unwrap();
            held.recv().unwrap();
        }
        true
    });
    let stall = Duration::from_millis(400);
    let server = Server::listen("127.0.0.1", 0, Settings { stall, ..settings() }).unwrap();
    assert_eq!(get(&server, "/livez").status, 200, "a server that loads is alive");
    server.ready(scheduler, 4);
    // Work that goes on is no hang, however long it takes.
    assert_eq!(get(&server, "/livez").status, 200);
    hang.store(true, Ordering::Relaxed);
    begun.recv().unwrap();
    wait_until("the hang is seen", || get(&server, "/livez").status == 503);
    assert!(get(&server, "/livez").body.contains("has not got on"), "{}", get(&server, "/livez").body);
    cancel.cancel();
    go.send(()).unwrap();
    wait_until("the engine goes on", || get(&server, "/livez").status == 200);
    // An engine without work waits for it, and that is no hang either.
    wait_until("it is idle", || get(&server, "/loads").json()["num_running_reqs"] == 0);
    std::thread::sleep(2 * stall);
    assert_eq!(get(&server, "/livez").status, 200);
    server.stop().unwrap();
}

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
