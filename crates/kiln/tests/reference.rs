//! The reference pages of the book are what the program says of itself: the help of every command, the metrics and paths of a server. With
//! `KILN_UPDATE_SNAPSHOTS=1` they are written anew. Requests that the book shows are sent to the same server.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

/// Compares a page with what it should be, or writes it.
fn is_page(name: &str, text: &str) {
    let path = docs().join("reference").join(name);
    if std::env::var_os("KILN_UPDATE_SNAPSHOTS").is_some() {
        fs::write(&path, text).unwrap();
        return;
    }
    let old = fs::read_to_string(&path).unwrap_or_default();
    let at = old.lines().zip(text.lines()).position(|(was, is)| was != is);
    let line = at.unwrap_or_else(|| old.lines().count().min(text.lines().count()));
    let (was, is) = (old.lines().nth(line), text.lines().nth(line));
    assert!(
        old == text,
        "docs/reference/{name}, line {}: {was:?} should be {is:?}; write the page by\n\
         KILN_UPDATE_SNAPSHOTS=1 cargo test -p kiln --test reference",
        line + 1
    );
}

// --- the command line -----------------------------------------------------------------------------------------------

fn help(words: &[String]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
    command.args(words).arg("--help").env("COLUMNS", "100").env("HOME", "/home/you").env_remove("XDG_CONFIG_HOME");
    let output = command.env_remove("KILN_CONFIG").stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{words:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The commands that a page of help lists.
fn commands(help: &str) -> Vec<String> {
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = listed.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").map(str::to_owned).collect()
}

fn add_help(words: &[String], page: &mut String) {
    let text = help(words);
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    let level = "#".repeat(words.len().clamp(1, 2) + 1);
    let name = std::iter::once("kiln").chain(words.iter().map(String::as_str)).collect::<Vec<_>>().join(" ");
    writeln!(page, "\n{level} {name}\n\n```text\n{}\n```", lines.join("\n").trim_end()).unwrap();
    for inner in commands(&text) {
        add_help(&[words, &[inner]].concat(), page);
    }
}

#[test]
fn the_page_of_commands_is_what_help_says() {
    let mut page =
        "# All commands and flags\n\nWhat `kiln COMMAND --help` prints; a test keeps this page equal to it. \
                    [The command line](command-line.md) has the rules that all commands share.\n"
            .to_owned();
    add_help(&[], &mut page);
    is_page("commands.md", &page);
}

// --- the server -----------------------------------------------------------------------------------------------------

struct Server {
    child: Child,
    port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(folder: &TempDir, preset: &str, more: &[&str]) -> Server {
        let made = Command::new(env!("CARGO_BIN_EXE_kiln"))
            .args(["synth", preset, "F32", "model.gguf", "--force"])
            .current_dir(folder.path())
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
        command.args(["serve", "model.gguf", "--cpu", "--port", "0", "-n", "8"]).args(more).current_dir(folder.path());
        command.env_remove("KILN_API_KEY").env("KILN_CONFIG", folder.path().join("config.toml"));
        fs::write(folder.path().join("config.toml"), "").unwrap();
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let line = log.find(|line| line.contains("listening on http")).expect("the server should start");
        // What it says further is read, so that it never waits for a reader.
        std::thread::spawn(move || log.for_each(drop));
        let port = line.split("://127.0.0.1:").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
        Server { child, port }
    }

    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        // HTTP/1.0: the body comes in one piece.
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        let (head, body) = reply.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(" 200 "), "{path}: {head}");
        body.to_owned()
    }
}

/// The requests of a page, as a shell takes them: a line that begins with `curl`, and those that continue it.
fn requests(page: &str) -> Vec<String> {
    let (mut found, mut open): (Vec<String>, bool) = (Vec::new(), false);
    for line in page.lines() {
        if !open && !line.trim_start().starts_with("curl http://127.0.0.1:8080") {
            continue;
        }
        match (open, found.last_mut()) {
            (true, Some(last)) => *last = format!("{last}\n{line}"),
            _ => found.push(line.trim_start().to_owned()),
        }
        let all = found.last().unwrap();
        open = all.ends_with('\\') || all.matches('\'').count() % 2 == 1;
    }
    found
}

fn table_of_metrics(text: &str) -> String {
    let mut rows = Vec::new();
    for line in text.lines() {
        let Some((name, meaning)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) else {
            continue;
        };
        let kind = format!("# TYPE {name} ");
        let kind = text.lines().find_map(|line| line.strip_prefix(&kind)).unwrap_or("untyped");
        rows.push(format!("| `{name}` | {kind} | {} |", meaning.trim_end_matches('.')));
    }
    assert!(rows.len() > 30, "{text}");
    rows.sort();
    rows.join("\n")
}

fn table_of_paths(description: &Value) -> String {
    let mut rows = Vec::new();
    for (path, methods) in description["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            if let Some(summary) = operation["summary"].as_str() {
                let mut parts = Vec::new();
                named_parts(&operation["requestBody"], &mut parts);
                let body: Vec<_> = parts.iter().map(|part| format!("[{part}](#{})", part.to_lowercase())).collect();
                rows.push((path, method.to_uppercase(), summary, body.join(", ")));
            }
        }
    }
    assert!(rows.len() > 30, "{rows:?}");
    rows.sort_unstable();
    let rows = rows.iter().map(|(path, method, summary, body)| format!("| `{method} {path}` | {summary} | {body} |"));
    rows.collect::<Vec<_>>().join("\n")
}

