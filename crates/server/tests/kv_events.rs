//! Events of the prefix cache by ZeroMQ, read by a subscriber that knows the wire protocol and nothing of the publisher.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use kiln_engine::arch::{PAGE, Room};
use kiln_engine::executor::{Arithmetic, CpuExecutor};
use kiln_engine::model::Model;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{Engine, Event, Policy, Request, Scheduler};
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::Gguf;
use kiln_server::KvEvents;
use serde_json::Value;

/// The tokens of each page that is known, by its hash.
type Pages = HashMap<u64, Vec<u64>>;

/// A ZeroMQ socket of ZMTP 3.0.
struct Socket(TcpStream);

impl Socket {
    fn connect(address: SocketAddr, socket: &str) -> Socket {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut greeting = [0; 64];
        (greeting[0], greeting[8], greeting[9], greeting[10]) = (0xff, 1, 0x7f, 3);
        greeting[12..16].copy_from_slice(b"NULL");
        stream.write_all(&greeting).unwrap();
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!((greeting[0], greeting[9], greeting[10], &greeting[12..17]), (0xff, 0x7f, 3, &b"NULL\0"[..]));
        let mut socket_ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
        socket_ready.push(socket.len() as u8);
        socket_ready.extend(socket.as_bytes());
        let mut socket = Socket(stream);
        socket.send(4, &socket_ready);
        let (flags, ready) = socket.frame();
        assert!(flags == 4 && ready.starts_with(b"\x05READY\x0bSocket-Type"), "{ready:?}");
        socket
    }

    fn send(&mut self, flags: u8, body: &[u8]) {
        self.0.write_all(&[&[flags, u8::try_from(body.len()).unwrap()], body].concat()).unwrap();
    }

    fn frame(&mut self) -> (u8, Vec<u8>) {
        let mut head = [0; 2];
        self.0.read_exact(&mut head).unwrap();
        let length = if head[0] & 2 == 0 {
            usize::from(head[1])
        } else {
            let mut rest = [0; 7];
            self.0.read_exact(&mut rest).unwrap();
            u64::from_be_bytes([head[1], rest[0], rest[1], rest[2], rest[3], rest[4], rest[5], rest[6]]) as usize
        };
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).unwrap();
        (head[0], body)
    }

    fn message(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        loop {
            let (flags, body) = self.frame();
            frames.push(body);
            if flags & 1 == 0 {
                return frames;
            }
        }
    }
}

fn number(frame: &[u8]) -> u64 {
    u64::from_be_bytes(frame.try_into().unwrap())
}

fn decoded(payload: &[u8]) -> Value {
    rmp_serde::from_slice(payload).unwrap()
}

/// An engine with few pages.
fn engine() -> Engine {
    let synth = Synth::new(Preset::from_name("tiny-llama").unwrap(), Recipe::from_name("F32").unwrap(), 3);
    let model = Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap());
    let room = Room { pages: 8, sequences: 2, states: 2, ..Room::one(8 * PAGE) };
    Engine::new(model, Box::new(CpuExecutor::new(Arithmetic::Fast)), room, &mut |_, _| {}).unwrap()
}

fn write(scheduler: &Scheduler, prompt: Vec<u32>) -> usize {
    let mut found = 0;
    for event in scheduler.generate(Request { limit: Some(2), ..Request::new(prompt) }) {
        match event {
            Event::Started { cached_tokens } => found = cached_tokens,
            Event::Failed(why) => panic!("{why}"),
            _ => {}
        }
    }
    found
}

fn text(salt: u32) -> Vec<u32> {
    (0..3 * PAGE as u32 + 5).map(|i| (i * i * 7 + i * 37 + salt * 101) % 256).collect()
}

