//! `kiln serve` as a process: the times of its log, and files that it reads again when it is told to. No GPU is needed.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use kiln_gguf::{Gguf, Writer};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Gives a model a context of 8,192 tokens, so that a client can leave before an answer ends.
fn lengthen(path: &Path) {
    let model = Gguf::open(path).unwrap();
    let mut metadata = model.metadata().clone();
    metadata.set("llama.context_length", 8192u32);
    let mut writer = Writer::new(metadata);
    for info in model.tensors() {
        writer.add(&info.name, info.dims(), info.ty, model.data(info)).unwrap();
    }
    let bytes = writer.to_bytes().unwrap();
    drop(model);
    std::fs::write(path, bytes).unwrap();
}

/// A server that ends with the test.
struct Server {
    child: Child,
    port: u16,
    log: Receiver<String>,
    /// Lines of the log before it listened.
    begun: Vec<String>,
}

impl Server {
    fn start(folder: &TempDir, more: &[&str]) -> Server {
        let kiln = || Command::new(env!("CARGO_BIN_EXE_kiln"));
        let made = kiln().args(["synth", "tiny-llama", "F32", "m.gguf"]).current_dir(folder.path()).output().unwrap();
        assert!(made.status.success());
        lengthen(&folder.path().join("m.gguf"));
        Server::again(folder, more)
    }

    /// A server for the model that an earlier one of this folder served.
    fn again(folder: &TempDir, more: &[&str]) -> Server {
        Server::spawn(Command::new(env!("CARGO_BIN_EXE_kiln")), folder, more)
    }

    /// The same where no file can grow beyond a kilobyte, as on a disk that is full.
    fn on_a_full_disk(folder: &TempDir, more: &[&str]) -> Server {
        let mut shell = Command::new("sh");
        shell.args(["-c", "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_kiln")]);
        Server::spawn(shell, folder, more)
    }

    /// The same with a config file.
    fn with_config(folder: &TempDir, config: &str, more: &[&str]) -> Server {
        std::fs::write(folder.path().join("config.toml"), config).unwrap();
        let mut shell = Command::new("sh");
        shell.args(["-c", "KILN_CONFIG=config.toml exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_kiln")]);
        Server::spawn(shell, folder, more)
    }

    fn spawn(mut command: Command, folder: &TempDir, more: &[&str]) -> Server {
        command.args(["serve", "m.gguf", "--cpu", "--port", "0", "--parallel", "1"]).args(more);
        command.current_dir(folder.path()).env_remove("KILN_CONFIG").env_remove("KILN_API_KEY");
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let (tell, log) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
        let mut server = Server { child, port: 0, log, begun: Vec::new() };
        let (begun, line) = server.until("listening on http");
        server.begun = begun;
        server.port = line.split("://127.0.0.1:").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
        server
    }

    /// The next line of the log that holds these words.
    fn line(&self, words: &str) -> String {
        self.until(words).1
    }

    /// The lines of the log before the next one that holds these words, and that one.
    fn until(&self, words: &str) -> (Vec<String>, String) {
        let mut before = Vec::new();
        loop {
            let Ok(line) = self.log.recv_timeout(Duration::from_secs(60)) else {
                panic!("{words:?} did not come: {before:?}");
            };
            if line.contains(words) {
                return (before, line);
            }
            before.push(line);
        }
    }

    /// The status that a request with a key gets.
    fn status(&self, secret: &str) -> u16 {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        write!(
            stream,
            "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nx-api-key: {secret}\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply.split(' ').nth(1).unwrap().parse().unwrap()
    }

    /// What a request is answered with.
    fn ask(&self, method: &str, path: &str, body: &Value) -> Value {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json");
        write!(stream, "{head}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
        serde_json::from_str(reply.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    /// What the model says behind a prompt, and how many tokens of the prompt were cached.
    fn answer(&self, prompt: &str) -> (String, u64) {
        let body = json!({
            "prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": true, "return_token_ids": true,
        });
        let reply = self.ask("POST", "/v1/completions", &body);
        let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (reply["choices"][0].to_string(), cached)
    }

    /// The lines of the log that hold these words, once the server has ended.
    fn lines(mut self, words: &str) -> Vec<String> {
        self.signal("TERM");
        assert!(self.ended().success());
        self.begun.iter().cloned().chain(self.log.iter()).filter(|line| line.contains(words)).collect()
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    fn ended(&mut self) -> ExitStatus {
        let limit = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < limit, "the server still runs");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn keys_are_read_again_on_sighup() {
    let folder = tempfile::tempdir().unwrap();
    let write = |text: &str| std::fs::write(folder.path().join("keys.txt"), text).unwrap();
    write("alice:one\nbob:two\n");
    let mut server = Server::start(&folder, &["--api-key-file", "keys.txt"]);
    let statuses = || ["one", "two", "three"].map(|secret| server.status(secret));
    assert_eq!(statuses(), [200, 200, 401]);
    write("alice:one\ncarol:three\n");
    server.signal("HUP");
    server.line("note: SIGHUP: the keys (now 2)");
    assert_eq!(statuses(), [200, 401, 200]);
    // A file that cannot be read in full changes nothing.
    for wrong in ["", "carol:three too many words\n"] {
        write(wrong);
        server.signal("HUP");
        server.line("error: SIGHUP: ");
        assert_eq!(statuses(), [200, 401, 200]);
    }
    server.signal("TERM");
    assert!(server.ended().success());
}

#[test]
fn without_files_to_read_again_sighup_ends_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(&folder, &[]);
    server.signal("HUP");
    assert!(!server.ended().success());
}

#[test]
fn every_line_of_the_log_says_when_it_was_written() {
    /// `2026-11-18T08:35:27.123Z`.
    fn is_time(word: &str) -> bool {
        let shape: String = word.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        shape == "0000-00-00T00:00:00.000Z"
    }
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&folder, &["-v"]);
    assert_eq!(server.status(""), 200);
    let line = server.line("path=/v1/models");
    let (time, rest) = line.split_once(' ').unwrap();
    assert!(is_time(time) && rest.starts_with("info: request "), "{line}");
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&folder, &["--log-json"]);
    assert_eq!(server.status(""), 200);
    let line: Value = serde_json::from_str(&server.line("/v1/models")).unwrap();
    assert!(is_time(line["time"].as_str().unwrap()) && line["event"] == "request", "{line}");
}

#[test]
fn an_answer_whose_client_left_is_logged_with_the_tokens_that_were_made() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&folder, &["-v"]);
    let body = r#"{"prompt": "hello", "stream": true, "ignore_eos": true, "max_tokens": 8000}"#;
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json";
    write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    let tokens = BufReader::new(&stream).lines().map_while(Result::ok).filter(|line| line.starts_with("data: "));
    assert_eq!(tokens.take(5).count(), 5);
    drop(stream);
    let line = server.line(" info: answer ");
    let written = line.split("written_tokens=").nth(1).unwrap().split(' ').next().unwrap();
    assert!(written.parse::<u64>().unwrap() >= 4 && line.contains("reason=abort"), "{line}");
}