/// The names of the schemas that a schema refers to, in their order.
fn named_parts<'a>(schema: &'a Value, into: &mut Vec<&'a str>) {
    match schema {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_str().and_then(|to| to.rsplit('/').next()).filter(|_| name == "$ref") {
                    Some(part) => into.push(part),
                    None => named_parts(value, into),
                }
            }
        }
        Value::Array(all) => all.iter().for_each(|value| named_parts(value, into)),
        _ => {}
    }
}

/// What a field may be, in few words.
fn kind_of(schema: &Value) -> String {
    let mut parts = Vec::new();
    named_parts(schema, &mut parts);
    let named = match &schema["type"] {
        Value::String(one) => vec![one.as_str()],
        Value::Array(all) => all.iter().filter_map(Value::as_str).filter(|kind| *kind != "null").collect(),
        _ => Vec::new(),
    };
    match (named.is_empty(), parts.is_empty()) {
        (false, _) => named.join(" or "),
        (true, false) => parts.join(" or "),
        (true, true) => "any".to_owned(),
    }
}

/// A table for each part of requests, with the fields that it has.
fn tables_of_fields(description: &Value) -> String {
    let mut page = String::new();
    for (name, schema) in description["components"]["schemas"].as_object().unwrap() {
        writeln!(page, "\n### {name}\n\n| field | type | |\n| --- | --- | --- |").unwrap();
        for (field, kind) in schema["properties"].as_object().unwrap() {
            let meaning = kind["description"].as_str().unwrap_or_default().lines().collect::<Vec<_>>().join(" ");
            writeln!(page, "| `{field}` | {} | {meaning} |", kind_of(kind)).unwrap();
        }
    }
    page
}

#[test]
fn pages_of_metrics_and_paths_are_what_a_server_says_and_its_requests_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    // Descriptions of tools have no room in this model's context: names alone are shown.
    let template = "{# <tool_call> #}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    let server = Server::start(&folder, "tiny-llama", &["--tool-calculator", "--chat-template", template]);
    let mut sent = 0;
    let has_curl = Command::new("curl").arg("--version").output().is_ok();
    for page in ["docs/serving.md", "docs/serving/tools.md", "README.md"] {
        let text = fs::read_to_string(docs().join("..").join(page)).unwrap();
        for request in requests(&text).iter().filter(|_| has_curl) {
            let request = request.replace(":8080", &format!(":{}", server.port)).replacen(
                "curl ",
                "curl -sS --fail-with-body ",
                1,
            );
            let output = Command::new("bash").args(["-c", &request]).output().unwrap();
            assert!(output.status.success(), "{page}: {request}\n{}", String::from_utf8_lossy(&output.stdout));
            sent += 1;
        }
    }
    assert!(!has_curl || sent >= 3, "{sent} requests were sent");
    if !has_curl {
        println!("there is no curl: the requests of the book were not sent");
    }
    let metrics = table_of_metrics(&server.get("/metrics"));
    let start = "# Metrics\n\n`GET /metrics` of `kiln serve`, for Prometheus. Names that begin with `vllm:` mean what they mean in vLLM, so that its dashboards \
                 work; a test keeps this page equal to what a server says.\n\n| name | kind | meaning |\n| --- | --- | --- |\n";
    is_page("metrics.md", &format!("{start}{metrics}\n"));
    let description: Value = serde_json::from_str(&server.get("/openapi.json")).unwrap();
    let start = "# Paths of the server\n\n`GET /openapi.json` describes all requests and answers, made from the types that requests are read into; \
                 [The APIs](../serving/api.md) says how they are meant. A test keeps this page equal to the description.\n\n\
                 | path | does | fields |\n| --- | --- | --- |\n";
    let fields = "\n## Fields of requests\n\nMost fields have the meaning that their API gives them. A request may have fields of all parts that its path names; one that Kiln knows and cannot serve, such as `audio`, is refused.\n";
    is_page(
        "paths.md",
        &format!("{start}{}\n{fields}{}", table_of_paths(&description), tables_of_fields(&description)),
    );
}

#[test]
fn requests_of_the_page_of_embeddings_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&folder, "bert-tiny", &["-c", "128"]);
    let text = fs::read_to_string(docs().join("embeddings.md")).unwrap();
    let requests = requests(&text);
    assert!(!requests.is_empty());
    for request in requests.iter().filter(|_| Command::new("curl").arg("--version").output().is_ok()) {
        let request =
            request.replace(":8080", &format!(":{}", server.port)).replacen("curl ", "curl -sS --fail-with-body ", 1);
        let output = Command::new("bash").args(["-c", &request]).output().unwrap();
        assert!(output.status.success(), "{request}\n{}", String::from_utf8_lossy(&output.stdout));
    }
}