/// Follows the events of a batch: pages by name, with all tokens up to their end.
fn follow(pages: &mut HashMap<u64, Vec<u64>>, batch: &Value) {
    let numbers = |list: &Value| list.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect::<Vec<_>>();
    for event in batch[1].as_array().unwrap() {
        match event["type"].as_str().unwrap() {
            "BlockStored" => {
                assert_eq!((&event["block_size"], &event["medium"]), (&Value::from(PAGE), &Value::from("GPU")));
                let mut before = event["parent_block_hash"].as_u64().map_or_else(Vec::new, |page| pages[&page].clone());
                let tokens = numbers(&event["token_ids"]);
                for (page, tokens) in numbers(&event["block_hashes"]).into_iter().zip(tokens.chunks(PAGE)) {
                    before.extend(tokens);
                    pages.insert(page, before.clone());
                }
            }
            "BlockRemoved" => numbers(&event["block_hashes"]).iter().for_each(|page| drop(pages.remove(page).unwrap())),
            "AllBlocksCleared" => pages.clear(),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_subscriber_knows_which_pages_a_server_holds() {
    let any = "tcp://127.0.0.1:0".parse().unwrap();
    let events = KvEvents::listen(any, Some(any)).unwrap();
    let mut mine = Socket::connect(events.address(), "SUB");
    mine.send(0, b"\x01kv@a@");
    let mut others = Socket::connect(events.address(), "SUB");
    others.send(0, b"\x01kv@b@");
    // A subscription is known when what is asked behind it is answered.
    for socket in [&mut mine, &mut others] {
        socket.send(4, b"\x04PING\0\0hello");
        assert_eq!(socket.frame(), (4, b"\x04PONGhello".to_vec()));
    }

    let mut engine = engine();
    engine.watch_cache(events.sink("kv@a@tiny".into()));
    let scheduler = Scheduler::start(engine, Policy::default());
    let mut pages = HashMap::new();
    let mut next = 0;
    let mut follow_until = |pages: &mut Pages, done: &dyn Fn(&Pages) -> bool| {
        loop {
            let frames = mine.message();
            assert_eq!((frames.len(), &frames[0][..], number(&frames[1])), (3, &b"kv@a@tiny"[..], next));
            next += 1;
            let batch = decoded(&frames[2]);
            follow(pages, &batch);
            if done(pages) {
                return batch;
            }
        }
    };
    let cleared = follow_until(&mut pages, &|_| true);
    assert_eq!(cleared[1][0]["type"], "AllBlocksCleared");

    assert_eq!(write(&scheduler, text(1)), 0);
    follow_until(&mut pages, &|pages| pages.len() == 3);
    let first: Vec<u64> = text(1).into_iter().map(u64::from).collect();
    let mut held: Vec<&[u64]> = pages.values().map(Vec::as_slice).collect();
    held.sort_by_key(|tokens| tokens.len());
    assert_eq!(held, [1, 2, 3].map(|n| &first[..n * PAGE]));
    assert_eq!(write(&scheduler, text(1)), 3 * PAGE, "and they are found as was told");

    // Two more prompts, and the pages of the first must go.
    let gone: Vec<u64> = pages.keys().copied().collect();
    for salt in 2..5 {
        write(&scheduler, text(salt));
    }
    follow_until(&mut pages, &|pages| gone.iter().all(|page| !pages.contains_key(page)));
    assert_eq!(write(&scheduler, text(1)), 0, "nothing is found of what was told to be gone");

    drop(scheduler);
    let end = follow_until(&mut pages, &|pages| pages.is_empty());
    assert_eq!(
        end[1].as_array().unwrap().last().unwrap()["type"],
        "AllBlocksCleared",
        "an engine that goes takes all with it"
    );

    // Who asks for what it has missed gets it, and then the end.
    let mut asks = Socket::connect(events.replay_address().unwrap(), "DEALER");
    let mut again = HashMap::new();
    for from in [0, next - 1] {
        asks.send(1, b"");
        asks.send(0, &from.to_be_bytes());
        for expected in from..next {
            let frames = asks.message();
            assert_eq!((frames.len(), frames[0].len(), number(&frames[1])), (3, 0, expected));
            follow(&mut again, &decoded(&frames[2]));
        }
        assert_eq!(asks.message(), [vec![], vec![0xff; 8], vec![]]);
        assert_eq!(again, pages);
    }

    // Nobody else was told anything.
    others.send(4, b"\x04PING\0\0again");
    assert_eq!(others.frame(), (4, b"\x04PONGagain".to_vec()));
}

#[test]
fn peers_that_make_no_sense_are_let_go() {
    let events = KvEvents::listen("tcp://127.0.0.1:0".parse().unwrap(), None).unwrap();
    // A frame that claims to be as long as all memory.
    let mut greedy = Socket::connect(events.address(), "SUB");
    greedy.0.write_all(&[2, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]).unwrap();
    assert_eq!(greedy.0.read(&mut [0; 1]).unwrap(), 0, "the connection ends");
    let mut stranger = TcpStream::connect(events.address()).unwrap();
    stranger.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stranger.write_all(&[b'G'; 64]).unwrap();
    let mut greeting = [0; 64];
    stranger.read_exact(&mut greeting).unwrap();
    assert!(matches!(stranger.read(&mut greeting), Ok(0) | Err(_)), "no greeting, no answer");
    // It serves on.
    let mut next = Socket::connect(events.address(), "SUB");
    next.send(4, b"\x04PING\0\0x");
    assert_eq!(next.frame(), (4, b"\x04PONGx".to_vec()));
}