#[test]
fn a_port_that_is_taken_is_told_before_the_hint() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&folder, &[]);
    let port = server.port.to_string();
    let second = Command::new(env!("CARGO_BIN_EXE_kiln"))
        .args(["serve", "m.gguf", "--cpu", "--port", &port])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(1), "{said}");
    let (error, hint) = said.split_once("\nhint: ").unwrap();
    assert!(error.contains(&format!("cannot listen on 127.0.0.1:{port}: Address already in use")), "{said}");
    assert!(!hint.contains("os error"), "{said}");
}

/// A prompt of many pages.
fn story(number: usize) -> String {
    (0..60).map(|i| format!("{} and then {number}, ", i * i)).collect()
}

const FOLDER: [&str; 2] = ["--cache-disk", "cache"];

#[test]
fn a_server_that_is_killed_while_it_writes_its_cache_loses_nothing_that_counts() {
    let folder = tempfile::tempdir().unwrap();
    let plain = Server::start(&folder, &[]);
    let stories: Vec<String> = (0..3).map(story).collect();
    let want: Vec<String> = stories.iter().map(|story| plain.answer(story).0).collect();
    drop(plain);
    for (at, story) in stories.iter().enumerate() {
        let server = Server::again(&folder, &FOLDER);
        assert_eq!(server.answer(story), (want[at].clone(), 0));
        // What was read is being written now.
        std::thread::sleep(Duration::from_millis(at as u64));
        server.signal("KILL");
    }
    let after = Server::again(&folder, &FOLDER);
    stories.iter().zip(&want).for_each(|(story, want)| assert_eq!(after.answer(story).0, *want));
    assert_eq!(after.lines("cache").len(), 0, "nothing is wrong with what was left");
    let last = Server::again(&folder, &FOLDER);
    for (story, want) in stories.iter().zip(&want) {
        let (got, cached) = last.answer(story);
        assert!(got == *want && cached >= 128, "{cached} tokens were kept");
    }
}

