//! One model over two and three processes on the loopback interface: the tokens and the bits of one, a stage that is killed or stopped in the
//! middle of a text, and one that comes back.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use kiln_gguf::{Gguf, Writer};
use serde_json::{Value, json};
use tempfile::TempDir;

fn command(folder: &TempDir) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
    command.current_dir(folder.path()).env_remove("KILN_CONFIG").env_remove("KILN_API_KEY").stdin(Stdio::null());
    command
}

fn kiln(folder: &TempDir, arguments: &[&str]) -> Output {
    command(folder).args(arguments).output().unwrap()
}

fn said(folder: &TempDir, arguments: &[&str]) -> String {
    let output = kiln(folder, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A folder with a model whose context is long enough for a text to be broken off.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    said(&folder, &["synth", "tiny-llama", "F32", "short.gguf"]);
    lengthen(&folder.path().join("short.gguf"), &folder.path().join("m.gguf"));
    folder
}

fn lengthen(from: &Path, to: &Path) {
    let model = Gguf::open(from).unwrap();
    let mut metadata = model.metadata().clone();
    metadata.set("llama.context_length", 8192u32);
    let mut writer = Writer::new(metadata);
    for info in model.tensors() {
        writer.add(&info.name, info.dims(), info.ty, model.data(info)).unwrap();
    }
    writer.save(to).unwrap();
}

/// A process that ends with the test, and the line of JSON that it begins with.
struct Process {
    child: Child,
    told: Value,
}

impl Process {
    fn start(folder: &TempDir, arguments: &[&str]) -> Process {
        let mut command = command(folder);
        let mut child = command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let told = serde_json::from_str(&line).unwrap_or_else(|why| panic!("{arguments:?}: {why}: {line:?}"));
        Process { child, told }
    }

    fn stage(folder: &TempDir, address: &str) -> Process {
        Process::start(folder, &["stage", "m.gguf", "--cpu", "--listen", address, "--json"])
    }

    fn address(&self) -> &str {
        self.told["address"].as_str().unwrap()
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The logits of a prompt, as bits.
fn bits(folder: &TempDir, name: &str, more: &[&str]) -> Vec<u8> {
    let tokens: Vec<String> = (0..40).map(|i: u32| ((i * i * 7 + i * 37 + 11) % 256).to_string()).collect();
    let tokens = tokens.join(",");
    let arguments = ["logits", "m.gguf", "--cpu", "--tokens", &tokens, "--pieces", "7", "-o", name];
    said(folder, &[&arguments, more].concat());
    let gguf = Gguf::open(folder.path().join(name)).unwrap();
    gguf.data(gguf.tensor("logits").unwrap()).to_vec()
}

#[test]
fn two_and_three_processes_give_what_one_gives() {
    let folder = folder();
    let run = |more: &[&str]| {
        let arguments = ["run", "m.gguf", "--cpu", "--raw", "Once upon", "-n", "40", "--temp", "0", "--ignore-eos"];
        said(&folder, &[&arguments, more].concat())
    };
    let (alone, alone_bits) = (run(&[]), bits(&folder, "alone.gguf", &["--reproducible"]));
    let stages = [0, 1].map(|_| Process::stage(&folder, "127.0.0.1:0"));
    let [first, second] = [0, 1].map(|at| stages[at].address().to_owned());
    for (name, more) in [
        ("two.gguf", vec!["--stage", &first, "--stage-split", "1,1"]),
        ("three.gguf", vec!["--stage", &first, "--stage", &second, "--stage-split", "1,1,1"]),
        // By free memory: all of them have the same.
        ("free.gguf", vec!["--stage", &second]),
    ] {
        assert_eq!(run(&more), alone, "{name}");
        let got = bits(&folder, name, &[&["--reproducible"], &more[..]].concat());
        assert!(got == alone_bits, "{name}: the bits differ");
    }
}

#[test]
fn what_cannot_be_is_said_in_one_line() {
    let folder = folder();
    let refused = |arguments: &[&str], words: &[&str]| {
        let output = kiln(&folder, arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && !error.contains("panicked"), "{arguments:?}: {error}");
        words.iter().for_each(|word| assert!(error.contains(word), "{arguments:?}: {word:?} is not in: {error}"));
    };
    // Nothing listens to other machines, or speaks to them, without proof.
    refused(&["stage", "m.gguf", "--cpu", "--listen", "0.0.0.0:0"], &["0.0.0.0:0", "--stage-cert"]);
    refused(&["run", "m.gguf", "--cpu", "--stage", "192.0.2.1:9100", "hi"], &["192.0.2.1:9100", "--stage-cert"]);
    refused(&["run", "m.gguf", "--cpu", "--stage", "nowhere", "hi"], &["nowhere", "host and a port"]);
    refused(&["run", "m.gguf", "--cpu", "--stage", "127.0.0.1:1", "hi"], &["127.0.0.1:1", "cannot reach"]);
    refused(&["stage", "m.gguf", "--cpu", "--stage", "127.0.0.1:1"], &["no stages of its own"]);
    let stage = Process::stage(&folder, "127.0.0.1:0");
    let with = |more: &[&str], words: &[&str]| {
        refused(&[&["run", "m.gguf", "--cpu", "--stage", stage.address(), "hi"], more].concat(), words);
    };
    with(&["--stage-split", "1,2,3"], &["--stage-split", "3 shares", "2 devices"]);
    with(&["--gpu-layers", "1"], &["--stage", "--stage-split"]);
    said(&folder, &["synth", "tiny-llama", "F32", "other.gguf", "--seed", "7"]);
    lengthen(&folder.path().join("other.gguf"), &folder.path().join("m2.gguf"));
    refused(&["run", "m2.gguf", "--cpu", "--stage", stage.address(), "hi"], &["another model file"]);
}

struct Server {
    process: Process,
    port: u16,
}

impl Server {
    fn start(folder: &TempDir, stage: &str) -> Server {
        let arguments = ["serve", "m.gguf", "--cpu", "--port", "0", "--json", "--parallel", "2", "-c", "8192"];
        let process = Process::start(folder, &[&arguments[..], &["--stage", stage, "--stage-split", "1,1"]].concat());
        let port = process.told["url"].as_str().unwrap().rsplit_once(':').unwrap().1.parse().unwrap();
        Server { process, port }
    }

    fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json");
        write!(stream, "{head}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        stream
    }

    fn answer(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut reply = String::new();
        self.send(method, path, body).read_to_string(&mut reply).unwrap();
        let status = reply.split(' ').nth(1).unwrap().parse().unwrap();
        (status, reply.split_once("\r\n\r\n").unwrap().1.to_owned())
    }

    fn ready(&self) -> bool {
        self.answer("GET", "/readyz", "").0 == 200
    }

    /// The text behind a prompt; none where there was an error.
    fn text(&self) -> Option<String> {
        let body = json!({"prompt": "Once upon", "max_tokens": 20, "temperature": 0, "ignore_eos": true}).to_string();
        let (status, body) = self.answer("POST", "/v1/completions", &body);
        let reply: Value = serde_json::from_str(&body).unwrap();
        (status == 200).then(|| reply["choices"][0]["text"].as_str().unwrap().to_owned())
    }

    /// A stream that has begun; its end, once it has come.
    fn stream(&self) -> BufReader<TcpStream> {
        let body = json!({"prompt": "Once", "max_tokens": 8000, "temperature": 0, "ignore_eos": true, "stream": true});
        let mut stream = BufReader::new(self.send("POST", "/v1/completions", &body.to_string()));
        let mut line = String::new();
        while !line.starts_with("data: ") {
            line.clear();
            assert!(stream.read_line(&mut line).unwrap() > 0, "the stream ended before its first token");
        }
        stream
    }
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_stage_that_is_killed_or_hangs_is_told_of_and_joined_again() {
    let folder = folder();
    let stage = Process::stage(&folder, "127.0.0.1:0");
    let address = stage.address().to_owned();
    let server = Server::start(&folder, &address);
    let want = server.text().unwrap();

    // Killed: the text breaks off with an error, not with an end.
    let mut stream = server.stream();
    stage.signal("KILL");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"error\"") && !rest.contains("[DONE]"), "{rest}");
    wait_until("a server that is not ready", || !server.ready());
    assert!(server.text().is_none());
    drop(stage);
    let stage = Process::stage(&folder, &address);
    wait_until("the stage's return", || server.ready());
    assert_eq!(server.text().as_deref(), Some(want.as_str()));

    // Stopped: it answers nothing, and is lost like one that is gone. When it continues it is joined again, with its weights.
    let mut stream = server.stream();
    stage.signal("STOP");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"error\"") && !rest.contains("[DONE]"), "{rest}");
    assert!(!server.ready());
    stage.signal("CONT");
    wait_until("the stage's return", || server.ready());
    assert_eq!(server.text(), Some(want));
    server.process.signal("TERM");
}
