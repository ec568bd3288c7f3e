//! A server with a tiny model, and the plainest client there is: what the tests of this folder share.

#![allow(dead_code, reason = "no test uses all of it")]

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_engine::arch::Room;
use kiln_engine::executor::{Arithmetic, CpuExecutor};
use kiln_engine::model::Model;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{Engine, Policy, Scheduler};
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::{Gguf, Metadata, Writer};
use kiln_server::{Running, Server, Settings};
use serde_json::{Value, json};

pub(crate) fn model(template: Option<&str>) -> Arc<Model> {
    model_with(template, |_| {})
}

/// The same, with something changed in what the file says of itself.
pub(crate) fn model_with(template: Option<&str>, change: impl FnOnce(&mut Metadata)) -> Arc<Model> {
    let synth = Synth::new(Preset::from_name("tiny-llama").unwrap(), Recipe::from_name("F32").unwrap(), 11);
    let gguf = Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap();
    let mut metadata = gguf.metadata().clone();
    match template {
        Some(template) => metadata.set("tokenizer.chat_template", template),
        None => drop(metadata.remove("tokenizer.chat_template")),
    }
    change(&mut metadata);
    let mut writer = Writer::new(metadata);
    for info in gguf.tensors() {
        writer.add(&info.name, info.dims(), info.ty, gguf.data(info).to_vec()).unwrap();
    }
    Arc::new(Model::new(Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap()).unwrap())
}

/// A model that gives vectors of texts and scores.
pub(crate) fn embedder() -> Arc<Model> {
    let synth = Synth::new(Preset::from_name("bert-tiny").unwrap(), Recipe::from_name("F32").unwrap(), 11);
    Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap())
}

pub(crate) const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                      {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

pub(crate) const SEQUENCES: usize = 4;

pub(crate) fn scheduler(model: &Arc<Model>) -> Scheduler {
    let executor = Box::new(CpuExecutor::new(Arithmetic::Fast));
    let room = Room::for_sequences(SEQUENCES, model.config.context.min(512));
    let engine = Engine::new(Arc::clone(model), executor, room, &mut |_, _| {}).unwrap();
    Scheduler::start(engine, Policy { queue: usize::MAX, ..Policy::default() })
}

pub(crate) fn settings() -> Settings {
    Settings { drain: Duration::from_secs(5), keep_alive: Duration::from_millis(200), ..Settings::new("tiny") }
}

pub(crate) fn start_with(settings: Settings, template: Option<&str>) -> Running {
    let server = Server::listen("127.0.0.1", 0, settings).unwrap();
    server.ready(scheduler(&model(template)), SEQUENCES);
    server
}

pub(crate) fn start() -> Running {
    start_with(settings(), Some(CHATML))
}

pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    /// The values of a stream of events.
    pub(crate) fn events(&self) -> Vec<Value> {
        let data = self.body.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
        data.map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

/// One request on a connection of its own; the connection, where the answer is not wanted.
pub(crate) fn send(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let silent = headers.contains(&("Content-Type", "-"));
    let mut head = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        head += &format!("Host: {address}\r\n");
    }
    // "-" stands for no content type at all.
    let headers: Vec<_> = headers.iter().filter(|(_, value)| *value != "-").collect();
    if !body.is_empty() && !silent && !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type")) {
        head += "Content-Type: application/json\r\n";
    }
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{head}\r\n{body}").as_bytes()).unwrap();
    stream
}

pub(crate) fn receive(stream: impl Read) -> Reply {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("no status in {line:?}")).parse().unwrap();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        match line.trim_end().split_once(": ") {
            Some((name, value)) => headers.push((name.to_ascii_lowercase(), value.to_owned())),
            None => break,
        }
    }
    let mut body = Vec::new();
    let is_chunked = headers.iter().any(|(n, v)| n == "transfer-encoding" && v == "chunked");
    if is_chunked {
        loop {
            let mut size = String::new();
            reader.read_line(&mut size).unwrap();
            let size = usize::from_str_radix(size.trim(), 16).unwrap_or(0);
            let mut chunk = vec![0; size + 2];
            if reader.read_exact(&mut chunk).is_err() || size == 0 {
                break;
            }
            body.extend_from_slice(&chunk[..size]);
        }
    } else {
        reader.read_to_end(&mut body).unwrap();
    }
    // All but the page's font is text, and must be.
    let is_font = headers.iter().any(|(name, value)| name == "content-type" && value.starts_with("font/"));
    let body = if is_font { String::from_utf8_lossy(&body).into_owned() } else { String::from_utf8(body).unwrap() };
    Reply { status, headers, body }
}

pub(crate) fn get(server: &Running, path: &str) -> Reply {
    receive(send(server.address(), "GET", path, &[], ""))
}

pub(crate) fn post(server: &Running, path: &str, body: &Value) -> Reply {
    receive(send(server.address(), "POST", path, &[], &body.to_string()))
}

pub(crate) fn ask(content: &str) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0, "ignore_eos": true})
}

pub(crate) fn with(mut base: Value, more: Value) -> Value {
    base.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    base
}

pub(crate) fn text_of(reply: &Value) -> String {
    reply["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{reply}")).to_owned()
}

pub(crate) fn running(server: &Running) -> Value {
    get(server, "/loads").json()
}

pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}