#[test]
fn a_full_disk_costs_what_would_have_been_kept_and_is_said_once() {
    let folder = tempfile::tempdir().unwrap();
    let plain = Server::start(&folder, &[]);
    let want = [0, 1].map(|number| plain.answer(&story(number)).0);
    drop(plain);
    let full = Server::on_a_full_disk(&folder, &FOLDER);
    for (number, want) in want.iter().enumerate() {
        assert_eq!(full.answer(&story(number)), (want.clone(), 0));
    }
    assert!(full.answer(&story(1)).1 >= 128, "memory keeps it as before");
    let said = full.lines("no more prefixes are kept on disk");
    assert_eq!(said.len(), 1, "{said:?}");
    let files = std::fs::read_dir(folder.path().join("cache")).unwrap().flatten().map(|entry| entry.path());
    let left: Vec<_> = files.filter(|path| path.is_dir()).flat_map(|path| std::fs::read_dir(path).unwrap()).collect();
    assert!(left.is_empty(), "no piece of a file is left: {left:?}");
    // With room again all is kept.
    let server = Server::again(&folder, &FOLDER);
    assert_eq!(server.answer(&story(0)), (want[0].clone(), 0));
}

#[test]
fn a_cache_folder_that_cannot_be_used_is_said_once_and_gone_without() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&folder, &["--cache-disk", "m.gguf"]);
    server.answer(&story(0));
    assert!(server.answer(&story(0)).1 >= 128);
    let said = server.lines("nothing is kept on disk");
    assert!(said.len() == 1 && said[0].contains("m.gguf"), "{said:?}");
}

/// The headers of an answer to `GET /livez`.
fn headers(server: &Server) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    write!(stream, "GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply
}

#[test]
fn a_server_has_the_name_of_its_host_unless_it_is_given_one() {
    let folder = tempfile::tempdir().unwrap();
    let mut kiln = Command::new(env!("CARGO_BIN_EXE_kiln"));
    kiln.env("HOSTNAME", "pod-7");
    let plain = Server::start(&folder, &[]);
    let name = |server: &Server| {
        let reply = headers(server);
        reply
            .split("x-kiln-replica: ")
            .nth(1)
            .unwrap_or_else(|| panic!("{reply}"))
            .split('\r')
            .next()
            .unwrap()
            .to_owned()
    };
    assert!(!name(&plain).is_empty());
    assert_eq!(name(&Server::spawn(kiln, &folder, &[])), "pod-7");
    assert_eq!(name(&Server::again(&folder, &["--replica-name", "a"])), "a");
}

#[test]
fn who_is_cut_off_by_the_end_of_the_drain_shows_in_the_status() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(&folder, &["--drain", "0"]);
    let body = r#"{"prompt": "hello", "stream": true, "ignore_eos": true, "max_tokens": 8000}"#;
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json";
    write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
    assert!(lines.by_ref().any(|line| line.starts_with("data: ")));
    server.signal("TERM");
    let rest: Vec<String> = lines.collect();
    assert!(rest.iter().any(|line| line.contains("error")), "the client is told: {rest:?}");
    assert!(!rest.iter().any(|line| line.contains("[DONE]")), "half an answer is not whole");
    assert_eq!(server.ended().code(), Some(1));
    // Without anybody to cut off it ends well.
    let mut idle = Server::again(&folder, &["--drain", "0"]);
    idle.signal("TERM");
    assert_eq!(idle.ended().code(), Some(0));
}

#[test]
fn events_of_the_cache_stay_on_the_machine_unless_told() {
    let folder = tempfile::tempdir().unwrap();
    let server =
        Server::start(&folder, &["--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0"]);
    assert!(server.begun.iter().any(|line| line.contains("events of the prefix cache at tcp://127.0.0.1:")));
    let refused = |more: &[&str]| {
        let given = [&["serve", "m.gguf", "--cpu", "--port", "0"], more].concat();
        let output = Command::new(env!("CARGO_BIN_EXE_kiln")).args(given).current_dir(folder.path()).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let open = refused(&["--kv-events", "tcp://*:0"]);
    assert!(
        open.contains("tcp://0.0.0.0:0 can be reached by other machines") && open.contains("--allow-open-kv-events"),
        "{open}"
    );
    let replay = refused(&["--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://*:0"]);
    assert!(replay.contains("tcp://0.0.0.0:0 can be reached"), "{replay}");
    assert!(refused(&["--kv-events", "5557"]).contains("it looks like tcp://127.0.0.1:5557"));
}

/// Shows tools, calls and what they gave.
const TEMPLATE: &str = "{# <tool_call> #}{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n";

/// An MCP server of which Python's standard library is enough; it says its process on stderr.
const MCP_SERVER: &str = r#"
import json, os, sys
open("mcp.pid", "w").write(str(os.getpid()))
for line in sys.stdin:
    asked = json.loads(line)
    method, params = asked["method"], asked.get("params") or {}
    if "id" not in asked:
        continue
    schema = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False}
    result = {
        "initialize": {"protocolVersion": params.get("protocolVersion"), "capabilities": {"tools": {}}, "serverInfo": {"name": "kiln", "version": "1"}},
        "tools/list": {"tools": [{"name": "heat", "description": "How hot it is.", "inputSchema": schema}]},
        "tools/call": {"content": [{"type": "text", "text": f"1300 {(params.get('arguments') or {}).get('unit')}"}]},
    }[method]
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"#;

#[test]
fn tools_of_flags_and_of_the_config_file_are_listed_and_called() {
    let folder = tempfile::tempdir().unwrap();
    drop(Server::start(&folder, &[]));
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("template.jinja", TEMPLATE);
    write("mcp.py", MCP_SERVER);
    write("notes.txt", "cone 10");
    let config = "[serve]\nmcp = [\"oven=python3 mcp.py\"]\ntool-calculator = true\n";
    let mut server =
        Server::with_config(&folder, config, &["--tool-folder", ".", "--chat-template", "template.jinja", "-v"]);
    let list = server.ask("GET", "/tools", &Value::Null);
    let names: Vec<&str> = list["data"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["calculator", "list_files", "read_file", "oven__heat"], "{list}");
    let call = |name: &str, arguments: Value| {
        server.ask("POST", "/tools/call", &json!({"name": name, "arguments": arguments}))["text"].clone()
    };
    assert_eq!(call("calculator", json!({"expression": "6*7"})), "42");
    assert_eq!(call("read_file", json!({"path": "notes.txt"})), "cone 10");
    assert_eq!(call("oven__heat", json!({"unit": "F"})), "1300 F");
    let response = server.ask(
        "POST",
        "/v1/responses",
        &json!({
            "input": "How hot is it?", "temperature": 0, "max_output_tokens": 200, "parallel_tool_calls": false,
            "tools": [{"type": "mcp", "server_label": "oven", "require_approval": "never"}],
            "tool_choice": {"type": "function", "name": "oven__heat"},
        }),
    );
    let made = response["output"].as_array().unwrap().iter().find(|item| item["type"] == "mcp_call").unwrap();
    assert!(made["output"].as_str().unwrap().starts_with("1300 "), "{response}");
    assert!(server.line("info: tool ").contains("calculator"), "calls are logged");
    // What was started ends with the server.
    let process = format!("/proc/{}", std::fs::read_to_string(folder.path().join("mcp.pid")).unwrap());
    assert!(Path::new(&process).exists());
    server.signal("TERM");
    assert!(server.ended().success());
    let limit = Instant::now() + Duration::from_secs(20);
    while Path::new(&process).exists() {
        assert!(Instant::now() < limit, "the MCP server still runs");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn conversations_are_there_again_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let talk =
        json!({"id": "t1", "title": "Glazes", "made": 1, "changed": 2, "nodes": {"n": {"id": "n", "content": "hi"}}});
    let flags = ["--conversations", "kept/here"];
    let mut server = Server::start(&folder, &flags);
    assert_eq!(server.ask("GET", "/conversations", &Value::Null)["data"], json!([]));
    assert_eq!(server.ask("PUT", "/conversations/t1", &talk)["kept"], true);
    server.signal("TERM");
    assert!(server.ended().success());
    let again = Server::again(&folder, &flags);
    assert_eq!(again.ask("GET", "/conversations", &Value::Null)["data"][0]["title"], "Glazes");
    assert_eq!(again.ask("GET", "/conversations/t1", &Value::Null), talk);
    let without = Server::again(&folder, &[]);
    assert_eq!(without.ask("GET", "/conversations", &Value::Null)["kept"], false);
    // A folder that cannot be made is told before anything is loaded.
    let wrong = Command::new(env!("CARGO_BIN_EXE_kiln"))
        .args(["serve", "m.gguf", "--cpu", "--port", "0", "--conversations", "m.gguf/x"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8(wrong.stderr).unwrap();
    assert!(!wrong.status.success() && said.contains("--conversations: cannot make the folder m.gguf/x"), "{said}");
}
